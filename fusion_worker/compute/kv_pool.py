"""The paged KV pool on the device: chunk pages shared by requests, fresh pages of their own.

Bookkeeping belongs to one thread, the event loop's; the engine and loader threads write only to slots that a
bookkeeping call gave out. Who owns a slot:

    free      in `_free`
    chunk     in a PooledChunk's runs; written once by its loader, then read only; evictable when nobody pins it
    fresh     in the runs that `reserve` returned, until `release`
"""

import asyncio
import bisect
import itertools
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusionkv.fusion_worker.models import KVShape, Model
from fusionkv.protos.runtime.errors import ResourceExhausted


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots `[start, start + length)`, next to each other."""

    start: int
    length: int


@dataclass(slots=True, eq=False)
class PooledChunk:
    """A chunk's KV in the pool. `ready` is set when its bytes are; it fails for all who wait when loading fails."""

    key: bytes
    tokens: int
    base: int
    runs: tuple[SlotRange, ...]
    ready: "asyncio.Future[None]"
    pins: int = 0


@dataclass(slots=True, weakref_slot=True)
class KVPool:
    """Slots of KV for one token each, given out in runs of whole pages."""

    shape: KVShape
    page_tokens: int
    pages: int
    kv: torch.Tensor
    _free: list[SlotRange] = field(default_factory=list)
    _residents: "OrderedDict[bytes, PooledChunk]" = field(default_factory=OrderedDict)
    _hidden: set[PooledChunk] = field(default_factory=set)
    _fresh: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, shape: KVShape, pool_bytes: int, page_tokens: int, device: torch.device) -> "KVPool":
        """A pool of at most `pool_bytes`. Its tensor is `[layers, 2, slots, kv_heads, head_dim]`."""
        pages = pool_bytes // (shape.token_bytes * page_tokens)
        if pages < 1:
            raise ValueError(
                f"pool_bytes = {pool_bytes} is less than one page of {shape.token_bytes * page_tokens} bytes"
            )
        slots = pages * page_tokens
        kv = _zeros((shape.layers, 2, slots, shape.kv_heads, shape.head_dim), shape.dtype, device)
        return cls(shape, page_tokens, pages, kv, [SlotRange(0, slots)])

    def own(self, model: Model) -> list[Any]:
        """What each of several ranks has of its own (`TPGroup.own`)."""
        return [self, self.kv, model, model.rotations]

    def slots_for(self, tokens: int) -> int:
        """Slots that `tokens` tokens take: whole pages."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    @property
    def capacity(self) -> int:
        return self.pages * self.page_tokens

    @property
    def idle(self) -> int:
        """Slots of chunks that nobody pins."""
        return sum(self.slots_for(r.tokens) for r in self._residents.values() if r.pins == 0 and r.ready.done())

    @property
    def free(self) -> int:
        return sum(run.length for run in self._free)

    @asynccontextmanager
    async def admission(self) -> AsyncIterator[None]:
        """The turn to take room, first come first served.

        Only its holder pins chunks and waits for room, so what it waits for is held by requests that run, and they
        end. Two waiters with pins of their own could wait for each other for ever.
        """
        async with self._turn:
            yield

    async def room(self, new: Sequence[int], pinned: Sequence[int] = ()) -> None:
        """Waits until runs of the token counts `new` can all be taken, beside the caller's `pinned` chunks.

        Raises:
            ResourceExhausted: they don't fit even an empty pool.
        """
        need = sum(map(self.slots_for, new))
        total = need + sum(map(self.slots_for, pinned))
        if total > self.capacity:
            raise ResourceExhausted(
                f"the request needs {total} tokens of KV and the pool holds {self.capacity}: raise pool_bytes to "
                f"{total * self.shape.token_bytes}, or send a shorter prompt"
            )
        # Every chunk of the pool is looked at only when there is not room enough without them.
        while self.free < need and self.free + self.idle < need:
            self._changed.clear()
            await self._changed.wait()

    def find(self, key: bytes) -> PooledChunk | None:
        """The resident chunk of this key, pinned, or None."""
        resident = self._residents.get(key)
        if resident is None or (resident.ready.done() and resident.ready.exception() is not None):
            return None
        self.pin(resident)
        return resident

    def add(self, key: bytes, tokens: int, base: int) -> PooledChunk:
        """Room for a chunk, pinned and not ready: the caller loads it and settles `ready`.

        Raises:
            ResourceExhausted: no room, which `room` rules out.
        """
        resident = PooledChunk(
            key, tokens, base, self._take(tokens), asyncio.get_running_loop().create_future(), pins=1
        )
        # Whoever waits sees the failure; when nobody does, it is no error of the loop's.
        resident.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        if (failed := self._residents.get(key)) is not None:
            self.hide(failed)
        self._residents[key] = resident
        return resident

    def pin(self, resident: PooledChunk) -> None:
        resident.pins += 1
        if self._residents.get(resident.key) is resident:
            self._residents.move_to_end(resident.key)

    def unpin(self, resident: PooledChunk) -> None:
        resident.pins -= 1
        ready = resident.ready.done() and resident.ready.exception() is None
        if resident.pins == 0 and (not ready or resident in self._hidden):
            self._drop(resident)
        self._changed.set()

    def hide(self, resident: PooledChunk) -> None:
        """Nobody finds the chunk any more; its slots are free when the last pin is gone."""
        if self._residents.get(resident.key) is resident:
            del self._residents[resident.key]
            self._hidden.add(resident)

    def clear(self) -> None:
        """Evicts every chunk that nobody pins."""
        for resident in [r for r in self._residents.values() if r.pins == 0 and r.ready.done()]:
            self._drop(resident)

    def reserve(self, tokens: int) -> tuple[SlotRange, ...]:
        """Fresh slots for a request, as few runs as the free list allows."""
        runs = self._take(tokens)
        self._fresh += sum(run.length for run in runs)
        return runs

    def release(self, runs: Sequence[SlotRange]) -> None:
        """Gives fresh slots back."""
        self._fresh -= sum(run.length for run in runs)
        self._give(runs)

    def _drop(self, resident: PooledChunk) -> None:
        if self._residents.get(resident.key) is resident:
            del self._residents[resident.key]
        self._hidden.discard(resident)
        self._give(resident.runs)

    def _take(self, tokens: int) -> tuple[SlotRange, ...]:
        need = self.slots_for(tokens)
        # Least recently used first. A run that fits in one piece is worth more evictions: one segment, not many.
        idle = [] if self.free >= need else [r for r in self._residents.values() if r.pins == 0 and r.ready.done()]
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
        for run in runs:
            at = bisect.bisect_left(self._free, run.start, key=lambda r: r.start)
            if at < len(self._free) and run.start + run.length == self._free[at].start:
                run = SlotRange(run.start, run.length + self._free.pop(at).length)
            if at and self._free[at - 1].start + self._free[at - 1].length == run.start:
                before = self._free.pop(at - 1)
                run, at = SlotRange(before.start, before.length + run.length), at - 1
            self._free.insert(at, run)
        self._changed.set()

    def check_integrity(self, idle: bool = False) -> None:
        """Every slot has exactly one owner; with `idle`, nothing is pinned or reserved.

        Raises:
            AssertionError: it is not so.
        """
        chunks = (*self._residents.values(), *self._hidden)
        owned = sorted([*self._free, *(run for r in chunks for run in r.runs)], key=lambda r: r.start)
        for a, b in itertools.pairwise(owned):
            assert a.start + a.length <= b.start, f"{a} and {b} overlap"
        assert sum(run.length for run in owned) + self._fresh == self.capacity, "slots were lost or given out twice"
        assert all(r.pins >= 0 for r in chunks), "a chunk was unpinned twice"
        if idle:
            assert self._fresh == 0, f"{self._fresh} fresh slots are still reserved"
            assert not any(r.pins for r in chunks), "a chunk is still pinned"


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not empty: no slot ever holds a NaN that a weight of 0 keeps.

    On the CPU they are the kernel's own, which take memory where they are written to; torch would write all of them.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)
