"""An asyncio semaphore that admits the waiter with the lowest number first."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PrioritySemaphore:
    """Admits up to `limit` holders at a time. Use it only in the event loop's thread."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Waits for a place, and holds it while the context is open. Equal numbers are served in order of arrival."""
        if self._free:
            self._free -= 1
        else:
            let_in = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (number, next(self._arrivals), let_in))
            try:
                await let_in
            except asyncio.CancelledError:
                if not let_in.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            let_in = heapq.heappop(self._waiting)[2]
            if not let_in.done():
                let_in.set_result(None)
                return
        self._free += 1
