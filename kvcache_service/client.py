"""The client of the cache service."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
from opentelemetry import propagate, trace

from fusionkv.kvcache_service import answers
from fusionkv.kvcache_service.answers import Entry, Hit, Lookup
from fusionkv.kvcache_service.hits import HitKind
from fusionkv.kvcache_service.local.arena import ShmView
from fusionkv.kvcache_service.local.segments import Segments, read_into
from fusionkv.kvcache_service.store.rise import Rise
from fusionkv.kvcache_service.stubs import bind
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import frames, rpc
from fusionkv.protos.runtime.checksum import Checksum
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from fusionkv.protos.runtime.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    ServiceError,
    Unavailable,
    from_rpc,
)
from fusionkv.protos.runtime.tls import ClientTLS

__all__ = ["CacheClient", "Entry", "Hit", "HitKind", "Lookup"]

tracer = trace.get_tracer(__name__)

# Key in the initial metadata of a Put: space is reserved, and the client shall send the data.
RESERVED = "fusionkv-reserved"
# Below this size, a checksum (about 10 GB/s) takes less time than a hop to a thread.
_HASH_INLINE_BYTES = 1 << 20
# Maximum time in which a request waits for the deletion of a damaged entry.
_DELETE_DAMAGED_SECONDS = 0.5
# Timeout of calls in the background.
_RISE_SECONDS = 10.0


class CacheClient:
    """A client of one cache service at `host:port` or `unix:/path`. Connects on first use.

    Supports concurrent calls within one event loop. All errors are raised as `fusionkv.protos.runtime.errors`;
    timeouts are in seconds and cover the whole call. A host name with several addresses connects to one of them, and
    fails over to another.
    """

    def __init__(self, address: str, tls: ClientTLS | None = None) -> None:
        self.address = address
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._put_channel: grpc.aio.Channel | None = None
        self._stubs: dict[str, Any] = {}
        self._window = ShmView(address)
        self._segments = Segments(address)
        self._rise = Rise(self._prefetch)

    async def lookup(
        self,
        namespace: bytes,
        path: Sequence[tuple[bytes, Sequence[bytes]]],
        *,
        lease_ms: int = 0,
        timeout: float,
    ) -> Lookup:
        """Finds and leases a prompt's entries; `path` contains (digest, variants), system prompt first."""
        elements = [pb.PathElement(digest=digest, variants=variants) for digest, variants in path]
        request = pb.LookupRequest(namespace=namespace, path=elements, lease_ms=lease_ms)
        sent = time.monotonic()
        response = await self._call("Lookup", request, timeout)
        # The service measures the lease from the arrival of the request, or later.
        self._window.leased(response.lease, sent + response.lease_ms / 1000)
        shared = await self._window.open(response.arena)
        return Lookup(tuple(answers.hit(hit, response.lease, shared) for hit in response.hits), response.lease)

    async def fetch(self, entry: Entry, into: memoryview, *, timeout: float) -> None:
        """Fills `into` (`entry.size` bytes) from shared memory or segment files if possible, otherwise by stream.

        Bytes from disk or the network are verified by checksum; those from shared memory are not.

        Raises:
            DataLoss: The checksum does not match. The service was requested to delete the entry.
            NotFound: The entry is gone, or was in a remote tier that is unreachable.
        """
        into = into.cast("B")
        if len(into) != entry.size:
            raise InvalidArgument(f"the buffer holds {len(into)} bytes, the entry {entry.size}")
        if self.on_disk(entry) and await self.read(entry, partial(read_into, into), timeout=timeout):
            return
        shared = entry.shared or await self._risen(entry, timeout)
        if shared is not None and await self._window.copied(shared, entry.lease, into):
            return
        hasher, at, end = Checksum(), 0, 0
        call = self._begin("Fetch", pb.FetchRequest(key=entry.key), timeout)
        try:
            async for message in call:
                data = frames.decode_frame(message)
                end = at + len(data)
                if end > entry.size:
                    break
                into[at:end] = data
                hasher.update(data)
                at = end
        except grpc.RpcError as error:
            raise self._error(error, "fetch from") from error
        except ValueError as error:
            raise DataLoss(f"fetch from the cache service at {self.address}: {error}") from error
        finally:
            call.cancel()
        if end != entry.size or hasher.digest() != entry.checksum:
            with contextlib.suppress(ServiceError):  # the damage is the error to report
                await self.delete([entry.key], here=True, timeout=min(timeout, _DELETE_DAMAGED_SECONDS))
            raise DataLoss(f"entry {entry.key.hex()} arrived damaged from {self.address}; it is deleted there")

    def seen(self, entry: Entry) -> memoryview | None:
        """View of an entry in the service's shared memory; None if it is not there, or not leased.

        Results computed from it are valid if the entry is still `held` afterwards.
        """
        return entry.shared if self.held(entry) else None

    def held(self, entry: Entry) -> bool:
        """Whether the lease of the Lookup that found an entry is still held. Thread-safe."""
        return self._window.held(entry.lease)

    def on_disk(self, entry: Entry) -> bool:
        """Whether an entry is in segment files of this machine, and not in shared memory."""
        return entry.shared is None and entry.extent is not None

    async def read(self, entry: Entry, reader: Callable[[int, int], bytes], *, timeout: float) -> bool:
        """Reads an entry that is `on_disk` in a thread. The service then promotes it, if hot enough.

        Args:
            reader: Takes a file descriptor and an offset; returns the checksum (protos/runtime/checksum.py) of the
                `entry.size` bytes read, or empty bytes on failure.

        Returns:
            False if it cannot be read, or does not have its checksum.
        """
        if entry.extent is None or not self._window.opened(entry.lease):
            return False
        try:
            async with asyncio.timeout(timeout):
                digest = await self._segments.read(self._window.name, entry.extent, reader)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"reading segment files of {self.address} took longer than {timeout:g} s"
            ) from error
        if digest != entry.checksum or not self._window.held(entry.lease):
            return False
        self._rise.soon(entry.key)
        return True

    async def _risen(self, entry: Entry, timeout: float) -> memoryview | None:
        """Has a leased entry promoted; returns its view in shared memory, None if it is not there."""
        if not self._window.opened(entry.lease):
            return None
        try:
            response = await self._prefetch([entry.key], timeout)
        except ServiceError:
            return None  # the stream, which is tried next, raises the error
        arena = await self._window.open(response.arena)
        return None if arena is None else answers.shared(response.entries[0], arena, entry.size)

    async def _prefetch(self, keys: Sequence[bytes], timeout: float = _RISE_SECONDS) -> pb.PrefetchResponse:
        """Has entries promoted to memory, if hot enough; the response has their offsets."""
        response: pb.PrefetchResponse = await self._call("Prefetch", pb.PrefetchRequest(keys=keys), timeout)
        return response

    async def put(
        self,
        *,
        namespace: bytes,
        path: Sequence[bytes],
        variant: bytes = b"",
        tokens: int,
        base: int,
        data: memoryview,
        offered: bool = False,
        signature: bytes = b"",
        timeout: float,
    ) -> tuple[bytes, bool]:
        """Stores one entry.

        Args:
            data: The bytes, which must not change until this returns.
            offered: Not precomputed: store it only if useful (see Put in protos/kvcache).
            signature: Up to 63 bytes that are stored with the entry.

        Returns:
            The key, and whether the entry was stored. False if it exists or is superfluous.
        """
        data = data.cast("B")
        deadline = time.monotonic() + timeout
        if len(data) > _HASH_INLINE_BYTES:
            checksum = await asyncio.to_thread(checksum_of, data)
        else:
            checksum = checksum_of(data)
        header = pb.PutHeader(
            namespace=namespace,
            path=path,
            variant=variant,
            size_bytes=len(data),
            tokens=tokens,
            base=base,
            checksum=checksum,
            offered=offered,
            signature=signature,
        )
        response = await self._send(header, data, deadline - time.monotonic())
        return response.key, response.outcome == pb.PutResponse.OUTCOME_STORED

    async def release(self, lease: int, *, timeout: float = 5.0) -> None:
        """Ends a lease; an unknown or expired one is ignored."""
        self._window.released(lease)
        await self._call("Release", pb.ReleaseRequest(lease=lease), timeout)

    async def delete(
        self, keys: Sequence[bytes] = (), *, namespace: bytes = b"", here: bool = False, timeout: float = 30.0
    ) -> int:
        """Deletes entries by key, or all of a namespace.

        Args:
            here: Keep entries in the remote tier.

        Returns:
            Number of entries deleted in this service.
        """
        response = await self._call("Delete", pb.DeleteRequest(keys=keys, namespace=namespace, here=here), timeout)
        return int(response.deleted)

    async def stats(self, *, timeout: float = 5.0) -> pb.StatsResponse:
        """Counters and gauges of the service."""
        return await self._call("Stats", pb.StatsRequest(), timeout)

    async def close(self) -> None:
        """Closes the connection; calls in progress fail."""
        self._rise.close()
        for channel in (self._channel, self._put_channel):
            if channel is not None:
                await channel.close()
        self._channel = self._put_channel = None
        self._stubs.clear()
        self._segments.close()

    async def _send(self, header: pb.PutHeader, data: memoryview, timeout: float) -> pb.PutResponse:
        """Sends one Put."""
        doing = "put at"
        rpc_of = {"rpc.system": "grpc", "rpc.service": "kvcache.v1.KVCacheService", "rpc.method": "Put"}
        name = "/kvcache.v1.KVCacheService/Put"
        with tracer.start_as_current_span(name, kind=trace.SpanKind.CLIENT, attributes=rpc_of):
            metadata: dict[str, str] = {}
            propagate.inject(metadata)
            call = self._begin("Put", None, timeout, metadata=tuple(metadata.items()))
            try:
                try:
                    await _write(call, header, data)
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.INTERNAL:
                        raise
                    # grpc.aio raises INTERNAL for a write on a broken connection.
                    raise self._lost(doing) from error
                return await call
            except grpc.RpcError as error:
                raise self._error(error, doing) from error
            finally:
                call.cancel()

    async def _call(self, method: str, request: Any, timeout: float) -> Any:
        try:
            return await self._begin(method, request, timeout)
        except grpc.RpcError as error:
            raise self._error(error, f"{method.lower()} at") from error

    def _begin(self, method: str, request: Any, timeout: float, **more: Any) -> Any:
        """Starts a call. The channel is created here, since it binds to the running event loop."""
        if timeout <= 0:
            # gRPC would interpret 0 as no deadline.
            raise DeadlineExceeded(f"no time left for {method.lower()} at the cache service at {self.address}")
        if self._channel is None:
            frames.keep_freed_memory()
            self._channel = rpc.dial(self.address, tls=self._tls)
            self._put_channel = rpc.dial(self.address, tls=self._tls, traced=False)
            self._stubs = bind(self._channel, self._put_channel)
        return self._stubs[method](request, timeout=timeout, **more)

    def _error(self, error: grpc.RpcError, doing: str) -> ServiceError:
        return from_rpc(error, f"{doing} the cache service at {self.address}")

    def _lost(self, doing: str) -> Unavailable:
        """Error of a call that ended with the server, which cancels calls after its drain time."""
        return Unavailable(f"{doing} the cache service at {self.address}: it stopped during the call")


async def _write(call: Any, header: pb.PutHeader, data: memoryview) -> None:
    """Sends the header, waits until the server has reserved space, then sends the data.

    If the server does not need the data, it responds at once. Sending data anyway would waste bandwidth and lose the
    status: grpc.aio reports INTERNAL for a write after the end of its call.
    """
    # The call has ended, and its status has the reason. InternalError: it ended directly before the half-close.
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError):
        await call.write(pb.PutRequest(header=header))
        if RESERVED in await call.initial_metadata():
            for frame in frames.split(data):
                await call.write(frame)
            await call.done_writing()
