"""One Put: space reserved, bytes written as they arrive, checked, committed, published - or nothing left."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from fusionkv.kvcache_service.index.index import group_key
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.store.core import StoreCore
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.tiers.base import Place, Tier
from fusionkv.protos.runtime.checksum import Checksum
from fusionkv.protos.runtime.errors import DataLoss, InvalidArgument, ResourceExhausted

# Bytes handed to a writing thread at once: the hop costs about 0.1 ms, a write of 4 MiB about 1 ms. One such batch is
# written while the next arrives, so a Put holds at most two and a frame.
_BATCH_BYTES = 4 << 20


class Writer:
    """Takes the bytes of one entry. Ends by `commit` or `abort`; `abort` after either does nothing.

    `places` has a reservation in the home tier and perhaps in faster ones. `evicted` are the entries whose places
    were taken for it: the home tier forgets them before anything is written there. An entry that is `copied` comes
    from the remote tier: it is kept in any case, and nobody has to write it back.
    """

    def __init__(
        self,
        store: StoreCore,
        record: Record,
        heat: float,
        places: dict[Tier, Place],
        evicted: Sequence[tuple[bytes, Place]],
        *,
        copied: bool,
    ) -> None:
        self._store = store
        self._entry = StoredEntry(record, heat)
        self._places = places
        self._copied = copied
        self._hasher = Checksum()
        self._received = 0
        self._batch: list[memoryview] = []
        self._batch_bytes = 0
        self._written = 0
        home = store.residents.home
        self._pending = store.in_thread(home.forget, evicted) if evicted else None

    async def write(self, data: memoryview) -> None:
        """Takes the next bytes, which must not change any more.

        Raises:
            InvalidArgument: more bytes than the header said.
            ResourceExhausted: earlier bytes could not be written.
        """
        record = self._entry.record
        if self._received + len(data) > record.size:
            raise InvalidArgument(f"more than the {record.size} bytes that the header says")
        self._hasher.update(data)
        for tier, place in self._places.items():
            if not tier.blocking:
                tier.write(place, self._received, [data])
        self._received += len(data)
        if any(tier.blocking for tier in self._places) and len(data):
            self._batch.append(data)
            self._batch_bytes += len(data)
            if self._batch_bytes >= _BATCH_BYTES:
                await self._flush()

    async def commit(self) -> bool:
        """Checks and publishes what was written. False when another caller stored it, or a better one, meanwhile.

        Raises:
            InvalidArgument: fewer bytes than the header said.
            DataLoss: the bytes don't have the header's checksum.
            ResourceExhausted: the bytes can't be written.
        """
        record = self._entry.record
        if self._received != record.size:
            raise InvalidArgument(f"{self._received} bytes arrived, the header says {record.size}")
        if self._hasher.digest() != record.checksum:
            self._store.counters.add("checksum.failures", tier="remote" if self._copied else "network")
            raise DataLoss("the bytes that arrived don't have the header's checksum: send them again")
        await self._finished()
        # From here on the reservations are the coroutine's, and an abort by a cancelled caller does nothing.
        places, self._places = self._places, {}
        return await self._store.to_the_end(self._publish(places, self._take_batch(places)))

    def abort(self) -> None:
        """Gives the reservations back as soon as no thread writes to them."""
        places, self._places = self._places, {}

        def free(pending: asyncio.Future[None] | None) -> None:
            if pending is not None:
                pending.exception()  # was raised already, or concerns nobody any more
            for tier, place in places.items():
                self._store.residents.cancel(tier, place)

        if self._pending is not None and not self._pending.done():
            self._pending.add_done_callback(free)
        else:
            free(None)

    async def _publish(self, places: dict[Tier, Place], write_rest: Callable[[], None]) -> bool:
        store, record = self._store, self._entry.record
        residents = store.residents
        home = residents.home

        def finish(place: Place) -> None:
            write_rest()
            home.commit(record, place, self._entry.heat)

        # Who is wanted depends on the whole group, so one of them at a time.
        group = group_key(record)
        while (other := store.committing.get(group)) is not None:
            await other.wait()
        done = store.committing[group] = asyncio.Event()
        try:
            # Asked again: others were stored since the reservation.
            there = residents.get(record.key)
            stored = there is None and (self._copied or store.wanted(record))
            if stored:
                # Whoever found the replaced ones will find this one.
                self._entry.heat = max([self._entry.heat, *(other.heat for other in store.replaced_by(self._entry))])
                await store.in_thread(finish, places[home])
                for tier in list(places):
                    residents.settle(self._entry, tier, places.pop(tier))
                replaced = [*store.replaced_by(self._entry), *store.crowded_out(self._entry)]
                residents.publish(self._entry)
                residents.replaced.update((other.record.key, other) for other in replaced)
                with contextlib.suppress(OSError):  # they come back with the next start, and go with the next Put
                    await store.withdraw(replaced)
                if store.watcher is not None and not self._copied:
                    store.watcher.stored(record)
            return stored
        except OSError as error:
            raise _unwritable(error) from error
        finally:
            for tier, place in places.items():
                residents.cancel(tier, place)
            del store.committing[group]
            done.set()

    async def _flush(self) -> None:
        """Hands the batch to a thread once the one before is written."""
        await self._finished()
        self._pending = self._store.in_thread(self._take_batch(self._places))

    def _take_batch(self, places: dict[Tier, Place]) -> Callable[[], None]:
        """What writes the batch; a new one begins."""
        batch, at = self._batch, self._written
        blocking = [(tier, place) for tier, place in places.items() if tier.blocking]
        self._batch, self._batch_bytes, self._written = [], 0, self._received

        def write() -> None:
            for tier, place in blocking:
                tier.write(place, at, batch)

        return write

    async def _finished(self) -> None:
        if self._pending is not None:
            try:
                # Shielded: a cancelled future would look finished while its thread goes on writing.
                await asyncio.shield(self._pending)
            except OSError as error:
                raise _unwritable(error) from error


def _unwritable(error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"can't write the entry: {error}")
