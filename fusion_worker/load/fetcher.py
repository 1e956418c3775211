"""Fetches the bytes of chunks from the cache service into the pool: directly, through shared memory, or by gRPC."""

import asyncio
from contextlib import suppress
from functools import partial

import torch
from opentelemetry import trace

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.models import Ranks
from fusionkv.fusion_worker.prompt import LoadedChunk
from fusionkv.fusion_worker.transfer.gpudirect import DirectReader
from fusionkv.fusion_worker.transfer.signatures import DELETE_SECONDS, Signer
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.cancellation import to_the_end
from fusionkv.protos.runtime.errors import ServiceError


class Fetcher:
    """Reads entries of the cache service into slots of the pool."""

    def __init__(
        self, config: WorkerConfig, storage: Storage, cache: CacheClient | None, signer: Signer | None, ranks: Ranks
    ) -> None:
        """cache: None if there is nothing to fetch. signer: verifies what is fetched; None accepts all."""
        self._storage = storage
        self._cache = cache
        self._signer = signer
        self.timeout = min(config.fetch_timeout, config.cache_seconds)
        # GPUDirect bypasses host memory, where signatures are verified and from which ranks get their heads.
        direct = cache and signer is None and ranks.count == 1
        self._direct = DirectReader.find(storage.rank) if direct else None

    async def fetch(self, part: LoadedChunk) -> None:
        """Fetches a part's bytes into its slots. Raises as `CacheClient.fetch` and `Signer.verify` do."""
        entry = part.source.entry
        assert entry is not None
        assert self._cache is not None
        buffer = await self._direct.fetch(self._cache, entry, self.timeout) if self._direct else None
        trace.get_current_span().set_attribute("fusionkv.direct", buffer is not None)
        # Signatures are verified on a copy: the service may write to shared memory at any time.
        near = buffer is None and self._signer is None
        if near and await self._storage.copy_in(self._cache, entry, part.pooled):
            return
        if buffer is None:
            empty = partial(torch.empty, entry.size, dtype=torch.uint8, pin_memory=self._storage.pool.kv.is_cuda)
            buffer = await asyncio.to_thread(empty)  # pinning memory takes milliseconds
            await self._cache.fetch(entry, buffer.numpy().data, timeout=self.timeout)
            if self._signer is not None:
                await self._signer.verify(self._cache, entry, buffer.numpy().data)
        # Runs to its end as well.
        await to_the_end(asyncio.to_thread(self._storage.put_in, part.pooled, buffer))

    def leased(self, part: LoadedChunk) -> bool:
        """Whether the cache service has to have a part's entry; True for a part without an entry.

        No lease covers an entry of the remote tier, and one may end while the request waits for room: such an entry
        disappears without a fault.
        """
        entry = part.source.entry
        return entry is None or self._cache is None or (entry.tier != "remote" and self._cache.is_leased(entry))

    async def delete(self, entry: Entry) -> None:
        """Deletes an entry that is no use to anybody; an error is ignored."""
        if self._cache is not None:
            with suppress(ServiceError):
                await self._cache.delete([entry.key], timeout=DELETE_SECONDS)

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
