"""The load of one prompt: its parts pinned in the pool, those that it lacks being loaded, and fresh slots."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fusionkv.fusion_worker.load.chunk_loads import ChunkLoads, ready
from fusionkv.fusion_worker.load.lookup import CacheFault
from fusionkv.fusion_worker.meters import LoadFigures
from fusionkv.fusion_worker.pool.chunks import PooledChunk
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.pool.slots import SlotRange
from fusionkv.fusion_worker.prompt import ChunkSource, LoadedChunk, PromptLayout


class PromptLoad:
    """What one request holds of the pool. If it is admitted again, its figures are those of the last time.

    rejected: number of entries that no worker had signed.
    """

    def __init__(self, pool: KVPool, loads: ChunkLoads) -> None:
        self._pool = pool
        self._loads = loads
        self._pinned: dict[bytes, PooledChunk] = {}
        self._parts: list[LoadedChunk] = []
        self._present: list[tuple[ChunkSource, bool]] = []
        self._started: list[LoadedChunk] = []
        self._fresh: tuple[SlotRange, ...] = ()
        self.rejected = 0

    @asynccontextmanager
    async def admit(self, sources: Sequence[ChunkSource], fresh: int, namespace: bytes = b"") -> AsyncIterator[None]:
        """Allocates room for all parts at once, pins those that the pool has, and starts loading the others.

        fresh: number of fresh slots. namespace: as for `ChunkLoads.start`.
        Raises ResourceExhausted if they don't fit the pool.
        """
        pool = self._pool
        self._parts, self._present = [], []
        try:
            async with pool.turn:
                for key in dict.fromkeys(source.key for source in sources):
                    if (pooled := pool.chunks.find(key)) is not None:
                        self._pinned[key] = pooled
                lacking = [source for source in sources if source.key not in self._pinned]
                # A primer is read only by parts that are encoded now.
                used = [s for s in sources if not s.is_primer or any(part.follows(s) for part in lacking)]
                missing = {source.key: source for source in used if source.key not in self._pinned}
                new = [len(source.chunk) for source in missing.values()]
                await pool.room([*new, fresh], [pooled.tokens for pooled in self._pinned.values()])
                for source in used:
                    self._place(source, namespace)
                self._fresh = pool.reserve(fresh)
            try:
                yield
            finally:
                pool.release(self._fresh)
        finally:
            for pooled in self._pinned.values():
                self._loads.unpin(pooled)
            self._pinned.clear()

    def _place(self, source: ChunkSource, namespace: bytes) -> None:
        """Adds a part, and starts its load if the pool lacks it."""
        pooled = self._pinned.get(source.key)
        self._present.append((source, pooled is not None))
        if pooled is not None:
            self._loads.join(pooled)
            self._parts.append(LoadedChunk(source, pooled))
            return
        self._pinned[source.key] = self._pool.add(source.key, len(source.chunk), source.base)
        part = LoadedChunk(source, self._pinned[source.key])
        before = [other for other in self._parts if source.follows(other.source)]
        self._parts.append(part)
        self._started.append(part)
        self._loads.start(part, before, namespace)

    def let_go(self) -> None:
        """Unpins all chunks but the system prompt."""
        for part in self._parts:
            if not part.source.is_system and part.source.key in self._pinned:
                self._pool.unpin(self._pinned.pop(part.source.key))

    @property
    def layout(self) -> PromptLayout:
        parts = tuple(part for part in self._parts if not part.source.is_primer)
        return PromptLayout(parts, self._fresh, self.let_go)

    async def fetched(self, seconds: float) -> None:
        """Waits for all fetches together. Raises CacheFault if one fails, or after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await ready(part for part in self.layout.parts if part.source.entry is not None)
        except TimeoutError as error:
            raise CacheFault(f"fetches took longer than {seconds:.3g} s together") from error

    async def ready(self) -> None:
        """Waits until all parts are in the pool. Raises the error of a load that failed."""
        await ready(self.layout.parts)

    def figures(self) -> LoadFigures:
        """The figures of the parts, and of all bytes fetched so far."""
        fetched = [part.source.entry for part in self._started if part.loaded and part.source.entry is not None]
        return LoadFigures.of(self._present, self.rejected, sum(entry.size for entry in fetched))
