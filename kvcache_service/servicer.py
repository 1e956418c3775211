"""The service's RPC handlers."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from fusionkv.kvcache_service import checks
from fusionkv.kvcache_service.client import RESERVED
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.hits import HitKind
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.local.segments import readable_files
from fusionkv.kvcache_service.remote.sharing import Sharing
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.reading import Reader
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.store.writing import Writer
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import frames, rpc
from fusionkv.protos.runtime.errors import InvalidArgument, ResourceExhausted, ServiceError

SERVICE = pb.DESCRIPTOR.services_by_name["KVCacheService"]

_KINDS = {
    HitKind.EXACT: pb.HIT_KIND_EXACT,
    HitKind.ALTERNATIVE: pb.HIT_KIND_ALTERNATIVE,
    HitKind.MISS: pb.HIT_KIND_MISS,
}
_OUTCOMES = {
    "stored": pb.PutResponse.OUTCOME_STORED,
    "exists": pb.PutResponse.OUTCOME_EXISTS,
    "superfluous": pb.PutResponse.OUTCOME_SUPERFLUOUS,
}
_TIERS = {"memory": pb.TIER_MEMORY, "disk": pb.TIER_DISK, "remote": pb.TIER_REMOTE}
# Lookups run on the event loop; with this limit, one takes less than a millisecond per chunk.
_MAX_VARIANTS = 64
_MAX_KEYS = 65536


def handler(servicer: "KVCacheServicer") -> grpc.GenericRpcHandler:
    """RPC handler for `rpc.serve`, in which KV bytes bypass protobuf (frames.py)."""
    return rpc.handlers(
        SERVICE,
        servicer,
        deserialisers={"Put": frames.frame_or(pb.PutRequest.FromString)},
        serialisers={"Fetch": frames.encode_frame},
    )


class KVCacheServicer:
    """Implements KVCacheService (protos/kvcache) with one store."""

    def __init__(self, store: Store, config: Config, sharing: Sharing | None = None) -> None:
        """sharing: access to a remote tier; None without one."""
        self._store = store
        self._config = config
        self._sharing = sharing
        self._arena = next((t.arena for t in store.residents.tiers if isinstance(t, MemoryTier)), b"")
        self._files = readable_files(store.residents.tiers)
        self._puts = 0
        self._fetches = 0
        self._started = time.monotonic()

    async def Lookup(self, request: pb.LookupRequest, context: grpc.aio.ServicerContext) -> pb.LookupResponse:
        path = [element.digest for element in request.path]
        checks.path(request.namespace, path, self._config.max_path)
        for element in request.path:
            checks.digests(element.variants, "a variant")
            if len(element.variants) > _MAX_VARIANTS:
                raise InvalidArgument(f"{len(element.variants)} variants of one chunk; at most {_MAX_VARIANTS}")
        lease_ms = min(request.lease_ms or self._config.lease_ms, self._config.max_lease_ms)
        variants = [list(element.variants) for element in request.path]
        local, lease = self._store.lookup(request.namespace, path, variants, lease_ms / 1000)
        remote = await self._sharing.find(request.namespace, path, variants, local) if self._sharing else {}
        kinds = [remote[i][0] if i in remote else kind for i, (kind, _) in enumerate(local)]
        for kind, n in Counter(kinds).items():
            self._store.counters.add("lookups", n, kind=kind.value)
        hits = [
            pb.Hit(kind=_KINDS[kinds[i]], entry=_entry_of(remote[i][1], pb.TIER_REMOTE))
            if i in remote
            else pb.Hit(kind=_KINDS[kind], entry=self._entry(entry) if entry else None)
            for i, (kind, entry) in enumerate(local)
        ]
        own = (entry for i, (_, entry) in enumerate(local) if entry is not None and i not in remote)
        files_read = self._files is not None and context.peer().startswith("unix:")
        self._store.prefetcher.soon([entry for entry in dict.fromkeys(own) if self._slow(entry, files_read)])
        return pb.LookupResponse(hits=hits, lease=lease, lease_ms=lease_ms if lease else 0, arena=self._arena)

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[memoryview]:
        checks.digests([request.key], "the key")
        if self._fetches >= self._config.max_fetches:
            raise ResourceExhausted(f"{self._fetches} fetches are running: try again, or raise max_fetches")
        self._fetches += 1
        reader: Reader | None = None

        def end(_: object) -> None:
            if reader is not None:
                reader.close()
            self._fetches -= 1

        # gRPC calls this at any end of the call; the `finally` of a cancelled generator waits for garbage collection.
        context.add_done_callback(end)  # type: ignore[arg-type]  # the stubs want a class here
        reader = await self._read(request.key)
        async for frame in reader.frames():
            yield frame

    async def Prefetch(self, request: pb.PrefetchRequest, context: grpc.aio.ServicerContext) -> pb.PrefetchResponse:
        checks.digests(request.keys, "a key")
        if len(request.keys) > self._config.max_path:
            raise InvalidArgument(f"{len(request.keys)} keys at once; at most {self._config.max_path}")
        if self._fetches >= self._config.max_fetches:
            raise ResourceExhausted(f"{self._fetches} fetches are running: try again, or raise max_fetches")
        self._fetches += 1
        try:
            await asyncio.gather(*map(self._rise, request.keys))
        finally:
            self._fetches -= 1
        residents = map(self._store.residents.get, request.keys)
        entries = [pb.Prefetched(arena_offset=_arena_offset(entry)) for entry in residents]
        return pb.PrefetchResponse(entries=entries, arena=self._arena)

    async def Put(
        self, requests: AsyncIterator[pb.PutRequest | memoryview], context: grpc.aio.ServicerContext
    ) -> pb.PutResponse:
        try:
            return await self._put(requests, context)
        except ResourceExhausted:
            self._store.counters.add("puts", kind="refused")
            raise

    async def _put(
        self, requests: AsyncIterator[pb.PutRequest | memoryview], context: grpc.aio.ServicerContext
    ) -> pb.PutResponse:
        header = checks.header(await anext(requests, None))
        record = checks.record(header, self._config.max_path)
        if self._puts >= self._config.max_puts:
            raise ResourceExhausted(f"{self._puts} puts are running: try again, or raise max_puts")
        self._puts += 1
        writer = None
        try:
            await self._store.opened()
            writer = self._store.write(record)
            stored = False
            if writer is not None:
                await context.send_initial_metadata(((RESERVED, "1"),))
                stored = await _receive(requests, writer)
        except ServiceError:
            if writer is not None:
                writer.abort()
                await _drain(requests, record.size)
            raise
        finally:
            self._puts -= 1
            if writer is not None:
                writer.abort()
        superfluous = record.offered and self._store.residents.get(record.key) is None
        outcome = "stored" if stored else "superfluous" if superfluous else "exists"
        self._store.counters.add("puts", kind=outcome)
        if stored:
            self._store.counters.add("bytes.put", record.size)
        return pb.PutResponse(outcome=_OUTCOMES[outcome], key=record.key)

    async def Release(self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.ReleaseResponse:
        self._store.leases.release(request.lease)
        return pb.ReleaseResponse()

    async def Delete(self, request: pb.DeleteRequest, context: grpc.aio.ServicerContext) -> pb.DeleteResponse:
        if bool(request.keys) == bool(request.namespace):
            raise InvalidArgument("give either keys or a namespace")
        keys, namespace = list(request.keys), request.namespace
        if len(keys) > _MAX_KEYS:
            raise InvalidArgument(f"{len(keys)} keys; at most {_MAX_KEYS} are deleted in one call")
        checks.digests(keys, "a key")
        checks.digests([namespace] if namespace else [], "the namespace")
        sharing = None if request.here else self._sharing
        shared = await sharing.known(keys, namespace) if sharing is not None else []
        deleted = await self._store.delete(keys or self._store.residents.index.namespace_keys(namespace))
        if sharing is not None:
            await sharing.delete(shared, namespace)
        return pb.DeleteResponse(deleted=deleted)

    async def Stats(self, request: pb.StatsRequest, context: grpc.aio.ServicerContext) -> pb.StatsResponse:
        self._store.leases.expire()
        counters = self._store.counters
        return pb.StatsResponse(
            tiers=list(self._tier_stats()),
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
            remote=self._sharing.stats() if self._sharing else None,
        )

    async def _read(self, key: bytes) -> Reader:
        """Opens an entry, copied from the remote tier if it is not local. Raises NotFound as `Store.read` does."""
        if self._store.residents.get(key) is None and self._sharing is not None:
            await self._sharing.bring(key)
        return self._store.read(key)

    async def _rise(self, key: bytes) -> None:
        if self._store.residents.get(key) is not None:
            await self._store.rise(key)
        elif self._sharing is not None:
            with contextlib.suppress(ResourceExhausted):  # it is not in memory then
                await self._sharing.bring(key)

    def _tier_stats(self) -> Iterator[pb.TierStats]:
        residents, counters = self._store.residents, self._store.counters
        for tier in residents.tiers:
            yield pb.TierStats(
                tier=_TIERS[tier.name],
                entries=residents.count(tier),
                used_bytes=tier.used_bytes,
                capacity_bytes=tier.capacity_bytes,
                promotions=counters.get("promotions", tier.name),
                demotions=counters.get("demotions", tier.name),
                evictions=counters.get("evictions", tier.name),
            )

    def _entry(self, entry: StoredEntry) -> pb.Entry:
        fastest = next(tier for tier in self._store.residents.tiers if tier.name in entry.places)
        local = {"arena_offset": _arena_offset(entry), "extent": self._extent(entry)}
        return _entry_of(entry.record, _TIERS[fastest.name], **local)

    def _slow(self, entry: StoredEntry, files_read: bool) -> bool:
        """Whether an entry is only in slow tiers; files_read: the caller reads the disk tier's files itself."""
        fastest = next(tier for tier in self._store.residents.tiers if tier.name in entry.places)
        return fastest.blocking and not (files_read and DiskTier.name in entry.places)

    def _extent(self, entry: StoredEntry) -> pb.Extent | None:
        place = entry.places.get(DiskTier.name)
        if self._files is None or place is None:
            return None
        segment, offset = self._files.extent(place)
        return pb.Extent(segment=segment, offset=offset)


def _arena_offset(entry: StoredEntry | None) -> int | None:
    place = entry and entry.places.get(MemoryTier.name)
    return place.offset if place else None


def _entry_of(record: Record, tier: pb.Tier, **more: Any) -> pb.Entry:
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


async def _receive(requests: AsyncIterator[pb.PutRequest | memoryview], writer: Writer) -> bool:
    async for part in requests:
        if not isinstance(part, memoryview):
            raise InvalidArgument("a message after the header that is not data")
        await writer.write(part)
    return await writer.commit()


async def _drain(requests: AsyncIterator[pb.PutRequest | memoryview], limit: int) -> None:
    """Reads up to `limit` bytes of a refused Put.

    Otherwise some clients report a broken connection in place of the status, if the response arrives during a write.
    """
    async for part in requests:
        limit -= len(part) + 1 if isinstance(part, memoryview) else part.ByteSize()
        if limit < 0:
            return
