"""Writes one entry: space reserved, bytes written as they arrive, verified, committed and published, or discarded."""

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

# Bytes per write in a thread: the hop takes about 0.1 ms, a write of 4 MiB about 1 ms. One batch is written while the
# next arrives, so a Put buffers at most two and a frame.
_BATCH_BYTES = 4 << 20


class Writer:
    """Receives the bytes of one entry, until `commit` or `abort`. `abort` after either is a no-op.

    `places` are reservations in the home tier and possibly in faster ones. `evicted` entries are deleted from the
    home tier's index before anything is written. A `copied` entry comes from the remote tier: it is always stored,
    and not written back.
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
        """Appends bytes, which must not change afterwards.

        Raises:
            InvalidArgument: There are more bytes than the header specifies.
            ResourceExhausted: Earlier bytes could not be written.
        """
        record = self._entry.record
        if self._received + len(data) > record.size:
            raise InvalidArgument(f"more than the {record.size} bytes specified by the header")
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
        """Verifies and publishes the entry.

        Returns:
            Whether it was stored. False if it, or a better one, was stored meanwhile.

        Raises:
            InvalidArgument: There are fewer bytes than the header specifies.
            DataLoss: The checksum does not match the header's.
            ResourceExhausted: The bytes cannot be written.
        """
        record = self._entry.record
        if self._received != record.size:
            raise InvalidArgument(f"{self._received} bytes arrived, the header specifies {record.size}")
        if self._hasher.digest() != record.checksum:
            self._store.counters.add("checksum.failures", tier="remote" if self._copied else "network")
            raise DataLoss("the checksum of the bytes received does not match the header: send them again")
        await self._finished()
        # From here on `_publish` owns the reservations: `abort` by a cancelled caller is a no-op.
        places, self._places = self._places, {}
        return await self._store.to_the_end(self._publish(places, self._take_batch(places)))

    def abort(self) -> None:
        """Frees the reservations once no thread is writing to them."""
        places, self._places = self._places, {}

        def free(pending: asyncio.Future[None] | None) -> None:
            if pending is not None:
                pending.exception()  # marks it as retrieved
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

        # `wanted` depends on the whole group, so commits of a group are serialised.
        group = group_key(record)
        while (other := store.committing.get(group)) is not None:
            await other.wait()
        done = store.committing[group] = asyncio.Event()
        try:
            # Checked again, since others may have been stored since the reservation.
            existing = residents.get(record.key)
            stored = existing is None and (self._copied or store.wanted(record))
            if stored:
                # Lookups that found the replaced entries will find this one.
                self._entry.heat = max([self._entry.heat, *(other.heat for other in store.replaced_by(self._entry))])
                await store.in_thread(finish, places[home])
                for tier in list(places):
                    residents.settle(self._entry, tier, places.pop(tier))
                replaced = [*store.replaced_by(self._entry), *store.crowded_out(self._entry)]
                residents.publish(self._entry)
                residents.replaced.update((other.record.key, other) for other in replaced)
                with contextlib.suppress(
                    OSError
                ):  # they reappear at the next start, and are replaced by the next Put
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
        """Writes the batch in a thread, once the previous one is written."""
        await self._finished()
        self._pending = self._store.in_thread(self._take_batch(self._places))

    def _take_batch(self, places: dict[Tier, Place]) -> Callable[[], None]:
        """Starts a new batch; returns a function that writes the current one."""
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
                # Shielded: a cancelled future would appear done while its thread is still writing.
                await asyncio.shield(self._pending)
            except OSError as error:
                raise _unwritable(error) from error


def _unwritable(error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"can't write the entry: {error}")
