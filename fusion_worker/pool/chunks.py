"""The chunks in the KV pool: found by key, pinned, and evicted when they were not used for longest."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.pool.slots import SlotRange


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


class PooledChunks:
    """Chunks by key, the least recently used first, and those that `find` misses until their last pin ends."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[bytes, PooledChunk] = OrderedDict()
        self._hidden: set[PooledChunk] = set()

    def __iter__(self) -> Iterator[PooledChunk]:
        yield from self._by_key.values()
        yield from self._hidden

    @property
    def idle(self) -> int:
        """Number of slots of chunks without pins, which can be evicted."""
        return sum(run.length for pooled in self.evictable() for run in pooled.runs)

    def evictable(self) -> list[PooledChunk]:
        """Chunks without pins, the least recently used first."""
        return [pooled for pooled in self._by_key.values() if pooled.pins == 0 and pooled.ready.done()]

    def find(self, key: bytes) -> PooledChunk | None:
        """The chunk of this key, pinned, or None."""
        pooled = self._by_key.get(key)
        if pooled is None or (pooled.ready.done() and pooled.ready.exception() is not None):
            return None
        self.pin(pooled)
        return pooled

    def add(self, pooled: PooledChunk) -> None:
        """Adds a chunk, in the place of one whose load has failed."""
        if (failed := self._by_key.get(pooled.key)) is not None:
            self.hide(failed)
        self._by_key[pooled.key] = pooled

    def pin(self, pooled: PooledChunk) -> None:
        pooled.pins += 1
        if self._by_key.get(pooled.key) is pooled:
            self._by_key.move_to_end(pooled.key)

    def unpin(self, pooled: PooledChunk) -> bool:
        """Ends a pin; returns whether the chunk is of no more use, and is to be removed."""
        pooled.pins -= 1
        ready = pooled.ready.done() and pooled.ready.exception() is None
        return pooled.pins == 0 and (not ready or pooled in self._hidden)

    def hide(self, pooled: PooledChunk) -> None:
        """Makes `find` miss the chunk from now on; it is removed with its last pin."""
        if self._by_key.get(pooled.key) is pooled:
            del self._by_key[pooled.key]
            self._hidden.add(pooled)

    def remove(self, pooled: PooledChunk) -> tuple[SlotRange, ...]:
        """Removes a chunk; returns its slots, for the caller to free."""
        if self._by_key.get(pooled.key) is pooled:
            del self._by_key[pooled.key]
        self._hidden.discard(pooled)
        return pooled.runs
