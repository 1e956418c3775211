"""Schedules steps: a row of every running answer first, then prefill rows of the oldest and the shortest requests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from fusionkv.fusion_worker.compute.forward_job import ForwardJob

# Seconds that a step waits for the next row of an answer whose last token has just been sent. That is short compared
# with a step, for which a row that misses this one would wait. A slow reader's answer keeps steps short while it
# lasts, and makes each of them wait this long.
_GRACE_SECONDS = 0.002


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

    def __init__(self, max_step_tokens: int, max_mixed_tokens: int) -> None:
        """Maximum rows of a step, and of a step while answers are being decoded."""
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
