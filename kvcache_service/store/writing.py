"""Writes one entry: space reserved, bytes written as they arrive, verified, committed and published, or discarded."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from fusionkv.kvcache_service.index.index import group_digest
from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.keys import VERSIONS
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.base import Place, Tier
from fusionkv.kvcache_service.tiers.extents import NoSpace
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.protos.runtime.checksum import Checksum
from fusionkv.protos.runtime.errors import DataLoss, InvalidArgument, ResourceExhausted

# Bytes per write in a thread: the hop takes about 0.1 ms, a write of 4 MiB about 1 ms. One batch is written while the
# next arrives, so a Put buffers at most two and a frame.
_BATCH_BYTES = 4 << 20
# Pieces per write: Linux takes no more (IOV_MAX), and one object per piece costs memory.
_BATCH_PIECES = 1024


def reserve(store: Store, record: EntryRecord, *, from_remote: bool = False) -> "Writer | None":
    """Reserves space for an entry, after `Store.wait_until_open`; None if it exists, or is offered and superfluous.

    The home tier evicts entries that are not held; faster tiers drop copies of colder entries. An entry copied
    `from_remote`, the remote tier, is always stored, and not written back.

    Raises ResourceExhausted if there is no room, or the entry exceeds the limit.
    """
    residents = store.residents
    if store.entries.get(record.key) is not None:
        if not from_remote:
            store.on_used(record.key)
        return None
    if not from_remote and not _worth_storing(store, record):
        return None
    if record.size > store.config.max_entry_bytes:
        raise ResourceExhausted(
            f"an entry of {record.size} bytes exceeds the limit of {store.config.max_entry_bytes}: "
            "raise max_entry_bytes in [kvcache]"
        )
    assert store.ready.is_set(), "before `wait_until_open`"
    store.leases.expire()
    home = residents.home
    try:
        place, evicted = residents.reserve(home, record)
    except NoSpace:
        where, setting, limit = f"the {home.name} tier", f"{home.name}_bytes", home.capacity_bytes
        if (tenants := residents.contents[home.name].tenants).excess(record) > 0:
            where, setting, limit = f"the tenant's share of {where}", "tenant_share", tenants.limit
        if record.size > limit:
            raise ResourceExhausted(
                f"an entry of {record.size} bytes is larger than {where} of {limit}: raise {setting} in [kvcache]"
            ) from None
        raise ResourceExhausted(
            f"no room for {record.size} bytes in {where} of {limit}: its entries are leased or in use; try again "
            f"later, or raise {setting} in [kvcache]"
        ) from None
    entry = StoredEntry(record, store.heats.now)
    places: dict[Tier, Place] = {home: place}
    for tier in residents.tiers[:-1]:
        with contextlib.suppress(NoSpace):
            places[tier] = residents.reserve(tier, record, entry.heat)[0]
    return Writer(store, entry, places, evicted, from_remote=from_remote)


def _worth_storing(store: Store, record: EntryRecord) -> bool:
    """Whether to store an entry. One replica of a chunk serves every path, so others need a reason.

    Precomputed entries are always stored. An offered entry is stored if it is the first of its chunk, if it has
    fewer preceding chunks than all others (it depends on fewer, so it serves other paths better), or if its exact
    path was looked up before the request that computed it, since it is lossless there.
    """
    if not record.offered or record.depth == 1 or record.variant:
        return True
    others = store.entries.replicas(record)
    return all(record.depth < other.record.depth for other in others) or store.demand.count(record.key) > 1


def _superseded(store: Store, record: EntryRecord) -> list[StoredEntry]:
    """Replicas to delete on publication: offered, deeper, and without recent lookups of their exact path."""
    if record.depth == 1 or record.variant:
        return []
    return [
        other
        for other in store.entries.replicas(record)
        if other.record.offered and other.record.depth > record.depth and store.demand.count(other.record.key) <= 1
    ]


def _excess_versions(store: Store, record: EntryRecord) -> list[StoredEntry]:
    """The coldest versions beyond the limit of their variant, once `record` is published as one of them."""
    limit = VERSIONS.get(record.variant)
    if limit is None:
        return []
    others = sorted(store.entries.replicas(record), key=lambda other: other.heat, reverse=True)
    return others[limit - 1 :]


class Writer:
    """Receives the bytes of one entry, until `commit` or `abort`. `abort` after either is a no-op.

    `places` are reservations in the home tier and possibly in faster ones. `evicted` entries are deleted from the
    home tier's index before anything is written.
    """

    def __init__(
        self,
        store: Store,
        entry: StoredEntry,
        places: dict[Tier, Place],
        evicted: Sequence[tuple[bytes, Place]],
        *,
        from_remote: bool,
    ) -> None:
        self._store = store
        self._entry = entry
        self._places = places
        self._from_remote = from_remote
        self._hasher = Checksum()
        self._received = 0
        self._batch: list[memoryview] = []
        self._written = 0
        store.evicted.update(evicted)
        # Also until earlier evictions are recorded, if that failed: they may have had this place.
        forgetting = asyncio.ensure_future(store.work.to_the_end(store.forget())) if store.evicted else None
        self._pending: asyncio.Future[None] | None = forgetting

    @property
    def size(self) -> int:
        """Bytes of the entry."""
        return self._entry.record.size

    def space(self, size: int) -> memoryview:
        """Memory to receive the next `size` bytes in: where they are stored, if the entry has a place in memory."""
        for tier, place in self._places.items():
            if isinstance(tier, MemoryTier):
                return tier.space(place, self._received, size)
        return memoryview(bytearray(size))

    async def write(self, data: memoryview) -> None:
        """Appends bytes, which must not change afterwards.

        Raises InvalidArgument if there are more than the header specifies, ResourceExhausted if earlier ones could
        not be written.
        """
        if self._received + len(data) > self.size:
            raise InvalidArgument(f"more than the {self.size} bytes specified by the header")
        for tier, place in self._places.items():
            if not tier.blocking:
                tier.write(place, self._received, [data])
        await self.filled(data)

    async def filled(self, data: memoryview) -> None:
        """Appends the bytes that were received in a `space`. Raises ResourceExhausted as `write` does."""
        self._hasher.update(data)
        self._received += len(data)
        if any(tier.blocking for tier in self._places) and len(data):
            self._batch.append(data)
            if self._received - self._written >= _BATCH_BYTES or len(self._batch) == _BATCH_PIECES:
                # Once the previous batch is written.
                await self._finished()
                self._pending = self._store.work.in_thread(self._take_batch(self._places))

    async def commit(self) -> bool:
        """Verifies and publishes the entry; returns False if it, or a better one, was stored meanwhile.

        Raises InvalidArgument if bytes are missing, DataLoss if their checksum is not the header's, and
        ResourceExhausted if they cannot be written.
        """
        record = self._entry.record
        if self._received != record.size:
            raise InvalidArgument(f"{self._received} bytes arrived, the header specifies {record.size}")
        if self._hasher.digest() != record.checksum:
            self._store.counters.add("checksum.failures", tier="remote" if self._from_remote else "network")
            raise DataLoss("the checksum of the bytes received does not match the header: send them again")
        await self._finished()
        # From here on `_publish` owns the reservations: `abort` by a cancelled caller is a no-op.
        places, self._places = self._places, {}
        return await self._store.work.to_the_end(self._publish(places, self._take_batch(places)))

    def abort(self) -> None:
        """Frees the reservations once no thread is writing to them."""
        places, self._places = self._places, {}

        def free(pending: asyncio.Future[None] | None) -> None:
            if pending is not None and not pending.cancelled():
                pending.exception()  # marks it as retrieved
            for tier, place in places.items():
                self._store.residents.contents[tier.name].unreserve(place)

        if self._pending is None or self._pending.done():
            free(self._pending)
        else:
            self._pending.add_done_callback(free)

    async def _publish(self, places: dict[Tier, Place], write_rest: Callable[[], None]) -> bool:
        store, record = self._store, self._entry.record
        residents = store.residents
        home = residents.home

        def finish(place: Place) -> None:
            write_rest()
            home.commit(record, place, self._entry.heat)

        # `_worth_storing` depends on the whole group, so commits of a group are serialised.
        group = group_digest(record)
        while (other := store.committing.get(group)) is not None:
            await other.wait()
        done = store.committing[group] = asyncio.Event()
        try:
            # Checked again, since others may have been stored since the reservation.
            stored = store.entries.get(record.key) is None and (self._from_remote or _worth_storing(store, record))
            if stored:
                # Lookups that found the replaced entries will find this one.
                self._entry.heat = max([self._entry.heat, *(other.heat for other in _superseded(store, record))])
                if home.blocking:
                    await store.work.in_thread(finish, places[home])
                else:
                    finish(places[home])
                for tier in list(places):
                    residents.add_copy(self._entry, tier, places.pop(tier))
                replaced = [*_superseded(store, record), *_excess_versions(store, record)]
                residents.publish(self._entry, pulled=self._from_remote)
                residents.replaced.update((other.record.key, other) for other in replaced)
                # On failure, the sweep tries again.
                with contextlib.suppress(OSError):
                    await store.withdraw(replaced)
                if not self._from_remote:
                    store.on_stored(record.key)
            return stored
        except OSError as error:
            raise _unwritable(error) from error
        finally:
            for tier, place in places.items():
                residents.contents[tier.name].unreserve(place)
            del store.committing[group]
            done.set()

    def _take_batch(self, places: dict[Tier, Place]) -> Callable[[], None]:
        """Starts a new batch; returns a function that writes the current one."""
        batch, at = self._batch, self._written
        blocking = [(tier, place) for tier, place in places.items() if tier.blocking]
        self._batch, self._written = [], self._received

        def write() -> None:
            for tier, place in blocking if batch else ():
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
