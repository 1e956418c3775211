"""Which rows a step takes, and whose turn it is: nobody starves, nobody waits for long."""

import random
import threading

import pytest
import torch

from fusionkv.fusion_worker.compute.jobs import ForwardJob, Logits, Nothing
from fusionkv.fusion_worker.compute.scheduler import QueuedJob, ScheduledSlice, Scheduler


def queued(rows: int, background: bool = False, whole: bool = False) -> QueuedJob:
    """whole: whether the job can't be split over steps."""
    output = Logits(2) if whole else Nothing()
    return QueuedJob(ForwardJob(torch.arange(rows), torch.arange(rows), (), (), output), background)


def finish(slices: list[ScheduledSlice]) -> None:
    for one in slices:
        if one.last:
            one.queued.future.set_result(None)


def step(scheduler: Scheduler, *added: QueuedJob) -> dict[QueuedJob, int]:
    for one in added:
        scheduler.add(one)
    slices = scheduler.take()
    assert slices is not None
    assert all(one.stop == one.queued.done for one in slices if one.job.rows > 1)
    finish(slices)
    return {one.queued: one.rows for one in slices}


def test_the_oldest_gets_half_and_the_shortest_the_rest() -> None:
    long, middle, short = queued(1000), queued(60), queued(20)
    scheduler = Scheduler(100, 100)
    assert step(scheduler, long, middle, short) == {long: 50, short: 20, middle: 30}
    assert step(scheduler) == {long: 70, middle: 30}
    assert step(scheduler) == {long: 100}


def test_a_stream_of_short_ones_starves_nobody() -> None:
    chance, long, steps, scheduler = random.Random(1), queued(2000), 0, Scheduler(64, 64)
    scheduler.add(long)
    while long.left:
        assert step(scheduler, *(queued(chance.randrange(2, 60)) for _ in range(4)))[long] >= 32 or not long.left
        steps += 1
    assert steps <= 2000 / 32 + 1


def test_steps_are_short_while_an_answer_is_streamed() -> None:
    """Also when its next row is not here: its last token is on its way to the caller."""
    long, scheduler = queued(1000), Scheduler(100, 30)
    assert step(scheduler, long) == {long: 100}
    with scheduler.streaming():
        for _ in range(3):
            assert step(scheduler) == {long: 30}
    assert step(scheduler) == {long: 100}
    for _ in range(3):
        decode = queued(1)
        assert step(scheduler, decode) == {decode: 1, long: 29}


def test_a_step_waits_for_a_stream_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionkv.fusion_worker.compute.scheduler._GRACE_SECONDS", 60.0)
    long, row, scheduler = queued(1000), queued(1), Scheduler(100, 30)
    scheduler.add(long)
    with scheduler.streaming():
        threading.Timer(0.05, scheduler.add, (row,)).start()
        assert step(scheduler) == {row: 1, long: 29}
        # A closed scheduler keeps nobody.
        threading.Timer(0.05, scheduler.close).start()
        assert scheduler.take() is None


@pytest.mark.parametrize("late", [False, True])
def test_answers_that_are_decoded_together_share_steps(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to return waits for the others, but not for one whose caller reads slowly."""
    monkeypatch.setattr("fusionkv.fusion_worker.compute.scheduler._GRACE_SECONDS", 0.5 if late else 60.0)
    first, second, third, scheduler = queued(1), queued(1), queued(1), Scheduler(100, 30)
    with scheduler.streaming(), scheduler.streaming(), scheduler.streaming():
        scheduler.add(first)
        rest = [second] if late else [second, third]
        timers = [threading.Timer(0.05 * n, scheduler.add, [one]) for n, one in enumerate(rest, 1)]
        for timer in timers:
            timer.start()
        assert list(step(scheduler)) == [first, *rest]


def test_what_cant_be_split_goes_whole_when_it_is_the_oldest() -> None:
    plain, whole, scheduler = queued(120), queued(150, whole=True), Scheduler(100, 100)
    assert step(scheduler, plain, whole) == {plain: 100}
    # Decodes in every step don't hold it up.
    assert step(scheduler, queued(1))[plain] == 20
    assert step(scheduler, queued(1))[whole] == 150


def test_background_takes_what_is_left() -> None:
    behind, wanted = queued(200, background=True), queued(70)
    assert step(Scheduler(100, 100), behind, wanted) == {wanted: 70, behind: 30}


def test_background_that_cant_be_split_holds_no_stream_up() -> None:
    behind, decode, short = queued(150, background=True, whole=True), queued(1), queued(20)
    scheduler = Scheduler(100, 100)
    assert step(scheduler, behind, decode, short) == {decode: 1, short: 20}
    assert step(scheduler) == {behind: 150}


def test_abandoned_jobs_leave() -> None:
    begun, waiting, last, fresh, scheduler = queued(300), queued(400), queued(50), queued(10), Scheduler(100, 100)
    assert step(scheduler, begun, waiting, last) == {begun: 50, last: 50}
    begun.abandoned = waiting.abandoned = True
    assert waiting.future.cancel(), "it has not begun"
    assert step(scheduler, fresh) == {fresh: 10}
    with pytest.raises(InterruptedError):
        begun.future.result(0)


@pytest.mark.parametrize("alone", [False, True])
def test_no_job_waits_for_an_engine_that_has_stopped(alone: bool) -> None:
    begun, abandoned, waiting, decode = queued(300), queued(300), queued(1000, background=True), queued(1)
    scheduler = Scheduler(100, 100, alone)
    assert step(scheduler, begun) == {begun: 100}
    abandoned.future.cancel()
    for one in (abandoned, waiting, decode):
        scheduler.add(one)
    scheduler.close()
    assert scheduler.take() is None
    for one in (begun, waiting, decode):
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            one.future.result(0)


@pytest.mark.parametrize("seed", range(5))
def test_every_row_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    scheduler = Scheduler(64, 16)
    jobs, next_row = [], {}
    for _ in range(60):
        for _ in range(chance.randrange(3)):
            rows = chance.choice([1, 1, 2, 30, 64, 65, 300])
            jobs.append(queued(rows, whole=chance.random() < 0.2, background=chance.random() < 0.2))
            scheduler.add(jobs[-1])
        if any(one.left for one in jobs if not one.future.done()):
            slices = scheduler.take()
            assert slices
            for one in slices:
                assert one.start == next_row.get(one.queued, 0)
                next_row[one.queued] = one.stop
            finish(slices)
    while any(not one.future.done() for one in jobs):
        slices = scheduler.take()
        assert slices
        finish(slices)
