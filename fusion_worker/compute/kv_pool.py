"""The paged KV pool on the device: chunk pages shared by requests, and fresh pages of single requests.

Only the event loop's thread allocates and frees; the engine and loader threads write only to allocated slots. Each
slot has one owner:

    free      in `_free`
    chunk     in a PooledChunk's runs; written once by its loader, then read only; evictable while it has no pins
    fresh     in the runs that `reserve` returned, until `release`
"""

import asyncio
import bisect
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusionkv.fusion_worker.models import KVShape, Model
from fusionkv.kernels.segments import KVSegment
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


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Contiguous slots `[start, start + length)`."""

    start: int
    length: int


@dataclass(slots=True, eq=False)
class PooledChunk:
    """A chunk's KV in the pool. `ready` is set once the KV is written, or to the error if loading fails.

    freed: on a GPU, an event after the last kernel that may use what its slots held before; None if nothing did.
    """

    key: bytes
    tokens: int
    base: int
    runs: tuple[SlotRange, ...]
    ready: "asyncio.Future[None]"
    freed: torch.cuda.Event | None = None
    pins: int = 0


@dataclass(slots=True)
class KVPool:
    """Slots, each with the KV of one token, allocated in runs of whole pages.

    setting: the name of the setting of its size, for messages.
    turn: the turn to allocate, first come first served. Only its holder waits for room while it holds pins, so the
        slots that it waits for belong to running requests and copies, which end. Two such waiters could deadlock.
    """

    shape: KVShape
    page_tokens: int
    kv: torch.Tensor
    setting: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _free: list[SlotRange] = field(default_factory=list)
    _chunks: "OrderedDict[bytes, PooledChunk]" = field(default_factory=OrderedDict)
    _hidden: set[PooledChunk] = field(default_factory=set)
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
        slots = pages * page_tokens
        kv = _zeros((shape.layers, shape.tensors, slots + 1, shape.kv_heads, shape.head_dim), shape.dtype, device)
        return cls(shape, page_tokens, kv, setting, [SlotRange(0, slots)])

    def own(self, model: Model) -> list[Any]:
        """The objects that each rank has its own copy of (`TPGroup.own`)."""
        return [self, self.kv, model, model.rotations]

    def slots_for(self, tokens: int) -> int:
        """Number of slots that `tokens` tokens take, in whole pages."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    @property
    def capacity(self) -> int:
        return self.kv.shape[2] - 1

    @property
    def scratch(self) -> int:
        """A slot that is never allocated, for rows whose KV nobody reads."""
        return self.capacity

    @property
    def idle(self) -> int:
        """Number of slots of chunks without pins, which can be evicted."""
        return sum(self.slots_for(chunk.tokens) for chunk in self._evictable())

    @property
    def free(self) -> int:
        return sum(run.length for run in self._free)

    async def room(self, new: Sequence[int], pinned: Sequence[int] = ()) -> None:
        """Waits until runs of all token counts `new` can be allocated, beside the caller's `pinned` chunks.

        Raises:
            ResourceExhausted: they don't fit even an empty pool.
        """
        need = sum(map(self.slots_for, new))
        total = need + sum(map(self.slots_for, pinned))
        if total > self.capacity:
            raise ResourceExhausted(
                f"the request needs {total} tokens of KV and the pool holds {self.capacity}: raise "
                f"{self.setting} to {total * self.shape.token_bytes}, or send a shorter prompt"
            )
        # `idle` visits every chunk of the pool, so it is computed only if the free slots do not suffice.
        while self.free < need and self.free + self.idle < need:
            self._changed.clear()
            await self._changed.wait()

    def find(self, key: bytes) -> PooledChunk | None:
        """The pool's chunk of this key, pinned, or None."""
        pooled = self._chunks.get(key)
        if pooled is None or (pooled.ready.done() and pooled.ready.exception() is not None):
            return None
        self.pin(pooled)
        return pooled

    def add(self, key: bytes, tokens: int, base: int) -> PooledChunk:
        """Allocates a chunk, pinned and not ready: the caller loads it and completes `ready`.

        Raises:
            ResourceExhausted: no room; can't happen after `room`.
        """
        runs, ready = self._take(tokens), asyncio.get_running_loop().create_future()
        pooled = PooledChunk(key, tokens, base, runs, ready, self._freed, pins=1)
        # Waiters see the failure; without any, the event loop must not report it as never retrieved.
        pooled.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        if (failed := self._chunks.get(key)) is not None:
            self.hide(failed)
        self._chunks[key] = pooled
        return pooled

    def pin(self, pooled: PooledChunk) -> None:
        pooled.pins += 1
        if self._chunks.get(pooled.key) is pooled:
            self._chunks.move_to_end(pooled.key)

    def unpin(self, pooled: PooledChunk) -> None:
        pooled.pins -= 1
        ready = pooled.ready.done() and pooled.ready.exception() is None
        if pooled.pins == 0 and (not ready or pooled in self._hidden):
            self._drop(pooled)
        self._changed.set()

    def hide(self, pooled: PooledChunk) -> None:
        """Makes `find` miss the chunk from now on; its slots become free with its last pin."""
        if self._chunks.get(pooled.key) is pooled:
            del self._chunks[pooled.key]
            self._hidden.add(pooled)

    def clear(self) -> None:
        """Evicts every chunk without pins."""
        for pooled in self._evictable():
            self._drop(pooled)

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

        Raises:
            AssertionError: a check failed.
        """
        chunks = (*self._chunks.values(), *self._hidden)
        owned = sorted([*self._free, *(run for r in chunks for run in r.runs)], key=lambda r: r.start)
        for a, b in itertools.pairwise(owned):
            assert a.start + a.length <= b.start, f"{a} and {b} overlap"
        assert sum(run.length for run in owned) + self._fresh == self.capacity, "slots were lost or given out twice"
        assert all(r.pins >= 0 for r in chunks), "a chunk was unpinned twice"
        if idle:
            assert self._fresh == 0, f"{self._fresh} fresh slots are still reserved"
            assert not any(r.pins for r in chunks), "a chunk is still pinned"

    def _evictable(self) -> list[PooledChunk]:
        """Chunks without pins, the least recently used first."""
        return [r for r in self._chunks.values() if r.pins == 0 and r.ready.done()]

    def _drop(self, pooled: PooledChunk) -> None:
        if self._chunks.get(pooled.key) is pooled:
            del self._chunks[pooled.key]
        self._hidden.discard(pooled)
        self._give(pooled.runs)

    def _take(self, tokens: int) -> tuple[SlotRange, ...]:
        need = self.slots_for(tokens)
        idle = [] if self.free >= need else self._evictable()
        while self.free < need:
            if not idle:
                raise ResourceExhausted(f"the KV pool has no room for {tokens} tokens")
            self._drop(idle.pop(0))
        fits = [run for run in self._free if run.length >= need]
        if fits:
            best = min(fits, key=lambda run: run.length)
            return (self._cut(best, need),) if need else ()
        taken: list[SlotRange] = []
        while need:
            largest = max(self._free, key=lambda run: run.length)
            taken.append(self._cut(largest, min(largest.length, need)))
            need -= taken[-1].length
        return tuple(taken)

    def _cut(self, run: SlotRange, length: int) -> SlotRange:
        at = self._free.index(run)
        self._free[at : at + 1] = [SlotRange(run.start + length, run.length - length)] if run.length > length else []
        return SlotRange(run.start, length)

    def _give(self, runs: Sequence[SlotRange]) -> None:
        if self.kv.is_cuda:  # the last step that uses the slots has been launched, and may still run
            self._freed = torch.cuda.Event()
            self._freed.record(torch.cuda.default_stream(self.kv.device))
        for run in runs:
            at = bisect.bisect_left(self._free, run.start, key=lambda r: r.start)
            if at < len(self._free) and run.start + run.length == self._free[at].start:
                run = SlotRange(run.start, run.length + self._free.pop(at).length)
            if at and self._free[at - 1].start + self._free[at - 1].length == run.start:
                before = self._free.pop(at - 1)
                run, at = SlotRange(before.start, before.length + run.length), at - 1
            self._free.insert(at, run)
        self._changed.set()


def slots_of(runs: Sequence[SlotRange]) -> torch.Tensor:
    """int64: every slot of the runs, in order."""
    return torch.cat([torch.arange(run.start, run.start + run.length) for run in runs])


def behind(runs: Sequence[SlotRange], count: int) -> tuple[SlotRange, ...]:
    """The runs without their first `count` slots."""
    left: list[SlotRange] = []
    for run in runs:
        skipped = min(count, run.length)
        count -= skipped
        if run.length > skipped:
            left.append(SlotRange(run.start + skipped, run.length - skipped))
    return tuple(left)


def lay_out(positions: torch.Tensor, runs: Sequence[SlotRange]) -> tuple[KVSegment, ...]:
    """Segments of tokens at ascending `positions` that fill `runs` in order; consecutive positions are implicit."""
    segments: list[KVSegment] = []
    at = 0
    for run in runs:
        part = positions[at : at + run.length]
        if len(part) == 0:
            break
        first = int(part[0])
        dense = int(part[-1]) - first + 1 == len(part)
        segments.append(KVSegment(run.start, len(part), first, positions=None if dense else part))
        at += len(part)
    return tuple(segments)


def stretches(
    runs: Sequence[SlotRange], count: int, first: int, shift: int, hidden: torch.Tensor | None = None
) -> tuple[KVSegment, ...]:
    """Segments of the first `count` slots of `runs`, for consecutive tokens from position `first`.

    shift: how far keys are moved from the positions where they were rotated. hidden: bool [count], or None.
    """
    at, segments = 0, list[KVSegment]()
    for run in runs:
        length = min(run.length, count - at)
        if length <= 0:
            break
        unseen = None if hidden is None else hidden[at : at + length]
        segments.append(KVSegment(run.start, length, first + at, shift, hidden=unseen))
        at += length
    return tuple(segments)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not uninitialised memory: a NaN in a slot would remain NaN at an attention weight of 0.

    On a CPU the pages come zeroed from the kernel and take memory once written; torch would write all of them.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)
