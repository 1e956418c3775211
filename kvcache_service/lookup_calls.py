"""Lookup and Find: what is found in the store and in the remote tier, leased, by gRPC and on the data plane."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.keys import check_digests, check_path
from fusionkv.kvcache_service.remote.sharing import Sharing
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.disk import DiskTier, readable_files
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.segments import SEGMENT_BYTES
from fusionkv.protos.contract.limits import MAX_FOUND, MAX_READ, check_variants
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument

Waiting: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
_KINDS: dict[HitKind, Any] = {kind: pb.HitKind.Value(f"HIT_KIND_{kind.name}") for kind in HitKind}
TIERS = {"memory": pb.TIER_MEMORY, "disk": pb.TIER_DISK, "remote": pb.TIER_REMOTE}


class LookupCalls:
    """Raises InvalidArgument for malformed requests, ResourceExhausted at the limit of active leases."""

    def __init__(self, store: Store, sharing: Sharing | None) -> None:
        self._store = store
        self._config = store.config
        self._sharing = sharing
        self.arena = next((t.arena for t in store.residents.tiers if isinstance(t, MemoryTier)), b"")
        self._files = readable_files(store.residents.tiers)

    async def lookup(
        self, request: pb.LookupRequest, *, near: bool, waiting: Waiting = contextlib.nullcontext
    ) -> pb.LookupResponse:
        """near: whether the caller is at a unix socket, and reads the disk tier's files itself.

        waiting: entered while the remote tier is asked.
        """
        path = [element.digest for element in request.path]
        check_path(request.namespace, path, self._config.max_path)
        for element in request.path:
            check_variants(element.variants, "a chunk")
        lease_ms = self._lease_ms(request.lease_ms)
        variants = [list(element.variants) for element in request.path]
        local, lease = self._store.lookup(request.namespace, path, variants, lease_ms / 1000)
        remote: Mapping[int, tuple[HitKind, EntryRecord]] = {}
        if self._sharing is not None:
            with self._store.leases.kept(lease), waiting():
                remote = await self._sharing.lookup(request.namespace, path, variants, local)
        return pb.LookupResponse(**self._found(local, remote, lease, lease_ms, near=near))

    async def find(
        self, request: pb.FindRequest, *, near: bool, waiting: Waiting = contextlib.nullcontext
    ) -> pb.FindResponse:
        """Parameters as of `lookup`."""
        namespace, digests = request.namespace, list(request.digests)
        check_digests([namespace], "the namespace")
        if not 1 <= len(digests) <= MAX_FOUND:
            raise InvalidArgument(f"{len(digests)} digests; 1 to {MAX_FOUND} are allowed")
        check_digests(digests, "a digest")
        if request.sizes and (len(request.sizes) != len(digests) or len(digests) > MAX_READ):
            sizes = f"{len(request.sizes)} sizes of {len(digests)} digests"
            raise InvalidArgument(f"{sizes}; one for each of at most {MAX_READ} is allowed")
        lease_ms = self._lease_ms(request.lease_ms)
        local, lease = self._store.find(namespace, digests, lease_ms / 1000)
        remote: Mapping[int, tuple[HitKind, EntryRecord]] = {}
        if self._sharing is not None:
            with self._store.leases.kept(lease), waiting():
                remote = await self._sharing.find(namespace, digests, local)
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
        return {"hits": messages, "lease": lease, "lease_ms": lease_ms if lease else 0, "arena": self.arena}

    def _local_entry(self, entry: StoredEntry) -> pb.Entry:
        fastest, place, extent = self._store.residents.fastest(entry), entry.places.get(DiskTier.name), None
        if self._files is not None and place is not None:
            segment, offset = divmod(place.offset, SEGMENT_BYTES)
            extent = pb.Extent(segment=segment, offset=offset)
        return _entry_message(entry.record, TIERS[fastest.name], arena_offset=arena_offset(entry), extent=extent)


def arena_offset(entry: StoredEntry | None) -> int | None:
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
