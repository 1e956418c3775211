"""Somebody who may put to a cache service, and is no worker."""

from collections.abc import Sequence
from typing import Any

import torch

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient, Entry


class Stranger:
    """Whoever may call the cache service, and knows the model, the tenant and the documents; the keys it has not."""

    def __init__(self, address: str, rig: Any) -> None:
        self.client = CacheClient(address)
        self._rig = rig
        self.namespace = rig.namespace

    async def put(self, parts: Sequence[Sequence[int]], variant: bytes = b"", **more: Any) -> None:
        """Other bytes under the right key, with their own checksum."""
        storage, tokens = self._rig.servicer.loader.storage, len(parts[-1])
        other = torch.randn(storage.size(tokens) // 4, generator=torch.Generator().manual_seed(tokens))
        fields = {"base": sum(map(len, parts[:-1])), "data": other.numpy().data, **more}
        path = [keys.chunk_digest(part) for part in parts]
        names = {"namespace": self.namespace, "path": path, "variant": variant, "tokens": tokens}
        assert (await self.client.put(**{**names, **fields}, timeout=30))[1]

    async def find(self, parts: Sequence[Sequence[int]], variant: bytes = b"") -> Entry | None:
        path = [(keys.chunk_digest(part), [variant] if variant else []) for part in parts]
        return (await self.client.lookup(self.namespace, path, timeout=30)).hits[-1].entry

    async def bytes_of(self, entry: Entry) -> memoryview:
        buffer = bytearray(entry.size)
        await self.client.fetch(entry, memoryview(buffer), timeout=30)
        return memoryview(buffer)
