"""Copies entries from the shared memory of a cache service on this machine straight into the pool's slots."""

import asyncio
import ctypes

import numpy as np
import torch

from fusionkv.fusion_worker.compute.kv_pool import PooledChunk
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.cancellation import to_the_end


async def copied(cache: CacheClient, entry: Entry, storage: Storage, resident: PooledChunk) -> bool:
    """Copies a leased entry to a chunk's slots; False if it is not in shared memory, or its lease ended meanwhile.

    Not used for a GPU: the service's memory is not pinned, so the driver would copy it twice.
    """
    data = cache.seen(entry)
    if data is None or storage.device.type != "cpu":
        return False

    def copy() -> bool:
        storage.put_in(resident, _tensor(data))
        if cache.held(entry):
            return True
        # The bytes read may be of another entry. A NaN among them would spoil attention even at weight 0 (KVPool.of).
        storage.put_in(resident, torch.zeros(entry.size, dtype=torch.uint8))
        return False

    # Runs to the end even if the caller is cancelled, so that the slots are not reused while they are written.
    return await to_the_end(asyncio.to_thread(copy))


def _tensor(data: memoryview) -> torch.Tensor:
    """uint8 [len(data)] over the memory of `data`, which must outlive it. Avoids torch's read-only warning."""
    address = np.frombuffer(data, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(data)).from_address(address), dtype=torch.uint8)
