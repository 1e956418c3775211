"""Loads a prompt's parts into the pool: fetched from the cache service, or encoded here and stored there."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from opentelemetry import trace
from opentelemetry.trace import Span

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import encoding
from fusionkv.fusion_worker.compute.kv_pool import KVPool, PooledChunk
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.load.lookup import CacheFault, EntryGone, Lookups, NotFiniteKV
from fusionkv.fusion_worker.load.passages import passages
from fusionkv.fusion_worker.load.primer import Primers
from fusionkv.fusion_worker.load.write_back import WriteBack
from fusionkv.fusion_worker.meters import Stages
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, ChunkSource, LoadedChunk, Prompt, PromptLayout
from fusionkv.fusion_worker.transfer.gpudirect import DirectReader
from fusionkv.fusion_worker.transfer.signatures import DELETE_SECONDS, Signer
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.contract.recipes import ISOLATED, Encode, Primed
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.cancellation import to_the_end
from fusionkv.protos.runtime.errors import FailedPrecondition, NotFound, ServiceError, Unavailable, first_line

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)
Fresh = Callable[[int], int]


class _Load(NamedTuple):
    """A running load. Its span belongs to the request that started it; those that wait for it are linked."""

    task: asyncio.Task[None]
    span: Span


class Loader:
    """The worker's access to the cache service. Used only on the event loop's thread."""

    def __init__(
        self, config: WorkerConfig, model: Model, pool: KVPool, engine: Engine, cache: CacheClient | None
    ) -> None:
        self._config = config
        self._model = model
        self._pool = pool
        self._engine = engine
        self._cache = cache
        self._fetch_timeout = min(config.fetch_timeout, config.cache_seconds)
        self._loads: dict[PooledChunk, _Load] = {}
        # Served in order of arrival: loads start in the order in which requests are admitted.
        self.turns = asyncio.Semaphore(config.max_loads)
        self.storage = Storage(pool, config.store, engine.tp)
        self._signer = signer = Signer(config.signing_keys) if config.signing_keys else None
        # GPUDirect bypasses host memory, where signatures are verified and from which ranks get their heads.
        direct = cache and signer is None and engine.tp.ranks.count == 1
        self._direct = DirectReader.find(self.storage) if direct else None
        self.lookups = Lookups(self.storage, cache, config.lookup_timeout, model.max_tokens, signer)
        limits = config.max_puts, config.fetch_timeout
        self.write_back = WriteBack(pool, self.storage, cache, *limits, signer) if cache else None
        settings = model.settings | self.storage.settings
        self.namespace = lru_cache(maxsize=1024)(partial(keys.namespace, model.fingerprint, settings))
        self.fallback = Chunk(passages(model.tokenizer, model.template.chunk))
        self.primers = Primers(self.fallback, self.lookups, self.write_back, self.namespace, model.vocabulary)

    async def wait_idle(self) -> None:
        """Waits until no load and no write is running."""
        if self._loads:
            await asyncio.wait([load.task for load in self._loads.values()])
        if self.write_back is not None:
            await self.write_back.wait_idle()

    async def close(self) -> None:
        await self.wait_idle()
        if self.write_back is not None:
            self.write_back.close()
        if self._direct is not None:
            self._direct.close()

    @asynccontextmanager
    async def plain(self, tokens: int) -> AsyncIterator[PromptLayout]:
        """Fresh slots for `tokens` tokens, without reused parts.

        Raises:
            ResourceExhausted: they don't fit the pool.
        """
        async with self._admit([], tokens, Stages(), b"") as layout:
            yield layout

    @asynccontextmanager
    async def prompt(
        self,
        prompt: Prompt,
        fresh: Fresh,
        stages: Stages,
        encode: Encode = ISOLATED,
    ) -> AsyncIterator[PromptLayout]:
        """The prompt's parts in the pool and `fresh(stale tokens)` fresh slots; all released on exit.

        encode: as for `Lookups.prompt`.

        Raises:
            CacheFault: the cache service failed, or its bytes are not trusted.
            ResourceExhausted: the prompt does not fit the pool.
        """
        deadline, namespace = Deadline.after(self._config.cache_seconds), self.namespace(prompt.tenant)

        async def bring(stack: AsyncExitStack) -> PromptLayout:
            """Looks up and loads the parts; `stack` releases them."""
            nonlocal deadline
            leased = await stack.enter_async_context(AsyncExitStack())
            with tracer.start_as_current_span("fusionkv.lookup") as span, stages.clock("lookup"):
                primer = await self.primers.of(prompt) if isinstance(encode, Primed) else None
                asking = self.lookups.prompt(prompt, namespace, encode, deadline, stages, primer)
                sources = await leased.enter_async_context(asking)
                span.set_attributes({"fusionkv.chunks": len(prompt.chunks), "fusionkv.rejected": stages.rejected})
            stale = sum(len(source.chunk) for source in sources if not source.lossless)
            with tracer.start_as_current_span("fusionkv.load") as span, stages.clock("load"):
                began = time.monotonic()
                layout = await stack.enter_async_context(self._admit(sources, fresh(stale), stages, namespace))
                # Waiting for room in the pool is not the cache service's time.
                deadline = deadline.extended(time.monotonic() - began)
                await self._fetched(layout, deadline)
                span.set_attribute("fusionkv.bytes", stages.bytes_fetched)
            await leased.aclose()
            with tracer.start_as_current_span("fusionkv.encode") as span, stages.clock("encode"):
                span.set_attribute("fusionkv.tokens", stages.encoded_tokens)
                await _ready(part.pooled for part in layout.parts)
            return layout

        async with AsyncExitStack() as stack:
            try:
                layout = await bring(stack)
            except EntryGone as gone:
                log.debug("looking up again: %s", gone)
                await stack.aclose()
                stages.start_over()
                layout = await bring(stack)
            yield layout

    async def _fetched(self, layout: PromptLayout, deadline: Deadline) -> None:
        """Waits for all fetches together, for at most the fetch timeout and until the deadline."""
        most = min(self._fetch_timeout, deadline.remaining())
        try:
            async with asyncio.timeout(most):
                await _ready(part.pooled for part in layout.parts if part.source.entry is not None)
        except TimeoutError as error:
            raise CacheFault(f"fetches took longer than {most:.3g} s together") from error

    @asynccontextmanager
    async def parts(self, sources: Sequence[ChunkSource]) -> AsyncIterator[PromptLayout]:
        """These parts in the pool, ready, for the caller to store; released on exit. Raises as `prompt` does."""
        async with self._admit(sources, 0, Stages(), b"") as layout:
            await _ready(part.pooled for part in layout.parts)
            yield layout

    async def put(self, part: LoadedChunk, namespace: bytes) -> None:
        """Stores a part now and waits for the commit.

        Raises:
            FailedPrecondition: this worker has no cache service.
            Unavailable: the cache service can't be reached or refused the bytes.
        """
        if self.write_back is None:
            raise FailedPrecondition("this worker has no cache service: start it with --cache ADDRESS")
        try:
            await self.write_back.put(namespace, part)
        except ServiceError as error:
            raise Unavailable(str(error)) from error

    @asynccontextmanager
    async def _admit(
        self, sources: Sequence[ChunkSource], fresh: int, stages: Stages, namespace: bytes
    ) -> AsyncIterator[PromptLayout]:
        """Allocates room for all parts at once, pins those that the pool has, and starts loading the others.

        Encoded parts are stored in the background under `namespace`, unless that is empty.
        """
        pool = self._pool
        pinned: dict[bytes, PooledChunk] = {}
        placed: list[LoadedChunk] = []

        def let_go() -> None:
            for part in placed:
                if not part.source.is_system and part.source.key in pinned:
                    pool.unpin(pinned.pop(part.source.key))

        try:
            async with pool.turn:
                for key in dict.fromkeys(source.key for source in sources):
                    if (found := pool.find(key)) is not None:
                        pinned[key] = found
                missing = {source.key: source for source in sources if source.key not in pinned}
                new = [len(source.chunk) for source in missing.values()]
                await pool.room([*new, fresh], [r.tokens for r in pinned.values()])
                for source in sources:
                    if not source.is_primer:
                        stages.count(source, source.key in pinned)
                    if source.key in pinned:
                        if (load := self._loads.get(pinned[source.key])) is not None:
                            _link(load.span)
                        placed.append(LoadedChunk(source, pinned[source.key]))
                    else:
                        pinned[source.key] = pool.add(source.key, len(source.chunk), source.base)
                        part = LoadedChunk(source, pinned[source.key])
                        before = [p for p in placed if source.follows(p.source)]
                        placed.append(part)
                        self._start(part, before, stages, namespace)
                runs = pool.reserve(fresh)
            try:
                yield PromptLayout(tuple(p for p in placed if not p.source.is_primer), runs, let_go)
            finally:
                pool.release(runs)
        finally:
            for pooled in pinned.values():
                self._unpin(pooled)

    def _start(self, part: LoadedChunk, before: Sequence[LoadedChunk], stages: Stages, namespace: bytes) -> None:
        """Loads a part in a separate task: other requests may wait for the part after this one has ended."""
        for p in (part, *before):
            self._pool.pin(p.pooled)
        with trace.use_span(_span(part.source)) as span:
            task = asyncio.create_task(self._load(part, before, stages, namespace))
        self._loads[part.pooled] = _Load(task, span)
        task.add_done_callback(lambda _: self._ended(part, before))

    def _ended(self, part: LoadedChunk, before: Sequence[LoadedChunk]) -> None:
        """Releases the pins of a load; a callback, as a task cancelled before its first step never runs."""
        self._loads.pop(part.pooled).span.end()
        if not part.pooled.ready.done():
            part.pooled.ready.set_exception(CacheFault("the load was cancelled: no request waits for it"))
        self._pool.unpin(part.pooled)
        for p in before:
            self._unpin(p.pooled)

    def _unpin(self, pooled: PooledChunk) -> None:
        """Unpins a chunk, and cancels its load if no other request waits for it."""
        self._pool.unpin(pooled)
        load = self._loads.get(pooled)
        if pooled.pins == 1 and load is not None and not pooled.ready.done():
            # Its slots stay allocated until the load has ended.
            self._pool.hide(pooled)
            load.task.cancel()

    async def _load(
        self,
        part: LoadedChunk,
        before: Sequence[LoadedChunk],
        stages: Stages,
        namespace: bytes,
    ) -> None:
        ready = part.pooled.ready
        try:
            with trace.use_span(trace.get_current_span()):  # the load's, in which it records errors
                if part.source.entry is not None:
                    async with self.turns:
                        await self.fetch(part, stages)
                else:
                    await _ready(p.pooled for p in before)
                    await self._encode(part, before)
                    await self._check(part)
                    if self.write_back is not None and namespace and not part.source.is_primer:
                        self.write_back.offer(namespace, part)
            ready.set_result(None)
        except NotFiniteKV as error:
            await self.discard(before)
            ready.set_exception(error)
        except ServiceError as error:
            entry, cache = part.source.entry, self._cache
            # No lease covers an entry of the remote tier, and one may end while the request waits for room: such an
            # entry disappears without a fault.
            kept = entry is None or cache is None or (entry.tier != "remote" and cache.is_leased(entry))
            gone = isinstance(error, NotFound) and not kept
            ready.set_exception((EntryGone if gone else CacheFault)(f"fetch failed: {error}"))
        except Exception as error:
            if part.source.entry is not None:  # such as no memory for the bytes: plain prefill does without
                log.exception("a fetch failed")
                error = CacheFault(f"fetch failed: {first_line(error)}")
            ready.set_exception(error)

    async def _check(self, part: LoadedChunk) -> None:
        """Raises NotFiniteKV if a part's KV, just computed, is not finite."""
        if not await to_the_end(asyncio.to_thread(self.storage.finite, part.pooled)):
            raise NotFiniteKV("the KV of a chunk is not finite (NaN or infinity)")

    async def discard(self, parts: Iterable[LoadedChunk]) -> None:
        """Removes those parts from the pool and from the cache service whose KV is not finite; the caller pins them.

        Whoever stored such an entry, it would spoil every prompt that reuses it.
        """
        for part in parts:
            if await to_the_end(asyncio.to_thread(self.storage.finite, part.pooled)):
                continue
            self._pool.hide(part.pooled)
            if self._cache is not None and part.source.entry is not None:
                with suppress(ServiceError):
                    await self._cache.delete([part.source.entry.key], timeout=DELETE_SECONDS)

    async def fetch(self, part: LoadedChunk, stages: Stages) -> None:
        """Fetches a part's bytes into its slots. Raises as `CacheClient.fetch` and `Signer.verify` do."""
        entry = part.source.entry
        assert entry is not None
        assert self._cache is not None
        buffer = await self._direct.fetch(self._cache, entry, self._fetch_timeout) if self._direct else None
        trace.get_current_span().set_attribute("fusionkv.direct", buffer is not None)
        # Signatures are verified on a copy: the service may write to shared memory at any time.
        near = buffer is None and self._signer is None
        if not near or not await self.storage.copy_in(self._cache, entry, part.pooled):
            if buffer is None:
                empty = partial(torch.empty, entry.size, dtype=torch.uint8, pin_memory=self._pool.kv.is_cuda)
                buffer = await asyncio.to_thread(empty)  # pinning memory takes milliseconds
                await self._cache.fetch(entry, buffer.numpy().data, timeout=self._fetch_timeout)
                if self._signer is not None:
                    await self._signer.verify(self._cache, entry, buffer.numpy().data)
            # Runs to its end as well.
            await to_the_end(asyncio.to_thread(self.storage.put_in, part.pooled, buffer))
        stages.bytes_fetched += entry.size

    async def _encode(self, part: LoadedChunk, before: Sequence[LoadedChunk]) -> None:
        """Computes a part's KV after the parts before it, directly into its pages."""
        seen = tuple(segment for p in before for segment in p.segments())
        ids, pooled = part.source.chunk.ids, part.pooled
        await self._engine.run(encoding(ids, pooled.base, pooled.runs, seen, self._model.device))


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


def _link(load: Span) -> None:
    """Links the current request with a load that it waits for."""
    waiting = trace.get_current_span()
    load.add_link(waiting.get_span_context(), {"fusionkv.link": "waiting"})
    waiting.add_link(load.get_span_context(), {"fusionkv.link": "load"})


async def _ready(pinned: Iterable[PooledChunk]) -> None:
    for pooled in pinned:
        await asyncio.shield(pooled.ready)
