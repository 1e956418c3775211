"""The service's RPC handlers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import grpc

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.keys import check_digests, check_path
from fusionkv.kvcache_service.lookup_calls import TIERS, LookupCalls, arena_offset
from fusionkv.kvcache_service.read_calls import ReadCalls
from fusionkv.kvcache_service.remote.sharing import Sharing
from fusionkv.kvcache_service.store import writing
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.transport import RESERVED
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
)
from fusionkv.protos.runtime.frames import encode_frame, frame_or

SERVICE = pb.DESCRIPTOR.services_by_name["KVCacheService"]

# Receives the bytes of an entry for which space is reserved. Raises as `Writer.write` does.
Receive: TypeAlias = Callable[[writing.Writer], Awaitable[None]]
# The header, and frames of data, which bypass protobuf.
PutMessages: TypeAlias = AsyncIterator[pb.PutRequest | memoryview]
_MAX_KEYS = 65536
# Maximum wait for a message of a Put. Without it, a few clients that stall would hold all places of max_puts.
_STALL_SECONDS = 30.0


def handler(servicer: "KVCacheServicer") -> grpc.GenericRpcHandler:
    """RPC handler for `rpc.serve`, in which KV bytes bypass protobuf (frames.py)."""
    return rpc.handlers(
        SERVICE,
        servicer,
        deserialisers={"Put": frame_or(rpc.bounded(pb.PutRequest))},
        serialisers={"Fetch": encode_frame},
    )


class KVCacheServicer:
    """Implements KVCacheService (protos/kvcache) with one store."""

    def __init__(self, store: Store, sharing: Sharing | None = None) -> None:
        """sharing: access to a remote tier; None without one."""
        self.admit: Callable[..., pb.ConnectResponse] | None = None
        """Of the data plane, if the service has one."""
        self._store = store
        self.leases = store.leases
        self._config = store.config
        self._sharing = sharing
        self.lookups = LookupCalls(store, sharing)
        self.reads = ReadCalls(store, sharing)
        self._puts = 0
        self._started = time.monotonic()

    async def Lookup(self, request: pb.LookupRequest, context: grpc.aio.ServicerContext) -> pb.LookupResponse:
        return await self.lookups.lookup(request, near=_is_near(context))

    async def Find(self, request: pb.FindRequest, context: grpc.aio.ServicerContext) -> pb.FindResponse:
        return await self.lookups.find(request, near=_is_near(context))

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[memoryview]:
        async with self.reads.entry(request) as (_, frames):
            async for frame in frames:
                yield frame

    async def Prefetch(self, request: pb.PrefetchRequest, context: grpc.aio.ServicerContext) -> pb.PrefetchResponse:
        check_digests(request.keys, "a key")
        if len(request.keys) > self._config.max_path:
            raise InvalidArgument(f"{len(request.keys)} keys at once; at most {self._config.max_path}")
        await self.reads.promote(request.keys)
        offsets = map(arena_offset, map(self._store.entries.get, request.keys))
        entries = [pb.Prefetched(arena_offset=offset) for offset in offsets]
        return pb.PrefetchResponse(entries=entries, arena=self.lookups.arena)

    async def Put(self, requests: PutMessages, context: grpc.aio.ServicerContext) -> pb.PutResponse:
        requests = _with_stall_limit(requests)
        header = _header(await anext(requests, None))

        async def receive(writer: writing.Writer) -> None:
            await context.send_initial_metadata(((RESERVED, "1"),))
            try:
                async for message in requests:
                    if not isinstance(message, memoryview):
                        raise InvalidArgument("a message after the header that is not data")
                    await writer.write(message)
            except ServiceError:
                writer.abort()
                await _drain(requests, writer.size)
                raise

        return await self.store(header, receive)

    async def store(self, header: pb.PutHeader, receive: Receive) -> pb.PutResponse:
        """Stores an entry, whose bytes are received once space is reserved."""
        record = record_of(header, self._config.max_path)
        writer = None
        stored = False
        self._puts += 1
        try:
            if self._puts > self._config.max_puts:
                raise ResourceExhausted(f"{self._puts - 1} puts are running: try again, or raise max_puts")
            await self._store.wait_until_open()
            writer = writing.reserve(self._store, record)
            if writer is not None:
                await receive(writer)
                stored = await writer.commit()
        except ResourceExhausted:
            self._store.counters.add("puts", kind="refused")
            raise
        finally:
            self._puts -= 1
            if writer is not None:
                writer.abort()
        superfluous = record.offered and self._store.entries.get(record.key) is None
        outcome = "stored" if stored else "superfluous" if superfluous else "exists"
        self._store.counters.add("puts", kind=outcome)
        if stored:
            self._store.counters.add("stored", record.size)
        return pb.PutResponse(outcome=f"OUTCOME_{outcome.upper()}", key=record.key)

    async def Connect(self, request: pb.ConnectRequest, context: grpc.aio.ServicerContext) -> pb.ConnectResponse:
        if self.admit is None:
            raise FailedPrecondition("this service has no data plane")
        return self.admit(near=_is_near(context))

    async def Release(self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.ReleaseResponse:
        return self.release(request)

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        self._store.leases.release(request.lease)
        return pb.ReleaseResponse()

    async def Delete(self, request: pb.DeleteRequest, context: grpc.aio.ServicerContext) -> pb.DeleteResponse:
        if bool(request.keys) == bool(request.namespace):
            raise InvalidArgument("give either keys or a namespace")
        keys, namespace = list(request.keys), request.namespace
        if len(keys) > _MAX_KEYS:
            raise InvalidArgument(f"{len(keys)} keys; at most {_MAX_KEYS} are deleted in one call")
        check_digests(keys, "a key")
        check_digests([namespace] if namespace else [], "the namespace")
        sharing = None if request.here else self._sharing
        await self._store.wait_until_open()  # before, not all keys of a namespace are known
        shared = await sharing.records(keys, namespace) if sharing is not None else []
        deleted = await self._store.delete(keys or self._store.entries.index.namespace_keys(namespace))
        if sharing is not None:
            await sharing.delete(shared, namespace)
            # A Lookup may have found entries there after the first deletion, and copied them here.
            await self._store.delete(keys or self._store.entries.index.namespace_keys(namespace))
        return pb.DeleteResponse(deleted=deleted)

    async def Stats(self, request: pb.StatsRequest, context: grpc.aio.ServicerContext) -> pb.StatsResponse:
        self._store.leases.expire()
        residents, counters = self._store.residents, self._store.counters
        tiers = [
            pb.TierStats(
                tier=TIERS[tier.name],
                entries=len(residents.contents[tier.name]),
                used_bytes=tier.used_bytes,
                capacity_bytes=tier.capacity_bytes,
                promotions=counters.get("promotions", tier.name),
                demotions=counters.get("demotions", tier.name),
                evictions=counters.get("evictions", tier.name),
            )
            for tier in residents.tiers
        ]
        remote = None
        if self._sharing is not None:
            remote = pb.RemoteStats(
                reachable=self._sharing.reachable,
                waiting=len(self._sharing.write_backs),
                written=counters.get("remote.writes"),
                read=counters.get("remote.reads"),
            )
        return pb.StatsResponse(
            tiers=tiers,
            hits_exact=counters.get("lookups", "exact"),
            hits_alternative=counters.get("lookups", "alternative"),
            misses=counters.get("lookups", "miss"),
            puts=counters.get("puts"),
            puts_existing=counters.get("puts", "exists"),
            puts_refused=counters.get("puts", "refused"),
            checksum_failures=counters.get("checksum.failures"),
            bytes_fetched=counters.get("fetched"),
            bytes_put=counters.get("stored"),
            active_leases=len(self._store.leases),
            uptime_seconds=time.monotonic() - self._started,
            remote=remote,
        )


def _is_near(context: grpc.aio.ServicerContext) -> bool:
    """Whether a caller is at a unix socket, so that it may read the disk tier's files itself."""
    return str(context.peer()).startswith("unix:")


async def _with_stall_limit(requests: PutMessages) -> PutMessages:
    """Passes messages on. Raises DeadlineExceeded if one does not arrive in time."""
    while True:
        try:
            async with asyncio.timeout(_STALL_SECONDS):
                message = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(f"nothing was sent for {_STALL_SECONDS:g} s") from None
        if message is None:
            return
        yield message


async def _drain(requests: PutMessages, limit: int) -> None:
    """Reads up to `limit` bytes of a refused Put.

    Otherwise some clients report a broken connection in place of the status, if the response arrives during a write.
    """
    with contextlib.suppress(DeadlineExceeded):  # the reason of the refusal is the error to report
        async for message in requests:
            limit -= len(message) + 1 if isinstance(message, memoryview) else message.ByteSize()
            if limit < 0:
                return


def _header(first: pb.PutRequest | memoryview | None) -> pb.PutHeader:
    """The header in a Put's first message."""
    if first is None or isinstance(first, memoryview) or not first.HasField("header"):
        raise InvalidArgument("the first message must be the header")
    return first.header


def record_of(header: pb.PutHeader, max_path: int) -> EntryRecord:
    """Record of a Put's header."""
    check_path(header.namespace, header.path, max_path)
    if header.variant:
        check_digests([header.variant], "the variant")
        if len(header.path) == 1:
            raise InvalidArgument("a system prompt is found by its exact path only: it has no variants")
    if len(header.checksum) != records.CHECKSUM_BYTES:
        raise InvalidArgument(f"the checksum has {len(header.checksum)} bytes, 16 are required")
    if len(header.signature) > records.MAX_SIGNATURE_BYTES:
        limit = records.MAX_SIGNATURE_BYTES
        raise InvalidArgument(f"the signature has {len(header.signature)} bytes; at most {limit} are allowed")
    if not header.size_bytes or not header.tokens:
        raise InvalidArgument("an entry has at least one token and one byte")
    return records.make(
        header.namespace, list(header.path), header.variant, header.size_bytes, header.tokens, header.base,
        header.checksum, offered=header.offered, signature=header.signature,
    )  # fmt: skip
