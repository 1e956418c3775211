"""The paged KV pool on the device: chunk pages shared by requests, and fresh pages of single requests.

Only the event loop's thread allocates and frees; the engine and loader threads write only to allocated slots. Each
slot has one owner:

    free      in `free`
    chunk     in a PooledChunk's runs; written once by its loader, then read only; evictable while it has no pins
    fresh     in the runs that `reserve` returned, until `release`
"""

import asyncio
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusionkv.fusion_worker.models import KVShape, Model
from fusionkv.fusion_worker.pool.chunks import PooledChunk, PooledChunks
from fusionkv.fusion_worker.pool.slots import FreeSlots, SlotRange
from fusionkv.protos.runtime.errors import ResourceExhausted

_CPU_BYTES = 1 << 30
# Of a GPU's memory, for what a step computes: 2 GB for 4,096 rows of a 7B model (estimated), and for CUDA graphs.
_KEPT = 0.1


def pool_size(setting: int, model: Model) -> int:
    """Bytes of a model's pool on each rank's device. setting: `pool_bytes`; 0 chooses by the memory that is free."""
    if setting or model.device.type != "cuda":
        return setting or _CPU_BYTES
    free, whole = torch.cuda.mem_get_info(model.device)
    return model.ranks.least(max(0, int(free - _KEPT * whole)), model.device)


@dataclass(slots=True)
class KVPool:
    """Slots, each with the KV of one token, allocated in runs of whole pages.

    setting: the name of the setting of its size, for messages.
    turn: the turn to allocate, first come first served. Only its holder waits for room while it holds pins, so the
        slots that it waits for belong to running requests and copies, which end. Two such waiters could deadlock.
    """

    shape: KVShape
    kv: torch.Tensor
    free: FreeSlots
    setting: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    chunks: PooledChunks = field(default_factory=PooledChunks, init=False)
    _fresh: int = 0
    _freed: torch.cuda.Event | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(
        cls, shape: KVShape, pool_bytes: int, page_tokens: int, device: torch.device, setting: str = "pool_bytes"
    ) -> "KVPool":
        """A pool of at most `pool_bytes`, and one slot: `[layers, tensors, slots, kv_heads, head_dim]` by `shape`."""
        pages = pool_bytes // (shape.token_bytes * page_tokens)
        if pages < 1:
            raise ValueError(
                f"{setting} = {pool_bytes} is less than one page of {shape.token_bytes * page_tokens} bytes"
            )
        free = FreeSlots(pages, page_tokens)
        sizes = (shape.layers, shape.tensors, free.capacity + 1, shape.kv_heads, shape.head_dim)
        return cls(shape, _zeros(sizes, shape.dtype, device), free, setting)

    @property
    def capacity(self) -> int:
        """Number of slots. One more, of this number, is never allocated: for rows whose KV nobody reads."""
        return self.free.capacity

    def slots(self, tokens: Iterable[int]) -> int:
        """Number of slots that runs of these token counts take."""
        return sum(map(self.free.needed, tokens))

    async def room(self, new: Sequence[int], pinned: Sequence[int] = ()) -> None:
        """Waits until runs of all token counts `new` can be allocated, beside the caller's `pinned` chunks.

        Raises ResourceExhausted if they don't fit even an empty pool.
        """
        need = self.slots(new)
        total = need + self.slots(pinned)
        if total > self.capacity:
            raise ResourceExhausted(
                f"the request needs {total} tokens of KV and the pool holds {self.capacity}: raise "
                f"{self.setting} to {total * self.shape.token_bytes}, or send a shorter prompt"
            )
        # `chunks.idle` visits every chunk of the pool, so it is computed only if the free slots do not suffice.
        while self.free.count < need and self.free.count + self.chunks.idle < need:
            self._changed.clear()
            await self._changed.wait()

    def add(self, key: bytes, tokens: int, base: int) -> PooledChunk:
        """Allocates a chunk, pinned and not ready: the caller loads it and completes `ready`.

        Raises ResourceExhausted without room, which can't happen after `room`.
        """
        runs, ready = self._take(tokens), asyncio.get_running_loop().create_future()
        pooled = PooledChunk(key, tokens, base, runs, ready, self._freed, pins=1)
        # Waiters see the failure; without any, the event loop must not report it as never retrieved.
        pooled.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self.chunks.add(pooled)
        return pooled

    def unpin(self, pooled: PooledChunk) -> None:
        """Ends a pin of a chunk, which goes with its last pin if it is hidden, or its load has failed."""
        if self.chunks.unpin(pooled):
            self._give(self.chunks.remove(pooled))
        self._changed.set()

    def clear(self) -> None:
        """Evicts every chunk without pins."""
        for pooled in self.chunks.evictable():
            self._give(self.chunks.remove(pooled))

    def reserve(self, tokens: int) -> tuple[SlotRange, ...]:
        """Allocates fresh slots for a request, in as few runs as the free list allows."""
        runs = self._take(tokens)
        self._fresh += sum(run.length for run in runs)
        return runs

    def release(self, runs: Sequence[SlotRange]) -> None:
        self._fresh -= sum(run.length for run in runs)
        self._give(runs)

    def check_integrity(self, idle: bool = False) -> None:
        """Checks that every slot has exactly one owner and, with `idle`, that nothing is pinned or reserved.

        Raises AssertionError if not.
        """
        chunks = [*self.chunks]
        owned = sorted([*self.free.runs, *(run for r in chunks for run in r.runs)], key=lambda r: r.start)
        for a, b in itertools.pairwise(owned):
            assert a.start + a.length <= b.start, f"{a} and {b} overlap"
        assert sum(run.length for run in owned) + self._fresh == self.capacity, "slots were lost or given out twice"
        assert all(r.pins >= 0 for r in chunks), "a chunk was unpinned twice"
        if idle:
            assert self._fresh == 0, f"{self._fresh} fresh slots are still reserved"
            assert not any(r.pins for r in chunks), "a chunk is still pinned"

    def _take(self, tokens: int) -> tuple[SlotRange, ...]:
        need = self.free.needed(tokens)
        idle = [] if self.free.count >= need else self.chunks.evictable()
        while self.free.count < need:
            if not idle:
                raise ResourceExhausted(f"the KV pool has no room for {tokens} tokens")
            self._give(self.chunks.remove(idle.pop(0)))
        return self.free.take(need)

    def _give(self, runs: Sequence[SlotRange]) -> None:
        if self.kv.is_cuda:  # the last step that uses the slots has been launched, and may still run
            self._freed = torch.cuda.Event()
            self._freed.record(torch.cuda.default_stream(self.kv.device))
        self.free.give(runs)
        self._changed.set()


def owned(pool: KVPool, model: Model) -> list[Any]:
    """The objects that each rank has its own copy of (`TPGroup.own`)."""
    return [pool, pool.kv, model, model.rotations]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not uninitialised memory: a NaN in a slot would remain NaN at an attention weight of 0.

    On a CPU the pages come zeroed from the kernel and take memory once written; torch would write all of them.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)
