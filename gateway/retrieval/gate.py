"""A lock for a corpus's changes: shared by changes of documents, exclusive for its deletion."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """A shared and exclusive lock for one event loop. A waiting exclusive user comes before later shared ones."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._waiting = 0

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
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
    async def exclusive(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._inside)
                yield
        finally:
            self._waiting -= 1
            async with self._changed:
                self._changed.notify_all()
