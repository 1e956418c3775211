"""Copies chunks between the pool's slots and the bytes of entries, on all ranks."""

import asyncio
import ctypes
from functools import partial

import numpy as np
import torch

from fusionkv.fusion_worker.compute.engine import TPGroup
from fusionkv.fusion_worker.pool.chunks import PooledChunk
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.transfer.copies import RankCopies
from fusionkv.fusion_worker.transfer.pinned import PinnedMapping
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.cancellation import to_the_end


class Storage:
    """Each rank copies its heads of a chunk; entries have those of all ranks."""

    def __init__(self, pool: KVPool, kind: str, tp: TPGroup) -> None:
        """kind: as of `EntryFormat`."""
        self._tp = tp
        self.pool = pool
        self.rank = RankCopies(pool, kind)
        """Copies of this rank alone."""
        self.format = self.rank.format
        self._pinned = PinnedMapping(pool.kv.device)

    @property
    def lossless(self) -> bool:
        """Whether fetched KV equals stored KV."""
        return self.format.kind is None

    def size(self, tokens: int) -> int:
        """Bytes of an entry of `tokens` tokens."""
        return self.format.size(tokens, self._tp.ranks.count)

    def take_out(self, pooled: PooledChunk) -> memoryview:
        """Copies a chunk's KV out of the pool, as the bytes of an entry."""
        parts = self._tp.copy(partial(self.rank.read, pooled.runs, pooled.tokens))
        return self.format.join(parts, pooled.tokens).numpy().data

    def finite(self, pooled: PooledChunk) -> bool:
        """Whether a chunk's KV in the pool holds neither NaN nor infinity."""
        return all(map(bool, self._tp.copy(partial(self.rank.read_finite, pooled.runs, pooled.tokens))))

    def put_in(self, pooled: PooledChunk, data: torch.Tensor) -> None:
        """Writes an entry to a chunk's slots. data: uint8 [size], in host memory or on the device."""
        ranks = self._tp.ranks.count
        # Other ranks have no such event.
        after = pooled.freed if ranks == 1 else None
        write = partial(self.rank.write, pooled.runs, pooled.tokens, after=after)
        self._tp.copy(write, self.format.split(data, pooled.tokens, ranks))

    async def copy_in(self, cache: CacheClient, entry: Entry, pooled: PooledChunk) -> bool:
        """Copies a leased entry from the shared memory of a cache service on this machine to a chunk's slots.

        False if the entry is not in shared memory, or its lease ended meanwhile. For a GPU also while that memory is
        not page-locked, since the driver would copy it twice, and with several ranks.
        """
        data = cache.view(entry)
        if data is None:
            return False
        if self.pool.kv.device.type != "cpu" and not (self._tp.ranks.count == 1 and self._pinned.holds(data)):
            return False

        def copy() -> bool:
            with self._pinned.reading():
                self.put_in(pooled, _tensor(data))
            if cache.is_leased(entry):
                return True
            # The bytes read may be of another entry. A NaN among them would spoil attention even at weight 0
            # (KVPool.of).
            self.put_in(pooled, torch.zeros(entry.size, dtype=torch.uint8))
            return False

        # Runs to the end even if the caller is cancelled, so that the slots are not reused while they are written.
        return await to_the_end(asyncio.to_thread(copy))


def _tensor(data: memoryview) -> torch.Tensor:
    """uint8 [len(data)] over the memory of `data`, which must outlive it. Avoids torch's read-only warning."""
    address = np.frombuffer(data, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(data)).from_address(address), dtype=torch.uint8)
