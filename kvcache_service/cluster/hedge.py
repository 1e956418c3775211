"""When a lookup is asked of another service as well: if the first is dead; if it is slow, and seldom."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from opentelemetry import metrics

from fusionkv.protos.runtime.errors import DeadlineExceeded, Unavailable

T = TypeVar("T")
_meter = metrics.get_meter(__name__)
_hedged = _meter.create_counter("fusionkv.worker.hedged", description="Lookups asked of a second service")
# Of all lookups so many may be asked twice for being slow, and so many at once after a quiet time.
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
        self, asks: Iterator[Coroutine[Any, Any, T]], unused: Callable[[T], Coroutine[Any, Any, None]]
    ) -> T:
        """What the first of `asks` answers; or the next, if that is long in coming, or its service is out of reach.

        asks: each is begun when it is taken; there is at least one, and no more when nobody is left to be asked.

        Answers that are not taken are given to `unused`, if they come. Raises what the first raises, if all fail.
        """
        self._allowed = min(BURST, self._allowed + SHARE)
        began = time.monotonic()
        asked = [asyncio.create_task(next(asks))]
        waiting, winner = set(asked), None
        patience: float | None = max(_LEAST, _PATIENCE * self._usual)
        try:
            while winner is None:
                done, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    patience = None
                winner = next((task for task in done if task.exception() is None), None)
                # What is dead is no busier by another call; what is slow may be, for the same reason as the first.
                dead = any(isinstance(task.exception(), Unavailable | DeadlineExceeded) for task in done)
                wanted = winner is None and (dead or (not done and self._allowed >= 1.0))
                if wanted and (other := next(asks, None)) is not None:
                    self._allowed -= not dead
                    _hedged.add(1)
                    asked.append(asyncio.create_task(other))
                    waiting.add(asked[-1])
                if winner is None and not waiting:
                    return await asked[0]
            self._usual += _SMOOTHING * (min(time.monotonic() - began, _MOST_USUAL) - self._usual)
            return winner.result()
        finally:
            for task in asked:
                if task is not winner:
                    self._drop(task, unused)

    async def close(self) -> None:
        """What is still waited for is not any more."""
        for late in self._late:
            late.cancel()

    def _drop(self, task: "asyncio.Task[T]", unused: Callable[[T], Coroutine[Any, Any, None]]) -> None:
        async def wait() -> None:
            await asyncio.wait([task])
            if task.exception() is None:
                await unused(task.result())

        late = asyncio.create_task(wait())
        self._late.add(late)
        late.add_done_callback(self._late.discard)
