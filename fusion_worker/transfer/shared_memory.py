"""Entries in the memory of a cache service on this machine: copied once, from there into the pool's slots."""

import asyncio
import ctypes

import numpy as np
import torch

from fusionkv.fusion_worker.compute.kv_pool import PooledChunk
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.cancellation import to_the_end


async def copied(cache: CacheClient, entry: Entry, storage: Storage, resident: PooledChunk) -> bool:
    """Writes a leased entry to a chunk's slots; False if it has to be fetched: out of sight, or the lease ended.

    A GPU's bytes come from pinned memory, which the service's is not: the driver would copy them once more.
    """
    data = cache.seen(entry)
    if data is None or storage.device.type != "cpu":
        return False

    def copy() -> bool:
        storage.put_in(resident, _tensor(data))
        if cache.held(entry):
            return True
        # What was read may be anything, and attention reads a NaN through a weight of 0 (KVPool.of).
        storage.put_in(resident, torch.zeros(entry.size, dtype=torch.uint8))
        return False

    # Also when the caller is cancelled: the slots are not to be given away while they are written to.
    return await to_the_end(asyncio.to_thread(copy))


def _tensor(data: memoryview) -> torch.Tensor:
    """uint8 [len(data)] where the bytes lie, to be read while `data` is. torch warns of memory that is read-only."""
    address = np.frombuffer(data, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(data)).from_address(address), dtype=torch.uint8)
