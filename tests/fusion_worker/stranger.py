"""Somebody who may put to a cache service, and is no worker."""

import struct
from collections.abc import Sequence
from typing import Any

import torch

from fusionkv.kernels.xxh3 import _SECRET, BLOCK_BYTES
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.checksum import PIECE_BYTES

_HALF = 2**32 - 1


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


def of_equal_checksum(data: bytes, other: bytes) -> bytes:
    """Bytes with the checksum of `data`, of which two thirds are those of `other`: XXH3 is against accidents alone.

    Within a block of 1 KiB, 16 stripes of 8 numbers, a number d below a key k adds d to one accumulator and the
    product of the halves of d ^ k to another. Of each block the last 5 stripes make up for what the others changed.
    """
    made = bytearray(data)
    for piece in range(0, len(data), PIECE_BYTES):
        # The last block of a piece has a key of its own.
        end = min(piece + PIECE_BYTES, len(data)) - BLOCK_BYTES
        for at in range(piece, end, BLOCK_BYTES):
            block = slice(at, at + BLOCK_BYTES)
            made[block] = _block(data[block], other[block])
    return bytes(made)


def _block(data: bytes, other: bytes) -> bytes:
    old, new = struct.unpack("<128Q", data), list(struct.unpack("<128Q", other))
    for lane in range(8):
        key = [struct.unpack_from("<Q", _SECRET, 8 * (stripe + lane))[0] for stripe in range(16)]
        spare = old[lane::8]
        product = sum(_product(d ^ k) for d, k in zip(spare, key, strict=True))
        product -= sum(_product(d ^ k) for d, k in zip(new[lane : 8 * 11 : 8], key, strict=False))
        low, high = product % 2**31, product % 2**64 >> 31
        least = min(high, _HALF)
        for stripe, value in ((11, 1 | low << 32), (12, 1 << 31 | least << 32), (13, 1 << 31 | (high - least) << 32)):
            new[8 * stripe + lane] = value ^ key[stripe]
        # Of a product with 0 the other factor is free.
        total = sum(spare) - sum(new[lane : 8 * 14 : 8]) - (key[14] & _HALF)
        low = total & _HALF
        new[8 * 15 + lane] = low | key[15] & ~_HALF
        new[8 * 14 + lane] = (key[14] & _HALF) | ((total - low >> 32) - (key[15] >> 32) & _HALF) << 32
    return struct.pack("<128Q", *new)


def _product(value: int) -> int:
    return (value & _HALF) * (value >> 32)
