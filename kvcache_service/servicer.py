"""The service's RPC handlers, and validation of requests."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import grpc

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.keys import DIGEST_BYTES
from fusionkv.kvcache_service.remote.sharing import Sharing
from fusionkv.kvcache_service.store import writing
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.disk import DiskTier, readable_files
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.segments import SEGMENT_BYTES
from fusionkv.kvcache_service.transport import RESERVED
from fusionkv.protos.contract.limits import MAX_FOUND, MAX_READ, check_variants
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from fusionkv.protos.runtime.frames import encode_frame, frame_or

SERVICE = pb.DESCRIPTOR.services_by_name["KVCacheService"]

Waiting: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
# Receives the bytes of an entry for which space is reserved. Raises as `Writer.write` does.
Receive: TypeAlias = Callable[[writing.Writer], Awaitable[None]]
# The header, and frames of data, which bypass protobuf.
PutMessages: TypeAlias = AsyncIterator[pb.PutRequest | memoryview]
_KINDS: dict[HitKind, Any] = {kind: pb.HitKind.Value(f"HIT_KIND_{kind.name}") for kind in HitKind}
_TIERS = {"memory": pb.TIER_MEMORY, "disk": pb.TIER_DISK, "remote": pb.TIER_REMOTE}
_MAX_KEYS = 65536
# Maximum wait for a message of a Put. Without it, a few clients that stall would hold all places of max_puts.
_STALL_SECONDS = 30.0


def handler(servicer: "KVCacheServicer") -> grpc.GenericRpcHandler:
    """RPC handler for `rpc.serve`, in which KV bytes bypass protobuf (frames.py)."""
    return rpc.handlers(
        SERVICE,
        servicer,
        deserialisers={"Put": frame_or(pb.PutRequest.FromString)},
        serialisers={"Fetch": encode_frame},
    )


class KVCacheServicer:
    """Implements KVCacheService (protos/kvcache) with one store."""

    def __init__(self, store: Store, sharing: Sharing | None = None) -> None:
        """sharing: access to a remote tier; None without one."""
        self.admit: Callable[..., pb.ConnectResponse] | None = None
        """Of the data plane, if the service has one."""
        self._store = store
        self._config = store.config
        self._sharing = sharing
        self._arena = next((t.arena for t in store.residents.tiers if isinstance(t, MemoryTier)), b"")
        self._files = readable_files(store.residents.tiers)
        self._puts = 0
        self._fetches = 0
        self._started = time.monotonic()

    async def Lookup(self, request: pb.LookupRequest, context: grpc.aio.ServicerContext) -> pb.LookupResponse:
        return await self.lookup(request, near=_is_near(context))

    async def lookup(
        self, request: pb.LookupRequest, *, near: bool, waiting: Waiting = contextlib.nullcontext
    ) -> pb.LookupResponse:
        """near: whether the caller is at a unix socket, and reads the disk tier's files itself.

        waiting: entered while the remote tier is asked.
        """
        path = [element.digest for element in request.path]
        _check_path(request.namespace, path, self._config.max_path)
        for element in request.path:
            check_variants(element.variants, "a chunk")
        lease_ms = self._lease_ms(request.lease_ms)
        variants = [list(element.variants) for element in request.path]
        local, lease = self._store.lookup(request.namespace, path, variants, lease_ms / 1000)
        remote: Mapping[int, tuple[HitKind, EntryRecord]] = {}
        try:
            if self._sharing is not None:
                with waiting():
                    remote = await self._sharing.lookup(request.namespace, path, variants, local)
        except BaseException:  # the caller hung up, and never learns of the lease
            self._store.leases.release(lease)
            raise
        return pb.LookupResponse(**self._found(local, remote, lease, lease_ms, near=near))

    async def Find(self, request: pb.FindRequest, context: grpc.aio.ServicerContext) -> pb.FindResponse:
        return await self.find(request, near=_is_near(context))

    async def find(
        self, request: pb.FindRequest, *, near: bool, waiting: Waiting = contextlib.nullcontext
    ) -> pb.FindResponse:
        """Parameters as of `lookup`."""
        namespace, digests = request.namespace, list(request.digests)
        _check_digests([namespace], "the namespace")
        if not 1 <= len(digests) <= MAX_FOUND:
            raise InvalidArgument(f"{len(digests)} digests; 1 to {MAX_FOUND} are allowed")
        _check_digests(digests, "a digest")
        if request.sizes and (len(request.sizes) != len(digests) or len(digests) > MAX_READ):
            sizes = f"{len(request.sizes)} sizes of {len(digests)} digests"
            raise InvalidArgument(f"{sizes}; one for each of at most {MAX_READ} is allowed")
        lease_ms = self._lease_ms(request.lease_ms)
        local, lease = self._store.find(namespace, digests, lease_ms / 1000)
        remote: Mapping[int, tuple[HitKind, EntryRecord]] = {}
        try:
            if self._sharing is not None:
                with waiting():
                    remote = await self._sharing.find(namespace, digests, local)
        except BaseException:
            self._store.leases.release(lease)
            raise
        return pb.FindResponse(**self._found(local, remote, lease, lease_ms, near=near))

    def _lease_ms(self, asked: int) -> int:
        return min(asked or self._config.lease_ms, self._config.max_lease_ms)

    def _found(
        self,
        local: Sequence[tuple[HitKind, StoredEntry | None]],
        remote: Mapping[int, tuple[HitKind, EntryRecord]],
        lease: int,
        lease_ms: int,
        *,
        near: bool,
    ) -> dict[str, Any]:
        """The fields of a response: what is found here and, by number, in the remote tier."""
        hits: list[tuple[HitKind, pb.Entry | None]] = []
        slow: dict[StoredEntry, None] = {}  # in order, without duplicates
        for i, (kind, entry) in enumerate(local):
            if i in remote:
                kind, record = remote[i]
                hits.append((kind, _entry_message(record, pb.TIER_REMOTE)))
            elif entry is None or not entry.places:  # its lease may be over by now
                hits.append((HitKind.MISS, None))
            else:
                hits.append((kind, self._local_entry(entry)))
                if self._store.residents.fastest(entry).blocking:
                    slow[entry] = None
        for kind, count in Counter(kind for kind, _ in hits).items():
            self._store.counters.add("lookups", count, kind=kind.value)
        self._store.reader.prefetch([*slow], later=self._files is not None and near)
        messages = [pb.Hit(kind=_KINDS[kind], entry=entry) for kind, entry in hits]
        return {"hits": messages, "lease": lease, "lease_ms": lease_ms if lease else 0, "arena": self._arena}

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[memoryview]:
        async with self.reading(request) as (_, frames):
            async for frame in frames:
                yield frame

    @contextlib.asynccontextmanager
    async def reading(self, request: pb.FetchRequest) -> AsyncIterator[tuple[int, AsyncIterator[memoryview]]]:
        """Pins an entry; yields its size and its bytes, in frames as of `Reader.frames`."""
        with self._fetching():
            async with self._reading(request) as reading:
                yield reading

    @contextlib.asynccontextmanager
    async def reading_found(
        self, found: pb.FindResponse, sizes: Sequence[int]
    ) -> AsyncIterator[AsyncIterator[memoryview]]:
        """Pins those entries of a response that are in memory and have these sizes; yields their bytes, in order.

        Notes their indexes in the response, and takes back its lease if these are all that was found.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._fetching())
                readings = []
                for i, (hit, size) in enumerate(zip(found.hits, sizes, strict=True)):
                    if hit.entry.tier == pb.TIER_MEMORY and hit.entry.size_bytes == size:
                        entry = stack.enter_context(self._store.reader.pinned(hit.entry.key, hit.entry.checksum))
                        readings.append(self._store.reader.frames(entry))
                        found.following.append(i)
                if len(found.following) == sum(hit.HasField("entry") for hit in found.hits):
                    self._store.leases.release(found.lease)
                    found.lease = found.lease_ms = 0
                yield _joined(readings)
            except BaseException:
                self._store.leases.release(found.lease)
                raise

    @contextlib.asynccontextmanager
    async def reading_all(
        self, request: pb.FetchAllRequest
    ) -> AsyncIterator[tuple[list[int], AsyncIterator[memoryview]]]:
        """Pins entries; yields their sizes and their bytes, in order. 0 is the size of one that can't be read."""
        if len(request.entries) > MAX_READ:
            raise InvalidArgument(f"{len(request.entries)} entries; at most {MAX_READ} are read in one call")
        sizes: list[int] = []
        readings: list[AsyncIterator[memoryview]] = []
        with self._fetching():
            async with contextlib.AsyncExitStack() as stack:
                for entry in request.entries:
                    try:
                        size, frames = await stack.enter_async_context(self._reading(entry))
                        # It is verified before its first frame.
                        readings += _only(await anext(frames)), frames
                    except (NotFound, DataLoss, Unavailable, ResourceExhausted):
                        size = 0
                    sizes.append(size)
                yield sizes, _joined(readings)

    @contextlib.asynccontextmanager
    async def _reading(self, request: pb.FetchRequest) -> AsyncIterator[tuple[int, AsyncIterator[memoryview]]]:
        _check_digests([request.key], "the key")
        if len(request.checksum) not in (0, records.CHECKSUM_BYTES):
            raise InvalidArgument(f"the checksum has {len(request.checksum)} bytes, 16 are required")
        if self._sharing is not None and self._store.entries.get(request.key) is None:
            await self._sharing.pulls.pull(request.key)
        with self._store.reader.pinned(request.key, request.checksum) as entry:
            yield entry.record.size, self._store.reader.frames(entry)

    async def Prefetch(self, request: pb.PrefetchRequest, context: grpc.aio.ServicerContext) -> pb.PrefetchResponse:
        _check_digests(request.keys, "a key")
        if len(request.keys) > self._config.max_path:
            raise InvalidArgument(f"{len(request.keys)} keys at once; at most {self._config.max_path}")
        with self._fetching():
            await asyncio.gather(*map(self._promote, request.keys))
        residents = map(self._store.entries.get, request.keys)
        entries = [pb.Prefetched(arena_offset=_arena_offset(entry)) for entry in residents]
        return pb.PrefetchResponse(entries=entries, arena=self._arena)

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
            self._store.counters.add("bytes.put", record.size)
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
        _check_digests(keys, "a key")
        _check_digests([namespace] if namespace else [], "the namespace")
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
                tier=_TIERS[tier.name],
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
            bytes_fetched=counters.get("bytes.fetched"),
            bytes_put=counters.get("bytes.put"),
            active_leases=len(self._store.leases),
            uptime_seconds=time.monotonic() - self._started,
            remote=remote,
        )

    @contextlib.contextmanager
    def _fetching(self) -> Iterator[None]:
        if self._fetches >= self._config.max_fetches:
            raise ResourceExhausted(f"{self._fetches} fetches are running: try again, or raise max_fetches")
        self._fetches += 1
        try:
            yield
        finally:
            self._fetches -= 1

    async def _promote(self, key: bytes) -> None:
        if (entry := self._store.entries.get(key)) is not None:
            await self._store.reader.promote(entry)
        elif self._sharing is not None:
            with contextlib.suppress(ResourceExhausted):  # it is not in memory then
                await self._sharing.pulls.pull(key)

    def _local_entry(self, entry: StoredEntry) -> pb.Entry:
        fastest, place, extent = self._store.residents.fastest(entry), entry.places.get(DiskTier.name), None
        if self._files is not None and place is not None:
            segment, offset = divmod(place.offset, SEGMENT_BYTES)
            extent = pb.Extent(segment=segment, offset=offset)
        return _entry_message(entry.record, _TIERS[fastest.name], arena_offset=_arena_offset(entry), extent=extent)


def _arena_offset(entry: StoredEntry | None) -> int | None:
    place = entry and entry.places.get(MemoryTier.name)
    return place.offset if place else None


def _entry_message(record: EntryRecord, tier: pb.Tier, **more: Any) -> pb.Entry:
    return pb.Entry(
        key=record.key,
        size_bytes=record.size,
        tokens=record.tokens,
        base=record.base,
        checksum=record.checksum,
        tier=tier,
        variant=record.variant,
        signature=record.signature,
        **more,
    )


def _is_near(context: grpc.aio.ServicerContext) -> bool:
    """Whether a caller is at a unix socket, so that it may read the disk tier's files itself."""
    return str(context.peer()).startswith("unix:")


async def _only(frame: memoryview) -> AsyncIterator[memoryview]:
    yield frame


async def _joined(readings: Iterable[AsyncIterator[memoryview]]) -> AsyncIterator[memoryview]:
    for frames in readings:
        async for frame in frames:
            yield frame


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


def _check_digests(values: Iterable[bytes], what: str) -> None:
    for digest in values:
        if len(digest) != DIGEST_BYTES:
            raise InvalidArgument(f"{what} has {len(digest)} bytes, a digest has {DIGEST_BYTES}")


def _check_path(namespace: bytes, elements: Sequence[bytes], limit: int) -> None:
    _check_digests([namespace], "the namespace")
    if not 1 <= len(elements) <= limit:
        raise InvalidArgument(f"a path of {len(elements)} elements; 1 to {limit} are allowed")
    _check_digests(elements, "a digest of the path")


def _header(first: pb.PutRequest | memoryview | None) -> pb.PutHeader:
    """The header in a Put's first message."""
    if first is None or isinstance(first, memoryview) or not first.HasField("header"):
        raise InvalidArgument("the first message must be the header")
    return first.header


def record_of(header: pb.PutHeader, max_path: int) -> EntryRecord:
    """Record of a Put's header."""
    _check_path(header.namespace, header.path, max_path)
    if header.variant:
        _check_digests([header.variant], "the variant")
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
        header.namespace,
        list(header.path),
        header.variant,
        header.size_bytes,
        header.tokens,
        header.base,
        header.checksum,
        offered=header.offered,
        signature=header.signature,
    )
