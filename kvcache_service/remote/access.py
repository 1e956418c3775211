"""Calls of the remote tier in threads, and whether it is reachable."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.remote.tier import RemoteTier
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.protos.observe import logs

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
T = TypeVar("T")

_THREADS, _LOOKUP_THREADS = 8, 8


class RemoteAccess:
    """Runs on the store's event loop. After `mark_unreachable`, callers make no calls until `probe` succeeds."""

    def __init__(self, tier: RemoteTier, counters: Counters, lookup_seconds: float) -> None:
        """lookup_seconds: maximum seconds of a lookup, after which the tier counts as unreachable."""
        self.tier = tier
        self.reachable = True
        self._counters = counters
        self._lookup_seconds = lookup_seconds
        self.threads = ThreadPoolExecutor(_THREADS, "kvcache-remote")
        # A pool of its own: copies may occupy every thread of the other one, and a lookup that is late because it
        # waited for a thread would make the tier count as unreachable.
        self._lookup_threads = ThreadPoolExecutor(_LOOKUP_THREADS, "kvcache-remote-lookup")

    def run(self, function: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        """Calls a method of the tier; raises what it raises."""
        return asyncio.get_running_loop().run_in_executor(self.threads, function, *args)

    async def run_lookup(self, function: Callable[..., T], *args: Any) -> T:
        """As `run`, for methods that a Lookup waits for. Raises Unreachable if they take too long."""
        asked = asyncio.get_running_loop().run_in_executor(self._lookup_threads, function, *args)
        try:
            # After a pause of the event loop, what came meanwhile counts, which `asyncio.timeout` would cancel.
            await asyncio.wait([asked], timeout=self._lookup_seconds)
            if asked.done():
                return asked.result()
            raise Unreachable(f"no response within {self._lookup_seconds:g} s")
        finally:
            asked.cancel()

    def mark_unreachable(self, error: OSError) -> None:
        self._counters.add("remote.failures")
        if self.reachable:
            _faults.warning("the remote tier is unreachable, only this service's own entries are found", error)
        self.reachable = False

    async def probe(self) -> bool:
        """Calls an unreachable tier; returns whether it is reachable again."""
        try:
            await self.run_lookup(self.tier.engine.probe)
        except OSError:
            return False
        log.info("the remote tier is reachable")
        self.reachable = True
        return True

    def close(self) -> None:
        for threads in (self.threads, self._lookup_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self.tier.engine.close()
