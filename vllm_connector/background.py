"""Runs calls to other services in an event loop of a separate thread."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.protos.runtime.tls import ClientTLS
from fusionkv.vllm_connector.prompts import FusedPrompt

log = logging.getLogger("vllm.fusionkv")
T = TypeVar("T")


class Background:
    """An event loop in a thread, and its connections. `run` and `close` are thread-safe."""

    def __init__(self, cache: str, tls: ClientTLS | None, worker_name: str = "") -> None:
        """`cache`: address of the cache service; empty for none. `worker_name`: as `name` of WorkerClient."""
        self.cache = CacheClient(cache, tls) if cache else None
        self._tls, self._worker_name = tls, worker_name
        self._workers: dict[str, WorkerClient] = {}
        self._users: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fusionkv", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts a coroutine in the loop; returns the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @asynccontextmanager
    async def worker(self, address: str) -> AsyncIterator[WorkerClient]:
        """The client of a fusion worker. Use it in the loop only.

        It is kept while it is connected: workers come back under other addresses, and a client of one that is gone
        would reconnect for ever.
        """
        if address not in self._workers:
            self._workers[address] = WorkerClient(address, self._tls, self._worker_name)
        self._users[address] += 1
        try:
            yield self._workers[address]
        finally:
            self._users[address] -= 1
            lost = [each for each, client in self._workers.items() if not (self._users[each] or client.connected)]
            for client in [self._workers.pop(each) for each in lost]:
                await client.close()
            self._users = +self._users

    async def release(self, prompt: FusedPrompt, error: str, ranks: int = 1) -> None:
        """Releases a prompt at its worker, for one of `ranks` ranks. error: why it was not loaded, if so."""
        try:
            async with self.worker(prompt.worker) as worker:
                await worker.release_prefill(bytes.fromhex(prompt.handle), ranks, error[:500])
        except ServiceError as failure:
            log.warning("the KV of a prompt was not released and will expire: %s", failure)

    def close(self) -> None:
        self.run(self._close()).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    async def _close(self) -> None:
        for worker in [*self._workers.values()]:  # calls that end now may change it
            await worker.close()
        if self.cache is not None:
            await self.cache.close()
