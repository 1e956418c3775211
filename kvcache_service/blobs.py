"""A client for other engines: opaque entries by keys of their own, in batches, on an event loop or without one."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from fusionkv.kvcache_service import keys as digests
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.contract.limits import MAX_FOUND, MAX_READ
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.errors import Unavailable
from fusionkv.protos.runtime.tls import ClientTLS

T = TypeVar("T")

# Bytes of one call that reads several blobs.
_READ_BYTES = 64 << 20
# Puts at the same time, one on each connection.
_PUTS = 8
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Pin:
    """What `Blobs.pin` found, by position of its key; held until `Blobs.unpin`, or until the lease expires."""

    entries: tuple[Entry | None, ...]
    leases: tuple[int, ...]


class Blobs:
    """Blobs of one tenant and layout in a cache service.

    A blob has the checksum, encryption, tiers, eviction and lifetime of a chunk. It is found by its key only together
    with the tenant and the layout, a tag of everything that a reader has to know of its bytes: model, dtype, shape.
    Methods raise errors of `fusionkv.protos.runtime.errors`; timeouts in seconds cover a whole call.
    """

    def __init__(self, cache: CacheClient, *, layout: str, tenant: str = "", timeout: float = 30.0) -> None:
        self._cache = cache
        self._namespace = digests.namespace(b"blobs", {"layout": layout}, tenant)
        self._timeout = timeout

    async def prefix(self, keys: Sequence[bytes]) -> int:
        """How many keys, from the first one on, are stored without a gap. Counts as an access to them."""
        return [*await self.touch(keys), False].index(False)

    async def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Counts as an access to the blobs of these keys; returns which are stored."""
        return [entry is not None for entry in (await self.pin(keys, lease_ms=1)).entries]

    async def pin(self, keys: Sequence[bytes], *, lease_ms: int = 0) -> Pin:
        """Finds blobs, which are not evicted until they are unpinned or the lease expires.

        lease_ms: milliseconds; 0 selects the service's default.
        """
        return await self._pin(keys, lease_ms, Deadline.after(self._timeout))

    async def _pin(self, keys: Sequence[bytes], lease_ms: int, deadline: Deadline) -> Pin:
        entries: list[Entry | None] = []
        leases: list[int] = []
        for at in range(0, len(keys), MAX_FOUND):
            names = [*map(_digest, keys[at : at + MAX_FOUND])]
            remaining = deadline.remaining()
            lookup = await self._cache.find(self._namespace, names, lease_ms=lease_ms, timeout=remaining)
            entries += [hit.entry for hit in lookup.hits]
            leases += [lookup.lease] if lookup.lease else []
        return Pin(tuple(entries), tuple(leases))

    async def unpin(self, pin: Pin) -> None:
        """Releases a pin; one that has expired is ignored."""
        deadline = Deadline.after(self._timeout)
        for lease in pin.leases:
            await self._cache.release(lease, timeout=deadline.remaining())

    async def retrieve(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Fills buffers with blobs; returns which are filled. A blob of another size than its buffer is a miss.

        The content of a buffer that is not filled is undefined.
        """
        deadline, done = Deadline.after(self._timeout), list[bool]()
        _check_each(into, keys)
        for part in _batches([view.nbytes for view in into]):
            names = [*map(_digest, keys[part])]
            done += await self._cache.retrieve(self._namespace, names, into[part], timeout=deadline.remaining())
        return done

    async def store(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> list[bool]:
        """Stores blobs, which must not change until this returns; returns which are new.

        A key that is stored keeps its bytes. Raises ValueError unless each has a key, or the first error once all
        others are stored.
        """
        _check_each(data, keys)
        places, deadline = asyncio.Semaphore(_PUTS), Deadline.after(self._timeout)

        async def put(key: bytes, view: memoryview) -> bool:
            async with places:
                _, stored = await self._cache.put(
                    namespace=self._namespace,
                    path=[_digest(key)],
                    tokens=1,
                    base=0,
                    data=view,
                    offered=True,
                    timeout=deadline.remaining(),
                )
                return stored

        done = await asyncio.gather(*map(put, keys, data), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        return [bool(outcome) for outcome in done]

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes blobs; returns how many were stored."""
        deadline, found = Deadline.after(self._timeout), 0
        for at in range(0, len(keys), MAX_FOUND):
            part = keys[at : at + MAX_FOUND]
            # From its remote tier, the service deletes what it stores itself, or has found there.
            pin = await self._pin(part, 1, deadline)
            names = [digests.entry_key(self._namespace, [_digest(key)]) for key in part]
            await self._cache.delete(names, timeout=deadline.remaining())
            await self.unpin(pin)
            found += len(names) - pin.entries.count(None)
        return found

    async def clear(self) -> int:
        """Deletes all blobs of this tenant and layout; returns how many the service had."""
        return await self._cache.delete(namespace=self._namespace, timeout=self._timeout)


class BlobThread:
    """Blobs for callers without an event loop, from any thread: calls run on a thread of their own."""

    def __init__(
        self, address: str, *, layout: str, tenant: str = "", timeout: float = 30.0, tls: ClientTLS | None = None
    ) -> None:
        """address: the cache service's, `host:port` or `unix:/path`. Others as of `Blobs`."""
        self._loop = asyncio.new_event_loop()
        self._cache = CacheClient(address, tls)
        self._blobs = Blobs(self._cache, layout=layout, tenant=tenant, timeout=timeout)
        self._thread = threading.Thread(target=self._loop.run_forever, name="fusionkv-blobs", daemon=True)
        self._thread.start()
        self._closed, self._closing = False, threading.Lock()

    def submit(self, call: Callable[[Blobs], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Starts a call; the future has its result or error. Raises Unavailable after `close`."""
        with self._closing:
            if self._closed:
                raise Unavailable(f"the client of the cache service at {self._cache.address} is closed")
            return asyncio.run_coroutine_threadsafe(call(self._blobs), self._loop)

    def run(self, call: Callable[[Blobs], Coroutine[Any, Any, T]]) -> T:
        """Runs a call, and waits for its result. Raises as `submit`."""
        return self.submit(call).result()

    def close(self) -> None:
        """Ends calls in progress, which fail as Unavailable, and closes the connections."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        await self._cache.close()
        # Whoever waits for their results gets an error before the loop stops.
        if calls := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(calls, timeout=_END_SECONDS)


def _check_each(buffers: Sequence[memoryview], keys: Sequence[object]) -> None:
    """Raises ValueError unless each buffer has a key."""
    if len(buffers) != len(keys):
        raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")


def _batches(sizes: Sequence[int]) -> Iterator[slice]:
    """What one call reads each: blobs for buffers of these sizes."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and (i - start == MAX_READ or total + size > _READ_BYTES):
            yield slice(start, i)
            start, total = i, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
