"""The client of the cache service."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from fusionkv.kvcache_service.index.record import HitKind
from fusionkv.kvcache_service.local import LocalTiers, read_into
from fusionkv.kvcache_service.transport import Transport
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from fusionkv.protos.runtime.tls import ClientTLS

__all__ = ["CacheClient", "Entry", "Hit", "HitKind", "Lookup"]

_KINDS = {pb.HitKind.Value(f"HIT_KIND_{kind.name}"): kind for kind in HitKind}
_TIERS = {pb.TIER_MEMORY: "memory", pb.TIER_DISK: "disk", pb.TIER_REMOTE: "remote"}
# Below this size, a checksum (about 10 GB/s) takes less time than a hop to a thread.
_HASH_INLINE_BYTES = 1 << 20
# Maximum time in which a request waits for the deletion of a damaged entry.
_DELETE_DAMAGED_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored chunk; `size` in bytes, `base` is the RoPE position of its first token."""

    key: bytes
    size: int
    tokens: int
    base: int
    checksum: bytes
    tier: str
    """"memory", "disk" or "remote": in the shared tier, not covered by the lease."""
    variant: bytes
    """Empty for full attention over the path."""
    shared: memoryview | None = field(default=None, compare=False, repr=False)
    """View of the bytes in the service's shared memory, valid while `lease` is held; None if not available."""
    lease: int = field(default=0, compare=False, repr=False)
    extent: tuple[int, int] | None = field(default=None, compare=False, repr=False)
    """Segment and offset in the service's segment files, valid while `lease` is held; None if not available."""
    signature: bytes = field(default=b"", repr=False)
    """As passed to `put`."""


@dataclass(frozen=True, slots=True)
class Hit:
    kind: HitKind
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Lookup:
    """One hit per element of the path; `lease` covers all entries found, 0 if there is none."""

    hits: tuple[Hit, ...]
    lease: int


class CacheClient:
    """A client of one cache service at `host:port` or `unix:/path`. Connects on first use.

    Supports concurrent calls within one event loop. All errors are raised as `fusionkv.protos.runtime.errors`;
    timeouts are in seconds and cover the whole call. A host name with several addresses connects to one of them, and
    fails over to another.
    """

    def __init__(self, address: str, tls: ClientTLS | None = None) -> None:
        self.address = address
        self._transport = Transport(address, tls)
        self._local = LocalTiers(address)

    async def lookup(
        self, namespace: bytes, path: Sequence[tuple[bytes, Sequence[bytes]]], *, lease_ms: int = 0, timeout: float
    ) -> Lookup:
        """Finds and leases a prompt's entries; `path` contains (digest, variants), system prompt first."""
        elements = [pb.PathElement(digest=digest, variants=variants) for digest, variants in path]
        request = pb.LookupRequest(namespace=namespace, path=elements, lease_ms=lease_ms)
        return await self._find("lookup", request, Deadline.after(timeout))

    async def find(self, namespace: bytes, digests: Sequence[bytes], *, lease_ms: int = 0, timeout: float) -> Lookup:
        """Finds and leases entries that do not depend on each other, each with a path of one digest; at most 4096."""
        request = pb.FindRequest(namespace=namespace, digests=digests, lease_ms=lease_ms)
        return await self._find("find", request, Deadline.after(timeout))

    async def _find(self, name: str, request: pb.LookupRequest | pb.FindRequest, deadline: Deadline) -> Lookup:
        sent = time.monotonic()
        return await self._leased(await self._transport.exchange(name, request, deadline), sent)

    async def _leased(self, response: pb.LookupResponse | pb.FindResponse, sent: float) -> Lookup:
        # The service measures the lease from the arrival of the request, or later.
        self._local.add_lease(response.lease, sent + response.lease_ms / 1000)
        shared = await self._local.open(response.arena)
        return Lookup(tuple(decode_hit(hit, response.lease, shared) for hit in response.hits), response.lease)

    async def fetch(self, entry: Entry, into: memoryview, *, timeout: float) -> None:
        """Fills `into` (`entry.size` bytes) from shared memory or segment files if possible, otherwise by stream.

        Bytes from disk or the network are verified by checksum, those from shared memory are not.

        Raises:
            DataLoss: The checksum does not match. The service was requested to delete the entry.
            NotFound: The entry is gone, or was in a remote tier that is unreachable.
        """
        into = into.cast("B")
        deadline = Deadline.after(timeout)
        _check_size(entry, into)
        if self.on_disk(entry) and await self.read(entry, partial(read_into, into), timeout=timeout):
            return
        if entry.shared is not None and await self._local.copy_leased(entry.shared, entry.lease, into):
            return
        await self._fetch_streamed(entry, into, deadline)

    async def _fetch_streamed(self, entry: Entry, into: memoryview, deadline: Deadline) -> None:
        digest = await self._transport.receive(
            pb.FetchRequest(key=entry.key, checksum=entry.checksum), into, deadline
        )
        if digest != entry.checksum:
            await self._delete_damaged([entry], deadline)
            raise errors.DataLoss(f"entry {entry.key.hex()} arrived damaged from {self.address}; it is deleted there")

    async def fetch_all(self, entries: Sequence[Entry], into: Sequence[memoryview], *, timeout: float) -> list[bool]:
        """As `fetch`, for at most 256 entries. Returns which could be fetched: the others are gone, or damaged.

        Nothing writes to the buffers after this has ended, even if it fails or is cancelled.
        """
        deadline = Deadline.after(timeout)
        for entry, view in zip(entries, into, strict=True):
            _check_size(entry, view.cast("B"))
        done = [
            entry.shared is not None and await self._local.copy_leased(entry.shared, entry.lease, view.cast("B"))
            for entry, view in zip(entries, into, strict=True)
        ]
        left = [i for i, copied in enumerate(done) if not copied]
        if not left:
            return done
        fetches = [pb.FetchRequest(key=entries[i].key, checksum=entries[i].checksum) for i in left]
        digests = await self._transport.receive_all(fetches, [into[i].cast("B") for i in left], deadline)
        if digests is None:
            for i in left:
                with suppress(errors.NotFound, errors.DataLoss):
                    await self._fetch_streamed(entries[i], into[i].cast("B"), deadline)
                    done[i] = True
            return done
        for i, digest in zip(left, digests, strict=True):
            done[i] = digest == entries[i].checksum
        if damaged := [entries[i] for i, digest in zip(left, digests, strict=True) if digest and not done[i]]:
            await self._delete_damaged(damaged, deadline)
        return done

    async def retrieve(
        self, namespace: bytes, digests: Sequence[bytes], into: Sequence[memoryview], *, timeout: float
    ) -> list[bool]:
        """As `find`, `fetch_all` and `release`, in one call if all are in memory; at most 256.

        An entry of another size than its buffer is not fetched.
        """
        deadline, views = Deadline.after(timeout), [view.cast("B") for view in into]
        request = pb.FindRequest(namespace=namespace, digests=digests)
        if not self._local.near:  # which reads shared memory
            request.sizes.extend(map(len, views))
        sent = time.monotonic()
        response, received = await self._transport.find(request, views, deadline)
        found = await self._leased(response, sent)
        try:
            entries = [hit.entry for hit in found.hits]
            done = [entry is not None and received.get(i) == entry.checksum for i, entry in enumerate(entries)]
            if damaged := [entry for i in received if (entry := entries[i]) is not None and not done[i]]:
                await self._delete_damaged(damaged, deadline)
            left = {
                i: entry
                for i, entry in enumerate(entries)
                if entry is not None and entry.size == len(views[i]) and i not in received
            }
            if left:
                fetched = await self.fetch_all(
                    [*left.values()], [views[i] for i in left], timeout=deadline.remaining()
                )
                for i, filled in zip(left, fetched, strict=True):
                    done[i] = filled
            return done
        finally:
            if found.lease:
                with suppress(errors.ServiceError):  # it expires
                    await self.release(found.lease, timeout=deadline.remaining())

    async def _delete_damaged(self, entries: Sequence[Entry], deadline: Deadline) -> None:
        """Has entries deleted that arrived damaged; an error is ignored, as the damage is the one to report."""
        remaining = min(deadline.remaining(), _DELETE_DAMAGED_SECONDS)
        with suppress(errors.ServiceError):
            await self.delete([entry.key for entry in entries], here=True, timeout=remaining)

    def view(self, entry: Entry) -> memoryview | None:
        """View of an entry in the service's shared memory; None if it is not there, or not leased.

        Results computed from it are valid if the entry is still leased afterwards (`is_leased`).
        """
        return entry.shared if self.is_leased(entry) else None

    def is_leased(self, entry: Entry) -> bool:
        """Whether the lease of the Lookup that found an entry is still held. Thread-safe."""
        return self._local.is_leased(entry.lease)

    def on_disk(self, entry: Entry) -> bool:
        """Whether an entry is in segment files of this machine, and not in shared memory."""
        return entry.shared is None and entry.extent is not None

    async def read(self, entry: Entry, reader: Callable[[int, int], bytes], *, timeout: float) -> bool:
        """Reads an entry that is `on_disk` in a thread. The service promotes it later, if hot enough.

        reader: takes a file descriptor and an offset; returns the checksum (protos/runtime/checksum.py) of the
        `entry.size` bytes read, or empty bytes on failure. Returns whether they were read and have their checksum.
        """
        if entry.extent is None or not self._local.mapped or not self.is_leased(entry):
            return False
        try:
            async with asyncio.timeout(timeout):
                digest = await self._local.read(entry.extent, reader)
        except TimeoutError as error:
            raise errors.DeadlineExceeded(
                f"reading segment files of {self.address} took longer than {timeout:g} s"
            ) from error
        return digest == entry.checksum and self._local.is_leased(entry.lease)

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
            The key, and whether the entry was stored: not if it exists or is superfluous.
        """
        data = data.cast("B")
        deadline = Deadline.after(timeout)
        checksum = await asyncio.to_thread(checksum_of, data) if len(data) > _HASH_INLINE_BYTES else checksum_of(data)
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
        response = await self._transport.send(header, data, deadline)
        return response.key, response.outcome == pb.PutResponse.OUTCOME_STORED

    async def release(self, lease: int, *, timeout: float = 5.0) -> None:
        """Ends a lease; an unknown or expired one is ignored."""
        self._local.drop_lease(lease)
        await self._transport.exchange("release", pb.ReleaseRequest(lease=lease), Deadline.after(timeout))

    async def delete(
        self, keys: Sequence[bytes] = (), *, namespace: bytes = b"", here: bool = False, timeout: float = 30.0
    ) -> int:
        """Deletes entries by key, or all of a namespace; returns their number in this service.

        here: Keep entries in the remote tier.
        """
        request = pb.DeleteRequest(keys=keys, namespace=namespace, here=here)
        response = await self._transport.call("Delete", request, Deadline.after(timeout))
        return int(response.deleted)

    async def stats(self, *, timeout: float = 5.0) -> pb.StatsResponse:
        """Counters and gauges of the service."""
        return await self._transport.call("Stats", pb.StatsRequest(), Deadline.after(timeout))

    async def close(self) -> None:
        """Closes the connection; calls in progress and later ones raise Unavailable."""
        await self._transport.close()
        self._local.close()


def _check_size(entry: Entry, into: memoryview) -> None:
    """Raises InvalidArgument if a buffer is not as large as an entry."""
    if len(into) != entry.size:
        raise errors.InvalidArgument(f"the buffer holds {len(into)} bytes, the entry {entry.size}")


def decode_hit(message: pb.Hit, lease: int, arena: memoryview | None) -> Hit:
    """Converts one hit of a response with this lease; a miss if its kind or tier is one of a later version.

    arena: The service's shared memory, if mapped.
    """
    e, kind, tier = message.entry, _KINDS.get(message.kind, HitKind.MISS), _TIERS.get(message.entry.tier)
    if kind is HitKind.MISS or tier is None or not message.HasField("entry"):
        return Hit(HitKind.MISS, None)
    view = None
    if arena is not None and e.HasField("arena_offset") and e.arena_offset + e.size_bytes <= len(arena):
        view = arena[e.arena_offset : e.arena_offset + e.size_bytes]
    names = (e.key, e.size_bytes, e.tokens, e.base, e.checksum, tier, e.variant)
    extent = (e.extent.segment, e.extent.offset) if e.HasField("extent") else None
    held = 0 if tier == "remote" else lease
    return Hit(kind, Entry(*names, view, held, extent, e.signature))
