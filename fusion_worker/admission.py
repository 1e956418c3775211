"""Who is worked on, who waits, and who is refused at once: when too many wait, or an answer would come too late."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fusionkv.fusion_worker import meters
from fusionkv.protos.runtime.errors import ResourceExhausted

# What the last request counts in the mean time of a request.
_PACE = 0.2
_LEAST_RETRY_SECONDS = 0.1


class Admission:
    """`places` requests at once; `queue` more may wait. How long a place is held, and how long it takes from there to
    the first token, is measured, so the wait of one more is known before it begins.
    """

    def __init__(self, places: int, queue: int) -> None:
        self._places = places
        self._queue = queue
        self._free = asyncio.Semaphore(places)
        self._held = _Mean()
        self._first = _Mean()
        self.waiting = 0
        self.running = 0

    @asynccontextmanager
    async def place(self, left: float | None) -> AsyncIterator[None]:
        """A place, as soon as it is one's turn. `left`: seconds until the caller's deadline, None without one.

        Raises:
            ResourceExhausted: too many wait, or the first token is not to be expected within `left`. Never while a
                place is free, so that a wrong expectation is set right by those that run.
        """
        if self._free.locked():
            self._check(left)
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
            self._held.add(time.perf_counter() - began)
            self.running -= 1
            self._free.release()

    def load(self) -> tuple[int, int]:
        """Requests that wait, and those that run."""
        return self.waiting, self.running

    def first_token(self, seconds: float) -> None:
        """It came so long after the place was had."""
        self._first.add(seconds)

    def _check(self, left: float | None) -> None:
        # One place becomes free in so long, on average.
        each = self._held.value / self._places
        if self.waiting >= self._queue:
            meters.refused("queue")
            after = max(_LEAST_RETRY_SECONDS, each)
            raise ResourceExhausted(f"{self.waiting} requests wait already: try again later", retry_after=after)
        expected = (self.waiting + 1) * each + self._first.value
        if left is not None and expected > left:
            meters.refused("deadline")
            raise ResourceExhausted(
                f"{self.waiting} requests wait already: the first token is to be expected in {expected:.1f} s, "
                f"and the deadline is in {left:.1f} s",
                retry_after=max(_LEAST_RETRY_SECONDS, expected - left),
            )


class _Mean:
    """Of late: what was measured first counts whole, everything after that a fifth."""

    def __init__(self) -> None:
        self.value = 0.0
        self._known = False

    def add(self, value: float) -> None:
        self.value += (_PACE if self._known else 1.0) * (value - self.value)
        self._known = True
