"""Loads chunks into the pool: fetched from the cache service, or encoded here and stored there."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.trace import Span

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import encoding
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.load.fetcher import Fetcher
from fusionkv.fusion_worker.load.lookup import CacheFault, EntryGone, NotFiniteKV
from fusionkv.fusion_worker.load.write_back import WriteBack
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.chunks import PooledChunk
from fusionkv.fusion_worker.prompt import ChunkSource, LoadedChunk
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.protos.runtime.cancellation import to_the_end
from fusionkv.protos.runtime.errors import NotFound, ServiceError, first_line

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)


class _Load(NamedTuple):
    """A running load. Its span belongs to the request that started it; those that wait for it are linked."""

    task: asyncio.Task[None]
    span: Span


class ChunkLoads:
    """The running loads of chunks, each shared by all requests that need the chunk."""

    def __init__(
        self,
        config: WorkerConfig,
        model: Model,
        engine: Engine,
        storage: Storage,
        fetcher: Fetcher,
        write_back: WriteBack | None,
    ) -> None:
        """write_back: None stores no encoded chunks."""
        self._model = model
        self._pool = storage.pool
        self._engine = engine
        self._storage = storage
        self._fetcher = fetcher
        self._write_back = write_back
        # Served in order of arrival: loads start in the order in which requests are admitted.
        self.turns = asyncio.Semaphore(config.max_loads)
        self._loads: dict[PooledChunk, _Load] = {}

    async def wait_idle(self) -> None:
        """Waits until no load is running."""
        if self._loads:
            await asyncio.wait([load.task for load in self._loads.values()])

    def start(self, part: LoadedChunk, before: Sequence[LoadedChunk], namespace: bytes) -> None:
        """Loads a part in a separate task: other requests may wait for the part after this one has ended.

        before: the parts that it is encoded after. namespace: where an encoded part is stored in the background;
            empty stores none.
        """
        for p in (part, *before):
            self._pool.chunks.pin(p.pooled)
        with trace.use_span(_span(part.source)) as span:
            task = asyncio.create_task(self._load(part, before, namespace))
        self._loads[part.pooled] = _Load(task, span)
        task.add_done_callback(lambda _: self._ended(part, before))

    def _ended(self, part: LoadedChunk, before: Sequence[LoadedChunk]) -> None:
        """Releases the pins of a load; a callback, as a task cancelled before its first step never runs."""
        self._loads.pop(part.pooled).span.end()
        if not part.pooled.ready.done():
            part.pooled.ready.set_exception(CacheFault("the load was cancelled: no request waits for it"))
        self._pool.unpin(part.pooled)
        for p in before:
            self.unpin(p.pooled)

    def join(self, pooled: PooledChunk) -> None:
        """Links the current request with the load of a chunk that it waits for, if that is running."""
        if (load := self._loads.get(pooled)) is not None:
            waiting = trace.get_current_span()
            load.span.add_link(waiting.get_span_context(), {"fusionkv.link": "waiting"})
            waiting.add_link(load.span.get_span_context(), {"fusionkv.link": "load"})

    def unpin(self, pooled: PooledChunk) -> None:
        """Unpins a chunk, and cancels its load if no other request waits for it."""
        self._pool.unpin(pooled)
        load = self._loads.get(pooled)
        if pooled.pins == 1 and load is not None and not pooled.ready.done():
            # Its slots stay allocated until the load has ended.
            self._pool.chunks.hide(pooled)
            load.task.cancel()

    async def _load(self, part: LoadedChunk, before: Sequence[LoadedChunk], namespace: bytes) -> None:
        done = part.pooled.ready
        try:
            with trace.use_span(trace.get_current_span()):  # the load's, in which it records errors
                if part.source.entry is not None:
                    async with self.turns:
                        await self._fetcher.fetch(part)
                else:
                    await ready(before)
                    await self._encode(part, before)
                    if not await to_the_end(asyncio.to_thread(self._storage.finite, part.pooled)):
                        raise NotFiniteKV("the KV of a chunk is not finite (NaN or infinity)")
                    if self._write_back is not None and namespace and not part.source.is_primer:
                        self._write_back.offer(namespace, part)
            done.set_result(None)
        except NotFiniteKV as error:
            await self.discard(before)
            done.set_exception(error)
        except ServiceError as error:
            gone = isinstance(error, NotFound) and not self._fetcher.leased(part)
            done.set_exception((EntryGone if gone else CacheFault)(f"fetch failed: {error}"))
        except Exception as error:
            if part.source.entry is not None:  # such as no memory for the bytes: plain prefill does without
                log.exception("a fetch failed")
                error = CacheFault(f"fetch failed: {first_line(error)}")
            done.set_exception(error)

    async def discard(self, parts: Iterable[LoadedChunk]) -> None:
        """Removes those parts from the pool and from the cache service whose KV is not finite; the caller pins them.

        Whoever stored such an entry, it would spoil every prompt that reuses it.
        """
        for part in parts:
            if await to_the_end(asyncio.to_thread(self._storage.finite, part.pooled)):
                continue
            self._pool.chunks.hide(part.pooled)
            if part.source.entry is not None:
                await self._fetcher.delete(part.source.entry)

    async def _encode(self, part: LoadedChunk, before: Sequence[LoadedChunk]) -> None:
        """Computes a part's KV after the parts before it, directly into its pages."""
        keys = tuple(segment for p in before for segment in p.segments())
        ids, pooled = part.source.chunk.ids, part.pooled
        await self._engine.run(encoding(ids, pooled.base, pooled.runs, keys))


def _span(source: ChunkSource) -> Span:
    """Starts the span of a load in the current request's trace."""
    entry = source.entry
    attributes: dict[str, str | int] = {
        "fusionkv.tokens": len(source.chunk),
        "fusionkv.position": source.position,
        "fusionkv.kind": "miss" if entry is None else "exact" if source.lossless else "alternative",
    }
    if entry is None:
        return tracer.start_span("fusionkv.encode_chunk", attributes=attributes)
    attributes |= {"fusionkv.tier": entry.tier, "fusionkv.bytes": entry.size}
    return tracer.start_span("fusionkv.fetch", attributes=attributes)


async def ready(parts: Iterable[LoadedChunk]) -> None:
    """Waits until all parts are in the pool. Raises the error of a load that failed."""
    for part in parts:
        await asyncio.shield(part.pooled.ready)
