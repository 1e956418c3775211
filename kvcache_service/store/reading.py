"""Reads entries: pinned, verified once if they are in a slow tier, and promoted to a fast one if there is room."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from opentelemetry import trace

from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.residents import Residents
from fusionkv.kvcache_service.tiers.base import Place, Tier, Unreachable
from fusionkv.kvcache_service.tiers.extents import NoSpace
from fusionkv.protos.runtime.cancellation import background
from fusionkv.protos.runtime.errors import DataLoss, NotFound, Unavailable
from fusionkv.protos.runtime.frames import FRAME_BYTES

tracer = trace.get_tracer(__name__)

# Lookups prefetched concurrently, each in one of the I/O threads. The others serve calls.
_MAX_LOOKUPS = 4
# Delay of promotions for a caller that reads the disk tier's files itself: its reads have priority.
_LATER_SECONDS = 0.1


class Reader:
    """Reads of one store, on its event loop."""

    def __init__(
        self,
        residents: Residents,
        counters: Counters,
        in_thread: Callable[..., "asyncio.Future[Any]"],
        delete_damaged: Callable[[StoredEntry, Tier, Exception], Awaitable[None]],
    ) -> None:
        """in_thread: runs a blocking function. delete_damaged: as `Store.delete_damaged`."""
        self._residents = residents
        self._counters = counters
        self._in_thread = in_thread
        self._delete_damaged = delete_damaged
        self.reads: dict[StoredEntry, asyncio.Task[Unavailable | DataLoss | None]] = {}
        """Verifications in progress, each by one entry."""
        self.prefetching: set[asyncio.Task[None]] = set()
        self._prefetches = 0  # Lookups whose entries are being promoted

    @contextlib.contextmanager
    def pinned(self, key: bytes, checksum: bytes = b"") -> Iterator[StoredEntry]:
        """Pins an entry for reading. Raises NotFound if there is none, or none with this checksum."""
        candidates = (self._residents.entries.get(key), self._residents.replaced.get(key))
        readable = [entry for entry in candidates if entry is not None and (entry.visible or entry.leases)]
        entry = next((entry for entry in readable if checksum in (b"", entry.record.checksum)), None)
        if entry is None:
            raise NotFound(f"no entry {key.hex()}: never stored, evicted, deleted, or stored anew with other bytes")
        with self._pin(entry):
            yield entry

    async def verify(self, entry: StoredEntry) -> None:
        """Verifies a pinned entry's bytes if they are in a slow tier, and promotes them if there is room.

        Raises DataLoss if the bytes are damaged or cannot be read, after deleting the entry; Unavailable if the tier
        is temporarily unreachable.
        """
        tier = self._residents.fastest(entry)
        if not tier.blocking:
            return
        # Once for concurrent readers; not cancelled with the caller.
        if entry not in self.reads:
            self._start_read(entry, self._reserve_above(entry))
        if (fault := await asyncio.shield(self.reads[entry])) is not None:
            raise fault

    async def frames(self, entry: StoredEntry, *, verified: bool = False) -> AsyncIterator[memoryview]:
        """Yields a pinned entry's bytes in frames of 1 MiB, each valid until the next one.

        verified: whether `verify` has been called for the entry. Otherwise it is before the first frame.

        Raises as `verify`.
        """
        if not verified:
            await self.verify(entry)
        tier = self._residents.fastest(entry)
        place = entry.places[tier.name]
        try:
            for at in range(0, place.size, FRAME_BYTES):
                length = min(FRAME_BYTES, place.size - at)
                if tier.blocking:
                    data = await self._in_thread(tier.read, place, at, length)
                else:
                    data = tier.read(place, at, length)
                self._counters.add("fetched", length, tier=tier.name)
                yield data
        except Unreachable as error:
            raise Unavailable(str(error)) from error
        except OSError as error:
            await self._delete_damaged(entry, tier, error)
            raise DataLoss(f"entry {entry.record.key.hex()}: {error}; it is deleted") from error

    async def promote(self, entry: StoredEntry) -> None:
        """Verifies a visible entry and promotes it to a fast tier, if there is room."""
        with self.pinned(entry.record.key):
            slow = self._residents.fastest(entry).blocking and entry not in self.reads
            if slow and (copies := self._reserve_above(entry)):
                self._start_read(entry, copies)
            if entry in self.reads:
                await asyncio.shield(self.reads[entry])

    def prefetch(self, entries: Sequence[StoredEntry], *, later: bool) -> None:
        """Promotes a Lookup's entries in the background, unless those of too many Lookups are being promoted.

        An entry is promoted only if a Fetch would promote it too.

        later: The caller reads the entries itself, so they are promoted afterwards, for other Lookups. Otherwise they
            are promoted at once, as long as this Lookup's lease is held.
        """

        async def promote() -> None:
            if later:
                await asyncio.sleep(_LATER_SECONDS)
            if self._prefetches == _MAX_LOOKUPS:
                return
            self._prefetches += 1
            try:
                for entry in entries:
                    if entry.visible and (later or entry.leases):
                        await self.promote(entry)
            finally:
                self._prefetches -= 1

        if entries:
            background(self.prefetching, promote())

    def _reserve_above(self, entry: StoredEntry) -> dict[Tier, Place]:
        """Reserves a place in the fastest tier with room for an entry, dropping colder copies; empty if none has."""
        for tier in self._residents.tiers:
            if tier.name in entry.places:
                break
            with contextlib.suppress(NoSpace):
                return {tier: self._residents.reserve(tier, entry.record, entry.heat)[0]}
        return {}

    def _start_read(self, entry: StoredEntry, copies: dict[Tier, Place]) -> None:
        task = self.reads[entry] = asyncio.create_task(self._verify(entry, copies))
        task.add_done_callback(lambda _: self.reads.pop(entry))

    async def _verify(self, entry: StoredEntry, copies: dict[Tier, Place]) -> Unavailable | DataLoss | None:
        """Verifies an entry's bytes in its fastest tier, and copies them to the reserved places.

        Deletes the entry if they are damaged. Returns the error for the readers: raised, it would be logged as
        unhandled if all of them have left.
        """
        residents, record = self._residents, entry.record
        tier = residents.fastest(entry)
        source, intact = entry.places[tier.name], False
        fault: Exception = DataLoss("checksum mismatch")
        with self._pin(entry):
            try:
                with tracer.start_as_current_span("kvcache.read") as span:
                    span.set_attributes({"fusionkv.tier": tier.name, "fusionkv.bytes": record.size})
                    span.set_attribute("fusionkv.promoted", bool(copies))
                    intact = await self._in_thread(tier.copy, source, copies) == record.checksum
            except Unreachable as error:
                return Unavailable(str(error))
            except OSError as error:
                fault = error
            finally:
                for above, place in copies.items():
                    if intact and entry.visible:
                        residents.add_copy(entry, above, place)
                        self._counters.add("promotions", tier=above.name)
                    else:
                        residents.contents[above.name].unreserve(place)
            if intact:
                return None
            await self._delete_damaged(entry, tier, fault)
            return DataLoss(f"entry {record.key.hex()} was damaged on {tier.name}; it is deleted")

    @contextlib.contextmanager
    def _pin(self, entry: StoredEntry) -> Iterator[None]:
        entry.pins += 1
        try:
            yield
        finally:
            entry.pins -= 1
            self._residents.reclaim(entry)

    @property
    def pending(self) -> "list[asyncio.Task[Any]]":
        """Reads and prefetches in progress."""
        return [*self.reads.values(), *self.prefetching]

    def cancel_prefetching(self) -> None:
        for task in self.prefetching:
            task.cancel()  # a read in progress is completed
