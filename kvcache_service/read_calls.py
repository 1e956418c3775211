"""Reads of entries for callers: pinned, streamed or promoted, by gRPC and on the data plane."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from fusionkv.kvcache_service.index.record import CHECKSUM_BYTES
from fusionkv.kvcache_service.keys import check_digests
from fusionkv.kvcache_service.remote.sharing import Sharing
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.protos.contract.limits import MAX_READ
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime.errors import DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unavailable


class ReadCalls:
    """Raises ResourceExhausted if `max_fetches` calls are running."""

    def __init__(self, store: Store, sharing: Sharing | None) -> None:
        self._store = store
        self._sharing = sharing
        self._fetches = 0

    @contextlib.asynccontextmanager
    async def entry(self, request: pb.FetchRequest) -> AsyncIterator[tuple[int, AsyncIterator[memoryview]]]:
        """Pins an entry; yields its size and its bytes, in frames as of `Reader.frames`."""
        with self._fetching():
            async with self._reading(request) as entry:
                yield entry.record.size, self._store.reader.frames(entry)

    @contextlib.asynccontextmanager
    async def found(self, found: pb.FindResponse, sizes: Sequence[int]) -> AsyncIterator[AsyncIterator[memoryview]]:
        """Pins those entries of a response that are in memory and have these sizes; yields their bytes, in order.

        Notes their indexes in the response, and takes back its lease if these are all that was found.
        """
        leases = self._store.leases
        with leases.kept(found.lease), self._fetching(), contextlib.ExitStack() as stack:
            readings = []
            for i, (hit, size) in enumerate(zip(found.hits, sizes, strict=True)):
                if hit.entry.tier == pb.TIER_MEMORY and hit.entry.size_bytes == size:
                    with contextlib.suppress(NotFound):  # deleted while the remote tier was asked for others
                        entry = stack.enter_context(self._store.reader.pinned(hit.entry.key, hit.entry.checksum))
                        readings.append(self._store.reader.frames(entry))
                        found.following.append(i)
            if len(found.following) == sum(hit.HasField("entry") for hit in found.hits):
                leases.release(found.lease)
                found.lease = found.lease_ms = 0
            yield _joined(readings)

    @contextlib.asynccontextmanager
    async def all(self, request: pb.FetchAllRequest) -> AsyncIterator[tuple[list[int], AsyncIterator[memoryview]]]:
        """Pins entries; yields their sizes and their bytes, in order. 0 is the size of one that can't be read."""
        if len(request.entries) > MAX_READ:
            raise InvalidArgument(f"{len(request.entries)} entries; at most {MAX_READ} are read in one call")
        check_digests((fetch.key for fetch in request.entries), "a key")
        sizes: list[int] = []
        readings: list[AsyncIterator[memoryview]] = []
        with self._fetching():
            if self._sharing is not None:
                # Several at the same time: below, those that could not be pulled are tried again.
                away = {fetch.key for fetch in request.entries if self._store.entries.get(fetch.key) is None}
                await asyncio.gather(*map(self._sharing.pulls.pull, away), return_exceptions=True)
            async with contextlib.AsyncExitStack() as stack:
                for fetch in request.entries:
                    sizes.append(0)
                    with contextlib.suppress(NotFound, DataLoss, Unavailable, ResourceExhausted):
                        entry = await stack.enter_async_context(self._reading(fetch))
                        await self._store.reader.verify(entry)
                        readings.append(self._store.reader.frames(entry, verified=True))
                        sizes[-1] = entry.record.size
                yield sizes, _joined(readings)

    @contextlib.asynccontextmanager
    async def _reading(self, request: pb.FetchRequest) -> AsyncIterator[StoredEntry]:
        """Pins an entry, which is copied from the remote tier before if it is only there."""
        check_digests([request.key], "the key")
        if len(request.checksum) not in (0, CHECKSUM_BYTES):
            raise InvalidArgument(f"the checksum has {len(request.checksum)} bytes, 16 are required")
        if self._sharing is not None and self._store.entries.get(request.key) is None:
            await self._sharing.pulls.pull(request.key)
        with self._store.reader.pinned(request.key, request.checksum) as entry:
            yield entry

    async def promote(self, keys: Sequence[bytes]) -> None:
        """Promotes entries to memory, or pulls them from the remote tier, if there is room."""
        with self._fetching():
            await asyncio.gather(*map(self._promote, keys))

    async def _promote(self, key: bytes) -> None:
        if (entry := self._store.entries.get(key)) is not None:
            await self._store.reader.promote(entry)
        elif self._sharing is not None:
            with contextlib.suppress(ResourceExhausted):  # it is not in memory then
                await self._sharing.pulls.pull(key)

    @contextlib.contextmanager
    def _fetching(self) -> Iterator[None]:
        if self._fetches >= self._store.config.max_fetches:
            raise ResourceExhausted(f"{self._fetches} fetches are running: try again, or raise max_fetches")
        self._fetches += 1
        try:
            yield
        finally:
            self._fetches -= 1


async def _joined(readings: Iterable[AsyncIterator[memoryview]]) -> AsyncIterator[memoryview]:
    for frames in readings:
        async for frame in frames:
            yield frame
