"""What a Lookup finds in a slow tier: taken up into memory while the caller does something else."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from fusionkv.kvcache_service.store.entries import StoredEntry

# Lookups whose entries are taken up at the same time, each by one of the store's eight threads: the other threads are
# left to those who wait.
_MOST = 4


class Prefetcher:
    """Belongs to the event loop of the store. An entry rises only where a Fetch would bring it up as well."""

    def __init__(self, promote: Callable[[bytes], Awaitable[bool]]) -> None:
        """promote: brings an entry up to a fast tier, by its key."""
        self._promote = promote
        self.running: set[asyncio.Task[None]] = set()

    def soon(self, entries: Sequence[StoredEntry]) -> None:
        """Takes up entries of one Lookup, one after another while they are leased; none if too many Lookups wait."""
        if entries and len(self.running) < _MOST:
            task = asyncio.create_task(self._rise(entries))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    def close(self) -> None:
        """Takes up no more; a read that is under way goes on to its end."""
        for task in self.running:
            task.cancel()

    async def _rise(self, entries: Sequence[StoredEntry]) -> None:
        for entry in entries:
            if entry.leases:  # or its caller has what it came for
                await self._promote(entry.record.key)
