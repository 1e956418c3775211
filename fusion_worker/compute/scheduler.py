"""Schedules jobs: a row of every running answer first, then prefill rows of the oldest and the shortest requests."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from fusionkv.fusion_worker.compute.kv_pool import SlotRange, lay_out, slots_of
from fusionkv.fusion_worker.compute.model_runner import Batch, shallow
from fusionkv.fusion_worker.decode.sampling import Sampler
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.select.base import scores
from fusionkv.fusion_worker.select.fresh_layer import FreshStates
from fusionkv.kernels.attention import Temper
from fusionkv.kernels.segments import KVSegment
from fusionkv.protos.contract.selectors import Selector

# Seconds that a step waits for the next row of an answer whose last token has just been sent. That is short compared
# with a step, for which a row that misses this one would wait. A slow reader's answer keeps steps short while it
# lasts, and makes each of them wait this long.
_GRACE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Result:
    """The requested outputs of a job; the others are None.

    Attributes:
        token: id sampled from the last row.
        logits: float32 [requested rows, vocabulary].
        scores: float32 [last position + 1], on the CPU; of a shallow probe, [selectors, last position + 1].
        votes: float32 [layers, kv_heads, last position + 1], attention of the requested rows.
    """

    token: int | None = None
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    votes: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ShallowProbe:
    """Scores tokens by their states at layer 1, and stops there.

    selectors: selectors that need `FreshLayer`. starts: as in `FreshStates`.
    """

    selectors: tuple[Selector, ...]
    starts: torch.Tensor

    @torch.inference_mode()
    def look(self, model: Model, batch: Batch) -> torch.Tensor:
        """Scores of the batch's single span, float32 [selectors, last position + 1]."""
        (span,), states = batch.spans, shallow(model, batch)
        fresh = FreshStates(states, batch.pool[1], span, model.rotations[1], self.starts, model.ranks)
        return torch.stack([scores(selector, fresh) for selector in self.selectors])


@dataclass(slots=True, eq=False)
class ForwardJob:
    """Rows to compute in one or more steps. A job is split over steps only if its output comes from its last row.

    Attributes:
        ids, positions: int64 [rows], positions ascending.
        runs: slots for the rows' KV, in row order.
        seen: segments of existing keys. The rows' own keys come from `own`.
        unstored: number of first rows whose keys are in `seen` already; their KV is not written.
        sampler: samples a token from the last row.
        logits: number of last rows to return logits of.
        probe: layers whose attention into each position is summed.
        shallow: scores each token after layer 0, where the rows then stop; None runs them through all layers.
        temper: a change of how the rows attend to the context; None for none.
        votes: number of last rows to return the attention of, by layer and KV head.
        background: whether it runs after all prefills of waiting requests.
        done: rows taken by steps so far.
        abandoned: whether the request was cancelled.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    runs: Sequence[SlotRange]
    seen: tuple[KVSegment, ...] = ()
    unstored: int = 0
    sampler: Sampler | None = None
    logits: int = 0
    probe: frozenset[int] = frozenset()
    shallow: ShallowProbe | None = None
    temper: Temper | None = None
    votes: int = 0
    background: bool = False
    done: int = 0
    abandoned: bool = False
    future: "Future[Result]" = field(default_factory=Future)

    @classmethod
    def consecutive(
        cls,
        ids: Sequence[int],
        start: int,
        runs: Sequence[SlotRange],
        seen: tuple[KVSegment, ...],
        device: torch.device,
        background: bool = False,
    ) -> "ForwardJob":
        """A job for tokens at consecutive positions from `start` on."""
        positions = torch.arange(start, start + len(ids)).to(device)
        return cls(torch.tensor(ids, dtype=torch.int64).to(device), positions, runs, seen, background=background)

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def left(self) -> int:
        """Number of rows that no step has taken yet."""
        return self.rows - self.done

    @property
    def splittable(self) -> bool:
        return not (self.probe or self.shallow or self.logits > 1 or self.votes)

    def own(self, stop: int) -> tuple[KVSegment, ...]:
        """Segments of the keys of the first `stop` rows."""
        return lay_out(self.positions[self.unstored : stop], self.runs)

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """int64: the pool slots of rows `[start, stop)` that are stored."""
        first = max(0, start - self.unstored)
        return slots_of(self.runs)[first : stop - self.unstored].to(self.ids.device)


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """Rows `[start, stop)` of a job, to be computed in this step."""

    work: ForwardJob
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == self.work.rows


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
        self._decodes: list[ForwardJob] = []
        self._prefills: list[ForwardJob] = []
        self._background: list[ForwardJob] = []
        self._streams = 0
        self._lock = threading.Condition()
        self._closed = False

    def add(self, work: ForwardJob) -> None:
        """Queues a job. Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine has stopped")
            prefills = self._background if work.background else self._prefills
            (self._decodes if work.rows == 1 else prefills).append(work)
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
        """Stops the queue: `add` raises and `take` returns None."""
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
                return None
            parts = [ScheduledSlice(w, 0, 1) for w in self._decodes if self._starts(w)]
            self._decodes.clear()
            left = max(1, self._mixed - len(parts)) if parts or self._streams else self._budget
            for queue in (self._prefills, self._background):
                if left > 0:
                    # A background job is not taken whole when that would delay running answers.
                    slices = self._share(queue, left, whole=queue is self._prefills or not parts)
                    parts += slices
                    left -= sum(part.stop - part.start for part in slices)
            return parts

    def _take_one(self) -> list[ScheduledSlice]:
        """The next slice of one job: of an answer and of a prefill in turn, if there are both."""
        decodes_first = [self._decodes, self._prefills, self._background]
        queues = [self._prefills, self._decodes, self._background] if self._prefill_next else decodes_first
        for queue in queues:
            while queue:
                work = queue[0]
                if not self._starts(work):
                    queue.pop(0)
                    continue
                part = ScheduledSlice(work, work.done, work.rows)
                if work.splittable:
                    part = ScheduledSlice(work, work.done, min(work.rows, work.done + self._mixed))
                work.done = part.stop
                if part.last:
                    queue.pop(0)
                self._prefill_next = queue is self._decodes
                return [part]
        return []

    def _gather(self) -> None:
        """Waits for the next rows of all running answers, as long as each arrives in time."""
        while (missing := self._streams - len(self._decodes)) > 0 and not self._closed:
            if not self._lock.wait_for(partial(self._arrived, missing), _GRACE_SECONDS):
                break

    def _arrived(self, missing: int) -> bool:
        """Whether fewer rows than `missing` of running answers are missing now."""
        return self._closed or self._streams - len(self._decodes) < missing

    def _share(self, queue: list[ForwardJob], rows: int, whole: bool) -> list[ScheduledSlice]:
        """Takes about `rows` rows from a queue of prefills, and removes finished and cancelled jobs.

        whole: whether to take the oldest job if it can't be split and is larger.
        """
        queue[:] = [work for work in queue if not work.abandoned or self._starts(work)]
        if not queue:
            return []
        oldest, others = queue[0], sorted(queue[1:], key=lambda work: work.left)
        share = rows - rows // 2 if others else rows
        goes = whole or oldest.left <= rows
        counts = {oldest: min(oldest.left, share) if oldest.splittable else oldest.left * goes}
        free = rows - counts[oldest]
        for work in others:
            if free > 0 and (work.splittable or work.left <= free):
                counts[work] = min(work.left, free)
                free -= counts[work]
        if oldest.splittable:
            counts[oldest] += min(oldest.left - counts[oldest], free)
        parts = [
            ScheduledSlice(w, w.done, w.done + count) for w, count in counts.items() if count and self._starts(w)
        ]
        for part in parts:
            part.work.done = part.stop
        queue[:] = [work for work in queue if work.left and not work.future.cancelled()]
        return parts

    @staticmethod
    def _starts(work: ForwardJob) -> bool:
        """Marks a job as running; False if it was cancelled."""
        if work.abandoned:
            if not work.future.cancel() and not work.future.done():
                work.future.set_exception(InterruptedError("the request was cancelled"))
            return False
        return work.future.running() or work.future.set_running_or_notify_cancel()
