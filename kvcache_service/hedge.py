"""When a slow lookup is asked of another service as well: after several times as long as usual, and seldom."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from opentelemetry import metrics

T = TypeVar("T")
_meter = metrics.get_meter(__name__)
_hedged = _meter.create_counter("fusionkv.worker.hedged", description="Lookups asked of a second service")
# Of all lookups so many may be asked twice, and so many at once after a quiet time.
SHARE, BURST = 0.05, 5.0
# Seconds that a lookup takes, until that is known, and at most; so many times that is waited for, and
# so long at least.
_FIRST_USUAL, _MOST_USUAL, _PATIENCE, _LEAST = 0.05, 1.0, 4.0, 0.02
# How much each one says of the next.
_SMOOTHING = 0.1


class Hedge:
    """Belongs to one event loop. Knows how long a lookup usually takes, and how many more may be asked twice."""

    def __init__(self) -> None:
        self._usual = _FIRST_USUAL
        self._allowed = 0.0
        self._late: set[asyncio.Task[None]] = set()

    async def first(
        self,
        asking: Coroutine[Any, Any, T],
        again: Callable[[], Coroutine[Any, Any, T] | None],
        unused: Callable[[T], Awaitable[None]],
    ) -> T:
        """What `asking` answers; or what `again` does, if that is long in coming, and there is whom to ask again.

        The answer that is not taken is given to `unused`, if it comes. Raises what `asking` raises, if both fail.
        """
        self._allowed = min(BURST, self._allowed + SHARE)
        began = time.monotonic()
        one = asyncio.create_task(asking)
        asked, winner = [one], one
        try:
            done, _ = await asyncio.wait(asked, timeout=max(_LEAST, _PATIENCE * self._usual))
            if not done and self._allowed >= 1.0 and (other := again()) is not None:
                self._allowed -= 1.0
                _hedged.add(1)
                asked.append(asyncio.create_task(other))
            waiting = set(asked)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if good := [task for task in done if task.exception() is None]:
                    winner = good[0]
                    break
            self._usual += _SMOOTHING * (min(time.monotonic() - began, _MOST_USUAL) - self._usual)
            return await winner
        finally:
            for task in asked:
                if task is not winner or not task.done():
                    self._drop(task, unused)

    async def close(self) -> None:
        """What is still waited for is not any more."""
        for late in self._late:
            late.cancel()

    def _drop(self, task: "asyncio.Task[T]", unused: Callable[[T], Awaitable[None]]) -> None:
        async def wait() -> None:
            await asyncio.wait([task])
            if task.exception() is None:
                await unused(task.result())

        late = asyncio.create_task(wait())
        self._late.add(late)
        late.add_done_callback(self._late.discard)
