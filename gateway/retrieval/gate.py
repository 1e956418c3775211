"""Who may change a corpus: many change documents of it at once, and whoever deletes it is alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Belongs to one event loop. Whoever waits to be alone comes before all who come later."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._waiting = 0

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._inside)
                yield
        finally:
            self._waiting -= 1
            async with self._changed:
                self._changed.notify_all()
