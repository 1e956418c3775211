"""What goes into the next step: a row of every running answer, then prefills in the order they came."""

import threading
from collections import deque
from dataclasses import dataclass

from fusionkv.fusion_worker.engine.work import Work


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `[start, stop)` of a work, to be computed in this step."""

    work: Work
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == self.work.rows


class Scheduler:
    """Thread-safe queue of works; `take` gives the engine its next step."""

    def __init__(self, max_step_tokens: int) -> None:
        self._budget = max_step_tokens
        self._decodes: deque[Work] = deque()
        self._prefills: deque[Work] = deque()
        self._background: deque[Work] = deque()
        self._lock = threading.Condition()
        self._closed = False

    def add(self, work: Work) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine has stopped")
            prefills = self._background if work.background else self._prefills
            (self._decodes if work.rows == 1 else prefills).append(work)
            self._lock.notify()

    def close(self) -> None:
        """No more work; `take` returns None once it has been told."""
        with self._lock:
            self._closed = True
            self._lock.notify()

    def take(self) -> list[Part] | None:
        """Blocks for work. A prefill over the step's budget is split; one that can't be goes alone.

        Returns None after `close`.
        """
        with self._lock:
            while not (self._decodes or self._prefills or self._background or self._closed):
                self._lock.wait()
            if self._closed:
                return None
            parts = [Part(w, 0, 1) for w in self._decodes if self._starts(w)]
            self._decodes.clear()
            left = self._budget - len(parts)
            while left > 0 and (queue := self._prefills or self._background):
                work = queue[0]
                if not self._starts(work):
                    queue.popleft()
                    continue
                rows = work.rows - work.done
                if rows > left and not work.splittable and parts:
                    break
                count = min(rows, left) if work.splittable else rows
                parts.append(Part(work, work.done, work.done + count))
                work.done += count
                left -= count
                if work.done == work.rows:
                    queue.popleft()
            return parts

    @staticmethod
    def _starts(work: Work) -> bool:
        """Whether the work is still wanted; from here on it counts as running."""
        if work.abandoned:
            if not work.future.cancel() and not work.future.done():
                work.future.set_exception(InterruptedError("the request was cancelled"))
            return False
        return work.future.running() or work.future.set_running_or_notify_cancel()
