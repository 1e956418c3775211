"""A storage back-end of SGLang's HiCache: KV pages that SGLang's instances share, and that outlive them.

SGLang loads it as its back-end `dynamic`. Written for SGLang 0.5.23.
"""

import ctypes
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (  # pyright: ignore[reportMissingImports]
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # pyright: ignore[reportMissingImports]

from fusionkv.kvcache_service.adapters.engine_blobs import EngineBlobs, EngineOptions

log = logging.getLogger("sglang.fusionkv")
# Of the extra configuration, what SGLang itself reads.
_OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1"}


# What tells the layout of a host pool's pages.
_LOOK = ("layout", "dtype", "page_size", "size_per_token", "start_layer", "end_layer", "storage_format_tag")


class _Pages:
    """Pages of a host pool.

    If the bytes of a page lie in a few parts, each of them is a blob, sent from the pool and received into it. Any
    other page is one blob, and copied.
    """

    def __init__(self, pool: Any, name: str, config: HiCacheStorageConfig, direct: bool) -> None:
        self._pool, self._size = pool, pool.page_size
        # It gives other pools their indices, and has no bytes.
        self.empty = isinstance(pool, LogicalHostPool)
        parts: list[memoryview] = []
        if direct and not self.empty and pool.layout != "layer_first":
            with suppress(NotImplementedError):
                parts = self._parts([0])
        self._direct, self.count = bool(parts), len(parts) or 1
        rank = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
        # With MLA, all ranks have the same KV, but their own of these.
        if not config.is_mla_model or isinstance(pool, (MHATokenToKVPoolHost, MambaPoolHost)):
            rank += [config.tp_rank, config.tp_size]
        look = [str(getattr(pool, each, None)) for each in _LOOK]
        self._tag = json.dumps([str(name), type(pool).__name__, look, [*map(len, parts)], rank])

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """Of the blobs of pages: each page's parts after each other."""
        return [json.dumps([key, part, self._tag]).encode() for key in keys for part in range(self.count)]

    def whole(self, blobs: Sequence[bool]) -> list[bool]:
        """Of which pages all blobs are there."""
        return [all(blobs[at : at + self.count]) for at in range(0, len(blobs), self.count)]

    def get(self, blobs: EngineBlobs, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Which pages are now in the pool, from these indices of tokens on."""
        if (starts := self._starts(keys, indices)) is None:
            return [self.empty] * len(keys)
        copies = [] if self._direct else [self._pool.get_dummy_flat_data_page() for _ in starts]
        names, views = self.names(keys), self._parts(starts) if self._direct else [*map(_bytes, copies)]
        done = self.whole(blobs.run(lambda b: b.retrieve(names, views), [False] * len(names)))
        for start, page, is_done in zip(starts, copies, done, strict=False):
            if is_done:
                self._pool.set_from_flat_data_page(start, page)
        return done

    def set(self, blobs: EngineBlobs, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Whether the pages at these indices are stored: all of them, or an error came up."""
        if (starts := self._starts(keys, indices)) is None:
            return [self.empty] * len(keys)
        views = self._parts(starts) if self._direct else [_bytes(self._pool.get_data_page(at)) for at in starts]
        return [_store(blobs, self.names(keys), views)] * len(keys)

    def _starts(self, keys: Sequence[str], indices: torch.Tensor | None) -> list[int] | None:
        """The first index of each page; None if the pool has no bytes, or there are too many or too few tokens."""
        if self.empty or not keys or indices is None:
            return None
        return indices[:: self._size].tolist() if len(indices) == len(keys) * self._size else None

    def _parts(self, starts: Sequence[int]) -> list[memoryview]:
        tokens = torch.arange(self._size)
        found = self._pool.get_page_buffer_meta(torch.cat([tokens + start for start in starts]))
        return [memoryview(_array(size).from_address(at)).cast("B") for at, size in zip(*found, strict=True)]


class FusionKVStorage(HiCacheStorage):
    """Implements SGLang's interface. A page is found by SGLang's hash of its tokens and all before it."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any]) -> None:
        """Raises ValueError for an option that is none of `EngineOptions`, or for one that is not supported."""
        given = storage_config.extra_config or {}
        options = EngineOptions.of(
            {key: value for key, value in given.items() if key not in _OF_SGLANG},
            "hicache-storage-backend-extra-config",
        )
        if storage_config.tp_lcm_size:
            raise ValueError("tp_lcm_size is not supported: pages are shared by instances of the same tp_size")
        if not (storage_config.model_name or options.weights):
            raise ValueError("SGLang names no model: set weights")
        self._config = storage_config
        self._direct = bool(given.get("interface_v1"))
        layout = {"engine": "sglang", "version": version("sglang"), "model": storage_config.model_name}
        self._blobs = EngineBlobs(options, layout, log)
        self._pages: dict[str, _Pages] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pages[PoolName.KV] = _Pages(mem_pool_host, PoolName.KV, self._config, self._direct)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._pages[host_pool_name] = _Pages(host_pool, host_pool_name, self._config, True)

    # What is there

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        pages = self._pages[PoolName.KV]
        if pages.empty:
            return len(keys)
        names = pages.names(keys)
        return self._blobs.run(lambda blobs: blobs.prefix(names), 0) // pages.count

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        transfers = pool_transfers or []
        there = self._there(keys, [PoolName.KV, *(transfer.name for transfer in transfers)])
        pages = _leading(there[0])
        hits = {PoolName.KV: pages} if pages else {}
        restorable = [*range(1, pages + 1)]
        for transfer, of_pool in zip(transfers, there[1:], strict=True):
            usable = _restorable(transfer, of_pool[:pages])
            if usable:
                hits[transfer.name] = max(usable)
            restorable = [length for length in restorable if length in usable]
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def _there(self, keys: Sequence[str], pools: Sequence[str]) -> list[list[bool]]:
        """Which pages of pools are there, asked in one call."""
        every = [self._pages[pool] for pool in pools]
        names = [[] if pages.empty else pages.names(keys) for pages in every]
        nothing = [False] * sum(map(len, names))
        left = iter(self._blobs.run(lambda blobs: blobs.touch([name for of in names for name in of]), nothing))
        return [
            [True] * len(keys) if pages.empty else pages.whole([next(left) for _ in of])
            for pages, of in zip(every, names, strict=True)
        ]

    # To and from host pools

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._pages[PoolName.KV].get(self._blobs, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._pages[PoolName.KV].set(self._blobs, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._pages[t.name].get(self._blobs, t.keys or (), t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._pages[t.name].set(self._blobs, t.keys or (), t.host_indices) for t in transfers}

    # To and from tensors of whole pages, without `interface_v1`

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        names, views = self._pages[PoolName.KV].names(keys), [*map(_bytes, target_locations)]
        done = self._blobs.run(lambda blobs: blobs.retrieve(names, views), [False] * len(names))
        return [page if is_done else None for page, is_done in zip(target_locations, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return _store(self._blobs, self._pages[PoolName.KV].names(keys), [*map(_bytes, values)])

    def clear(self) -> None:
        """Deletes all pages of this model and tenant."""
        self._blobs.run(lambda blobs: blobs.clear(), 0)

    def close(self) -> None:
        self._blobs.close()


def _store(blobs: EngineBlobs, names: list[bytes], views: list[memoryview]) -> bool:
    return blobs.run(lambda b: b.store(names, views), None) is not None


def _leading(there: Sequence[bool]) -> int:
    return [*there, False].index(False)


def _restorable(transfer: PoolTransfer, there: Sequence[bool]) -> set[int]:
    """With how many pages a prefix may end, of those that are there in one pool."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return {*range(1, _leading(there) + 1)}
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
        return {end for end in range(1, len(there) + 1) if all(there[max(0, end - window) : end])}
    raise ValueError(f"the hit policy {transfer.hit_policy} is not supported")


def _bytes(page: torch.Tensor) -> memoryview:
    return page.view(-1).view(torch.uint8).numpy().data


@functools.cache
def _array(size: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * size  # each time another type, which is never freed
