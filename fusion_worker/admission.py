"""Admission control: runs a request, queues it, or refuses it when the queue is full or its deadline can't be met."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fusionkv.fusion_worker import meters
from fusionkv.protos.runtime.errors import ResourceExhausted

# Weight of the latest measurement in a moving average.
_SMOOTHING = 0.2
_MIN_RETRY_SECONDS = 0.1


class Admission:
    """Limits how many requests run and wait at once.

    Moving averages of the time that a request runs, and of its time to first token, predict the wait of the next one.
    """

    def __init__(self, places: int, queue: int) -> None:
        """places: maximum number of running requests. queue: maximum number of waiting requests."""
        self._places = places
        self._queue = queue
        self._free = asyncio.Semaphore(places)
        self._held: float | None = None
        self._first: float | None = None
        self.waiting = 0
        self.running = 0

    @asynccontextmanager
    async def place(self, seconds_left: float | None) -> AsyncIterator[None]:
        """Waits for a free place in order of arrival, and holds it while the context is open.

        seconds_left: seconds until the caller's deadline; None without one.

        Raises:
            ResourceExhausted: the queue is full, or the first token is not expected within `seconds_left`. Never
                raised while a place is free: a prediction that is too high is then corrected by running requests.
        """
        if self._free.locked():
            self._check(seconds_left)
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        began = time.perf_counter()
        try:
            yield
        finally:
            self._held = _averaged(self._held, time.perf_counter() - began)
            self.running -= 1
            self._free.release()

    def first_token(self, seconds: float) -> None:
        """Records the time from admission to the first token."""
        self._first = _averaged(self._first, seconds)

    def _check(self, seconds_left: float | None) -> None:
        # Mean seconds until the next place becomes free.
        each = (self._held or 0.0) / self._places
        if self.waiting >= self._queue:
            meters.refused("queue")
            after = max(_MIN_RETRY_SECONDS, each)
            raise ResourceExhausted(
                f"{self.waiting} requests are already waiting: try again later", retry_after=after
            )
        expected = (self.waiting + 1) * each + (self._first or 0.0)
        if seconds_left is not None and expected > seconds_left:
            meters.refused("deadline")
            raise ResourceExhausted(
                f"{self.waiting} requests are already waiting: the first token is expected in {expected:.1f} s, "
                f"and the deadline is in {seconds_left:.1f} s",
                retry_after=max(_MIN_RETRY_SECONDS, expected - seconds_left),
            )


def _averaged(before: float | None, value: float) -> float:
    """An exponential moving average with another measurement; None before the first one."""
    return value if before is None else before + _SMOOTHING * (value - before)
