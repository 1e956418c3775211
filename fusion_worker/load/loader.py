"""Looks prompts up, and loads them into the pool."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import lru_cache, partial
from typing import NamedTuple

from opentelemetry import trace

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.load.chunk_loads import ChunkLoads
from fusionkv.fusion_worker.load.fetcher import Fetcher
from fusionkv.fusion_worker.load.lookup import CacheFault, EntryGone, Lookups
from fusionkv.fusion_worker.load.passages import passages
from fusionkv.fusion_worker.load.primer import Primers
from fusionkv.fusion_worker.load.prompt_load import PromptLoad
from fusionkv.fusion_worker.load.write_back import WriteBack
from fusionkv.fusion_worker.meters import LoadFigures, Stopwatch
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.prompt import Chunk, ChunkSource, LoadedChunk, Primer, Prompt, PromptLayout
from fusionkv.fusion_worker.transfer.signatures import Signer
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.contract.recipes import ISOLATED, Encode, Primed
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.errors import FailedPrecondition, ServiceError, Unavailable

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)
Fresh = Callable[[int], int]


class LoadedPrompt(NamedTuple):
    """A prompt in the pool, and the figures of its load."""

    layout: PromptLayout
    figures: LoadFigures


class Loader:
    """The worker's access to the cache service. Used only on the event loop's thread."""

    def __init__(
        self, config: WorkerConfig, model: Model, pool: KVPool, engine: Engine, cache: CacheClient | None
    ) -> None:
        self._config = config
        self._model = model
        self._pool = pool
        self.storage = Storage(pool, config.store, engine.tp)
        signer = Signer(config.signing_keys) if config.signing_keys else None
        self.lookups = Lookups(self.storage, cache, config.lookup_timeout, model.max_tokens, signer)
        limits = config.max_puts, config.fetch_timeout
        self.write_back = WriteBack(pool, self.storage, cache, *limits, signer) if cache else None
        self.fetcher = Fetcher(config, self.storage, cache, signer, engine.tp.ranks)
        self.loads = ChunkLoads(config, model, engine, self.storage, self.fetcher, self.write_back)
        settings = model.settings | ({} if self.storage.lossless else {"store": config.store})
        self.namespace = lru_cache(maxsize=1024)(partial(keys.namespace, model.fingerprint, settings))
        self.fallback = Chunk(passages(model.tokenizer, model.template.chunk))
        self.primers = Primers(self.fallback, self.lookups, self.write_back, self.namespace, model.vocabulary)

    async def wait_idle(self) -> None:
        """Waits until no load and no write is running."""
        await self.loads.wait_idle()
        if self.write_back is not None:
            await self.write_back.wait_idle()

    async def close(self) -> None:
        await self.wait_idle()
        if self.write_back is not None:
            self.write_back.close()
        self.fetcher.close()

    def has_room(self, tokens: int) -> bool:
        """Whether `plain` would get its slots now."""
        return self._pool.free.needed(tokens) <= self._pool.free.count + self._pool.chunks.idle

    @asynccontextmanager
    async def plain(self, tokens: int) -> AsyncIterator[PromptLayout]:
        """Fresh slots for `tokens` tokens, without reused parts.

        Raises ResourceExhausted if they don't fit the pool.
        """
        load = PromptLoad(self._pool, self.loads)
        async with load.admit([], tokens):
            yield load.layout

    @asynccontextmanager
    async def parts(self, sources: Sequence[ChunkSource]) -> AsyncIterator[PromptLayout]:
        """These parts in the pool, ready, for the caller to store; released on exit. Raises as `prompt` does."""
        load = PromptLoad(self._pool, self.loads)
        async with load.admit(sources, 0):
            await load.ready()
            yield load.layout

    @asynccontextmanager
    async def prompt(
        self, prompt: Prompt, fresh: Fresh, stopwatch: Stopwatch, encode: Encode = ISOLATED
    ) -> AsyncIterator[LoadedPrompt]:
        """The prompt's parts in the pool and `fresh(stale tokens)` fresh slots; all released on exit.

        encode: as for `Lookups.prompt`.

        Raises:
            CacheFault: the cache service failed, or its bytes are not trusted.
            ResourceExhausted: the prompt does not fit the pool.
        """
        deadline, namespace = Deadline.after(self._config.cache_seconds), self.namespace(prompt.tenant)
        load = PromptLoad(self._pool, self.loads)

        async def bring(stack: AsyncExitStack) -> LoadedPrompt:
            """Looks up and loads the parts; `stack` releases them."""
            nonlocal deadline
            leased = await stack.enter_async_context(AsyncExitStack())
            with tracer.start_as_current_span("fusionkv.lookup") as span, stopwatch.clock("lookup"):
                primer = await self._primer(prompt, deadline) if isinstance(encode, Primed) else None
                asking = self.lookups.prompt(prompt, namespace, encode, deadline, load, primer)
                sources = await leased.enter_async_context(asking)
                if any(source.is_primer for source in sources) and not self._fit(sources, fresh):
                    asking = self.lookups.prompt(prompt, namespace, encode, deadline, load)
                    sources = await leased.enter_async_context(asking)
                span.set_attributes({"fusionkv.chunks": len(prompt.chunks), "fusionkv.rejected": load.rejected})
            with tracer.start_as_current_span("fusionkv.load") as span, stopwatch.clock("load"):
                began = time.monotonic()
                await stack.enter_async_context(load.admit(sources, fresh(_stale(sources)), namespace))
                # Waiting for room in the pool is not the cache service's time.
                deadline = deadline.extended(time.monotonic() - began)
                await load.fetched(min(self.fetcher.timeout, deadline.remaining()))
                figures = load.figures()
                span.set_attribute("fusionkv.bytes", figures.bytes_fetched)
            await leased.aclose()
            with tracer.start_as_current_span("fusionkv.encode") as span, stopwatch.clock("encode"):
                span.set_attribute("fusionkv.tokens", figures.encoded_tokens)
                await load.ready()
            return LoadedPrompt(load.layout, figures)

        async with AsyncExitStack() as stack:
            try:
                loaded = await bring(stack)
            except EntryGone as gone:
                log.debug("looking up again: %s", gone)
                await stack.aclose()
                loaded = await bring(stack)
            yield loaded

    def _fit(self, sources: Sequence[ChunkSource], fresh: Fresh) -> bool:
        """Whether an empty pool has room for these parts and the fresh slots."""
        parts = {source.key: len(source.chunk) for source in sources}
        return self._pool.slots([*parts.values(), fresh(_stale(sources))]) <= self._pool.capacity

    async def _primer(self, prompt: Prompt, deadline: Deadline) -> Primer:
        """The primer of a prompt's corpus. Raises CacheFault as `Primers.of`, or if it takes too long."""
        try:
            # Up to five calls of the cache service, each with a timeout of its own.
            async with asyncio.timeout(deadline.remaining()):
                return await self.primers.of(prompt)
        except TimeoutError as error:
            raise CacheFault(
                f"the primer took longer than the {self._config.cache_seconds:.3g} s of the cache"
            ) from error

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


def _stale(sources: Sequence[ChunkSource]) -> int:
    """Number of tokens of parts that are not lossless."""
    return sum(len(source.chunk) for source in sources if not source.lossless)
