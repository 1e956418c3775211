"""Schedules jobs: a row of every running answer first, then prefill rows of the oldest and the shortest requests."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fusionkv.fusion_worker.compute.jobs import ForwardJob

# Seconds that a step waits for the next row of an answer whose last token has just been sent. That is short compared
# with a step, for which a row that misses this one would wait. A slow reader's answer keeps steps short while it
# lasts, and makes each of them wait this long.
_GRACE_SECONDS = 0.002


@dataclass(slots=True, eq=False)
class QueuedJob:
    """A job, and how far it is.

    Attributes:
        background: whether it runs after all prefills of waiting requests.
        done: number of rows taken by steps so far.
        abandoned: whether the request was cancelled.
        future: the job's result.
    """

    job: ForwardJob[Any]
    background: bool = False
    done: int = 0
    abandoned: bool = False
    future: "Future[Any]" = field(default_factory=Future)

    @property
    def left(self) -> int:
        """Number of rows that no step has taken yet."""
        return self.job.rows - self.done

    @property
    def splittable(self) -> bool:
        return self.job.output.splittable

    def starts(self) -> bool:
        """Marks the job as running; False if it was cancelled."""
        if self.abandoned:
            if not self.future.cancel() and not self.future.done():
                self.future.set_exception(InterruptedError("the request was cancelled"))
            return False
        return self.future.running() or self.future.set_running_or_notify_cancel()


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """Rows `[start, stop)` of a job, to be computed in this step."""

    queued: QueuedJob
    start: int
    stop: int

    @property
    def job(self) -> ForwardJob[Any]:
        return self.queued.job

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def last(self) -> bool:
        """Whether it has the job's last row."""
        return self.stop == self.job.rows


class Scheduler:
    """A thread-safe queue of jobs; `take` returns the engine's next step.

    Half of a step's prefill rows go to the oldest job, the rest to the jobs with the fewest rows left. No prefill
    starves, and a short one does not wait for a long one: it takes at most twice as many steps as alone, plus those
    of shorter ones.
    """

    def __init__(self, max_step_tokens: int, max_mixed_tokens: int, alone: bool = False) -> None:
        """Maximum rows of a step, and of a step while answers are being decoded.

        alone: whether each step has rows of one job, as many as that job makes them, so that a matrix product rounds
            in the same way whatever else runs.
        """
        self._alone, self._prefill_next = alone, False
        self._budget = max_step_tokens
        self._mixed = min(max_mixed_tokens, max_step_tokens)
        self._decodes: list[QueuedJob] = []
        self._prefills: list[QueuedJob] = []
        self._background: list[QueuedJob] = []
        self._streams = 0
        self._lock = threading.Condition()
        self._closed = False

    def add(self, queued: QueuedJob) -> None:
        """Queues a job. Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine has stopped")
            prefills = self._background if queued.background else self._prefills
            (self._decodes if queued.job.rows == 1 else prefills).append(queued)
            self._lock.notify()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Limits steps to `max_mixed_tokens` rows while an answer is decoded, even if its next row is not queued."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1
                self._lock.notify()

    def close(self) -> None:
        """Stops the queue: `add` raises and `take` returns None, behind which every queued job has failed."""
        with self._lock:
            self._closed = True
            self._lock.notify()

    def take(self) -> list[ScheduledSlice] | None:
        """Waits for jobs and returns the slices of the next step; None after `close`.

        A prefill that exceeds the step's rows is split. If the oldest can't be split, it is taken whole.
        """
        with self._lock:
            while not (self._decodes or self._prefills or self._background or self._closed):
                self._lock.wait()
            if self._alone and not self._closed:
                return self._take_one()
            self._gather()
            if self._closed:
                # Callers that are cancelled wait for a job that runs, and no step would end it any more.
                for queued in (*self._decodes, *self._prefills, *self._background):
                    if queued.starts():  # unless its caller is cancelled just now
                        queued.future.set_exception(RuntimeError("the engine has stopped"))
                return None
            slices = [ScheduledSlice(queued, 0, 1) for queued in self._decodes if queued.starts()]
            self._decodes.clear()
            rows = max(1, self._mixed - len(slices)) if slices or self._streams else self._budget
            for queue in (self._prefills, self._background):
                if rows > 0:
                    # A background job is not taken whole when that would delay running answers.
                    shared = self._share(queue, rows, whole=queue is self._prefills or not slices)
                    slices += shared
                    rows -= sum(one.rows for one in shared)
            return slices

    def _take_one(self) -> list[ScheduledSlice]:
        """The next slice of one job: of an answer and of a prefill in turn, if there are both."""
        decodes_first = [self._decodes, self._prefills, self._background]
        queues = [self._prefills, self._decodes, self._background] if self._prefill_next else decodes_first
        for queue in queues:
            while queue:
                first = queue[0]
                if not first.starts():
                    queue.pop(0)
                    continue
                rows = min(first.left, self._mixed) if first.splittable else first.left
                taken = ScheduledSlice(first, first.done, first.done + rows)
                first.done = taken.stop
                if taken.last:
                    queue.pop(0)
                self._prefill_next = queue is self._decodes
                return [taken]
        return []

    def _gather(self) -> None:
        """Waits for the next rows of all running answers, as long as each arrives in time."""
        while (missing := self._streams - len(self._decodes)) > 0 and not self._closed:
            if not self._lock.wait_for(partial(self._arrived, missing), _GRACE_SECONDS):
                break

    def _arrived(self, missing: int) -> bool:
        """Whether fewer rows than `missing` of running answers are missing now."""
        return self._closed or self._streams - len(self._decodes) < missing

    def _share(self, queue: list[QueuedJob], rows: int, whole: bool) -> list[ScheduledSlice]:
        """Takes about `rows` rows from a queue of prefills, and removes finished and cancelled jobs.

        whole: whether to take the oldest job if it can't be split and is larger.
        """
        queue[:] = [queued for queued in queue if not queued.abandoned or queued.starts()]
        if not queue:
            return []
        oldest, others = queue[0], sorted(queue[1:], key=lambda queued: queued.left)
        share = rows - rows // 2 if others else rows
        goes = whole or oldest.left <= rows
        counts = {oldest: min(oldest.left, share) if oldest.splittable else oldest.left * goes}
        free = rows - counts[oldest]
        for queued in others:
            if free > 0 and (queued.splittable or queued.left <= free):
                counts[queued] = min(queued.left, free)
                free -= counts[queued]
        if oldest.splittable:
            counts[oldest] += min(oldest.left - counts[oldest], free)
        slices = [
            ScheduledSlice(queued, queued.done, queued.done + count)
            for queued, count in counts.items()
            if count and queued.starts()
        ]
        for one in slices:
            one.queued.done = one.stop
        queue[:] = [queued for queued in queue if queued.left and not queued.future.cancelled()]
        return slices
