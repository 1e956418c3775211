"""Stores chunks encoded by this worker in the cache service, in the background, with a bounded queue."""

import asyncio
import logging

from opentelemetry import metrics, trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext

from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.prompt import ChunkSource, LoadedChunk
from fusionkv.fusion_worker.transfer.signatures import Signer
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import DeadlineExceeded, ServiceError, Unavailable

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
tracer = trace.get_tracer(__name__)
_dropped = metrics.get_meter(__name__).create_counter(
    "fusionkv.worker.puts_dropped", description="Encoded chunks that did not reach the cache service"
)
# Two overlap a copy out of the pool with a stream to the service; more would compete for the same bandwidth.
_WRITERS = 2


class WriteBack:
    """Copies chunks out of the pool and stores them. A chunk is pinned until it is copied."""

    def __init__(
        self,
        pool: KVPool,
        storage: Storage,
        cache: CacheClient,
        max_waiting: int,
        timeout: float,
        signer: Signer | None = None,
    ) -> None:
        self._signer = signer
        self._pool = pool
        self._storage = storage
        self._cache = cache
        self._timeout = timeout
        self._max_waiting = max_waiting
        self._waiting: asyncio.Queue[tuple[bytes, LoadedChunk, SpanContext]] = asyncio.Queue()
        self._writers = [asyncio.create_task(self._write()) for _ in range(_WRITERS)]

    def offer(self, namespace: bytes, part: LoadedChunk) -> None:
        """Queues a part, or drops it when the queue is full: a later miss costs time, not an answer."""
        if self._waiting.qsize() >= self._max_waiting:
            _dropped.add(1, {"fusionkv.reason": "queue full"})
            return
        self._pool.chunks.pin(part.pooled)
        self._waiting.put_nowait((namespace, part, trace.get_current_span().get_span_context()))

    async def put(self, namespace: bytes, part: LoadedChunk) -> None:
        """Stores a part and waits until it is committed.

        Raises ServiceError if the cache service can't be reached, or refused the part.
        """
        await self.send(
            namespace, part.source, await asyncio.to_thread(self._storage.take_out, part.pooled), offered=False
        )

    async def send(self, namespace: bytes, source: ChunkSource, data: memoryview, offered: bool) -> bool:
        """Stores an entry; returns whether it was stored, as `CacheClient.put` does. Raises as `put`."""
        tokens, base, signature = len(source.chunk), source.base, b""
        if self._signer is not None:
            names = (namespace, source.path, source.variant)
            signature = await asyncio.to_thread(self._signer.sign, *names, data, tokens=tokens, base=base)
        _, stored = await self._cache.put(
            namespace=namespace,
            path=source.path,
            variant=source.variant,
            tokens=tokens,
            base=base,
            data=data,
            offered=offered,
            signature=signature,
            timeout=self._timeout,
        )
        return stored

    async def wait_idle(self) -> None:
        """Waits until all queued parts are stored or dropped."""
        await self._waiting.join()

    def close(self) -> None:
        for writer in self._writers:
            writer.cancel()

    async def _write(self) -> None:
        while True:
            namespace, part, origin = await self._waiting.get()
            try:
                try:
                    data = await asyncio.to_thread(self._storage.take_out, part.pooled)
                finally:
                    self._pool.unpin(part.pooled)
                # A separate trace, linked to the request's, which does not wait for this. It follows that trace's
                # sampling decision: a child of a dropped span is dropped.
                dropped = origin.is_valid and not origin.trace_flags.sampled
                parent = trace.set_span_in_context(NonRecordingSpan(origin)) if dropped else None
                links = [Link(origin)] if origin.is_valid else []
                with tracer.start_as_current_span("fusionkv.put", parent, links=links) as span:
                    span.set_attributes({"fusionkv.tokens": len(part.source.chunk), "fusionkv.bytes": len(data)})
                    await self.send(namespace, part.source, data, offered=True)
            except ServiceError as error:
                _dropped.add(1, {"fusionkv.reason": type(error).__name__})
                _faults.warning("a chunk was not stored", error)
                if isinstance(error, Unavailable | DeadlineExceeded):
                    self._drop_waiting()
            except Exception:
                _dropped.add(1, {"fusionkv.reason": "error"})
                log.exception("a chunk was not stored")
            finally:
                self._waiting.task_done()

    def _drop_waiting(self) -> None:
        """Drops all queued parts: with the service unreachable, each would hold its pages for another timeout."""
        while not self._waiting.empty():
            _, part, _ = self._waiting.get_nowait()
            self._pool.unpin(part.pooled)
            self._waiting.task_done()
            _dropped.add(1, {"fusionkv.reason": "cache out of reach"})
