"""What goes into the next step: a row of every running answer, then prefills: the oldest, and the shortest."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fusionkv.fusion_worker.compute.forward_job import ForwardJob

# Seconds that a step with prefills waits for answers whose last token has just gone out: little beside a step of
# `max_mixed_tokens` rows, which a row that misses it waits for. A caller who reads slowly keeps steps short for as
# long as its answer lasts, and each of them waits this long for it.
_GRACE = 0.002


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """Rows `[start, stop)` of a work, to be computed in this step."""

    work: ForwardJob
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == self.work.rows


class Scheduler:
    """Thread-safe queue of works; `take` gives the engine its next step.

    Of the rows that a step has for prefills, half belong to the oldest one and the rest to those with the fewest rows
    left. So no prefill starves, and a short one doesn't wait for a long one: it takes at most twice as many steps as
    alone, plus those of shorter ones.
    """

    def __init__(self, max_step_tokens: int, max_mixed_tokens: int) -> None:
        """max_step_tokens: rows of a step. max_mixed_tokens: the same while answers are streamed."""
        self._budget = max_step_tokens
        self._mixed = min(max_mixed_tokens, max_step_tokens)
        self._decodes: list[ForwardJob] = []
        self._prefills: list[ForwardJob] = []
        self._background: list[ForwardJob] = []
        self._streams = 0
        self._lock = threading.Condition()
        self._closed = False

    def add(self, work: ForwardJob) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine has stopped")
            prefills = self._background if work.background else self._prefills
            (self._decodes if work.rows == 1 else prefills).append(work)
            self._lock.notify()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """While an answer is decoded: no step may keep it waiting for long, be its next row here or on its way."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1
                self._lock.notify()

    def close(self) -> None:
        """No more work; `take` returns None once it has been told."""
        with self._lock:
            self._closed = True
            self._lock.notify()

    def take(self) -> list[ScheduledSlice] | None:
        """Blocks for work. A prefill over the step's budget is split; the oldest goes whole if it can't be.

        Returns None after `close`.
        """
        with self._lock:
            while not (self._decodes or self._prefills or self._background or self._closed):
                self._lock.wait()
            if self._prefills or self._background:
                self._lock.wait_for(lambda: len(self._decodes) >= self._streams or self._closed, _GRACE)
            if self._closed:
                return None
            parts = [ScheduledSlice(w, 0, 1) for w in self._decodes if self._starts(w)]
            self._decodes.clear()
            left = max(1, self._mixed - len(parts)) if parts or self._streams else self._budget
            for queue in (self._prefills, self._background):
                if left > 0:
                    # Nobody waits for what is in the background: it holds no stream up by going whole.
                    taken = self._share(queue, left, whole=queue is self._prefills or not parts)
                    parts += taken
                    left -= sum(part.stop - part.start for part in taken)
            return parts

    def _share(self, queue: list[ForwardJob], rows: int, whole: bool) -> list[ScheduledSlice]:
        """Takes about `rows` rows from the prefills of a queue; those that are over, or not wanted, leave it.

        whole: whether the oldest goes even if it can't be split and is larger.
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
        """Whether the work is still wanted; from here on it counts as running."""
        if work.abandoned:
            if not work.future.cancel() and not work.future.done():
                work.future.set_exception(InterruptedError("the request was cancelled"))
            return False
        return work.future.running() or work.future.set_running_or_notify_cancel()
