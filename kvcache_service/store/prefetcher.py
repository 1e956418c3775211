"""Promotes entries that a Lookup found in slow tiers to memory, in the background."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from fusionkv.kvcache_service.store.entries import StoredEntry

# Lookups prefetched concurrently, each in one of the store's eight threads. The others serve calls.
_MAX_LOOKUPS = 4


class Prefetcher:
    """Runs on the store's event loop. An entry is promoted only if a Fetch would promote it too."""

    def __init__(self, promote: Callable[[bytes], Awaitable[bool]]) -> None:
        """promote: promotes an entry, by key, to a fast tier."""
        self._promote = promote
        self.running: set[asyncio.Task[None]] = set()

    def soon(self, entries: Sequence[StoredEntry]) -> None:
        """Promotes a Lookup's entries sequentially while leased; skipped if too many Lookups are being prefetched."""
        if entries and len(self.running) < _MAX_LOOKUPS:
            task = asyncio.create_task(self._rise(entries))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    def close(self) -> None:
        """Stops prefetching; a read in progress is completed."""
        for task in self.running:
            task.cancel()

    async def _rise(self, entries: Sequence[StoredEntry]) -> None:
        for entry in entries:
            if entry.leases:  # otherwise the caller no longer needs it
                await self._promote(entry.record.key)
