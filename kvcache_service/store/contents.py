"""The entries in one tier: their places, and places that are reserved for new ones."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.store.entries import Entries
from fusionkv.kvcache_service.store.eviction import EvictionOrder
from fusionkv.kvcache_service.store.shares import TenantShares
from fusionkv.kvcache_service.tiers.base import Place, Tier
from fusionkv.kvcache_service.tiers.extents import NoSpace, aligned

# Number of the coldest entries among which room is searched; then the coldest range is taken. More would block the
# event loop: among a million of the smallest entries, a search for 64 MiB took a minute.
_MAX_VICTIMS = 1024


class TierContents:
    """Entries are rows of the index. Moves no bytes."""

    def __init__(self, tier: Tier, entries: Entries, tenant_share: float) -> None:
        """tenant_share: the part of the tier that a tenant's entries may take; 1 sets no limit."""
        self._tier = tier
        self._entries = entries
        self._rows = entries.index.rows
        self._offsets = entries.offsets[tier.name]
        self.order = EvictionOrder(self._rows, self._offsets)
        self.tenants = TenantShares(self._rows, self._offsets, tier.capacity_bytes, tenant_share)
        self.reserved: dict[int, EntryRecord] = {}
        """Entries for which places are reserved, by offset."""

    def __len__(self) -> int:
        return len(self.order)

    def add(self, row: int, place: Place) -> None:
        self._offsets[row] = place.offset
        self.tenants.add(row)
        self.order.add(row)
        if self._entries.listener is not None:
            self._entries.listener.stored(self._rows.record(row), self._tier.name)

    def remove(self, row: int) -> None:
        """Removes a row, which must still be in the index; the caller frees its place."""
        self._offsets[row] = -1
        self.tenants.remove(row)
        self.order.remove(row)
        if self._entries.listener is not None:
            self._entries.listener.removed(self._rows.key(row), self._tier.name)

    def hottest(self, count: int) -> list[int]:
        """The `count` hottest rows, hottest first."""
        heats = np.frombuffer(self._rows.heats)
        members = np.flatnonzero(np.frombuffer(self._offsets, np.int64) >= 0)
        if len(members) > count:
            members = members[np.argpartition(-heats[members], count)[:count]]
        return members[np.argsort(-heats[members])].tolist()

    def reserve(self, record: EntryRecord, colder_than: float = math.inf) -> tuple[Place, list[int]]:
        """Reserves a place, if needed that of rows that are not held and are colder than `colder_than`.

        Those are the tenant's own while it would exceed its share of the tier. Returns the place, and the rows that
        are to be removed for it: their places are free already, but still counted.

        Raises NoSpace if evicting all these is not enough; nothing was changed then.
        """
        own = self.tenants.surplus(record, self._entries.evictable, colder_than)
        candidates, size = dict[int, int](), record.size

        def victims(coldest: Iterable[int]) -> Iterator[Place]:
            for row in itertools.chain(own, (row for row in coldest if row not in own)):
                candidates[self._offsets[row]] = row
                yield self._place(row)

        in_order = self.order.coldest(self._entries.evictable, colder_than, self._tier.used_bytes)
        with contextlib.closing(in_order) as order:
            try:
                place, freed = self._tier.reserve(size, victims(itertools.islice(order, _MAX_VICTIMS)))
            except NoSpace:
                if len(candidates) < _MAX_VICTIMS:
                    raise
                place, freed = self._tier.reserve(size, victims(self._coldest_range(size, colder_than)))
        removed = [candidates[offset] for offset in freed]
        for row in own.keys() - set(removed):
            self._tier.free(self._place(row))
            removed.append(row)
        self.tenants.count(record, 1)
        self.reserved[place.offset] = record
        return place, removed

    def unreserve(self, place: Place) -> None:
        """Frees a reserved place."""
        self.free(self.reserved.pop(place.offset), place)

    def free(self, record: EntryRecord, place: Place) -> None:
        """Frees the place of an entry that was removed."""
        self.tenants.count(record, -1)
        self._tier.free(place)

    def surplus(self, limit_bytes: int, limit: int) -> list[int]:
        """The rows without holds to remove for the tier to use `limit_bytes`; at most `limit` rows."""
        rows: list[int] = []
        used_bytes = self._tier.used_bytes
        with contextlib.closing(self.order.coldest(self._entries.evictable, math.inf, used_bytes)) as order:
            while used_bytes > limit_bytes and len(rows) < limit and (row := next(order, None)) is not None:
                rows.append(row)
                used_bytes -= aligned(self._rows.size(row))
        return rows

    def check_integrity(self) -> None:
        """Raises AssertionError unless tier and entries agree, and each place has one owner."""
        name = self._tier.name
        owners = [entry for entry in (*self._entries, *self._entries.withdrawn) if name in entry.places]
        places = {entry.places[name]: entry.record.key if entry.visible else None for entry in owners}
        assert len(places) == len(owners), "two entries at one place"
        assert all(entry.places[name].size == entry.record.size for entry in owners)
        reserved = {Place(offset, record.size): None for offset, record in self.reserved.items()}
        assert not reserved.keys() & places.keys(), "a reserved place is an entry's"
        self._tier.check_integrity({**reserved, **places})
        members = np.flatnonzero(np.frombuffer(self._offsets, np.int64) >= 0).tolist()
        assert sorted(members) == sorted(entry.row for entry in owners if entry.row is not None)
        self.order.check_integrity(members)
        self.tenants.check_integrity(members, [*(entry.record for entry in owners), *self.reserved.values()])

    def _place(self, row: int) -> Place:
        return Place(self._offsets[row], self._rows.size(row))

    def _coldest_range(self, size: int, colder_than: float) -> list[int]:
        """Rows in the range of `Extents.coldest_range`; none if there is no range."""
        offsets = np.frombuffer(self._offsets, np.int64)
        members = np.flatnonzero(offsets >= 0)
        starts, sizes = offsets[members], self._rows.sizes()[members].astype(np.int64)
        heats = np.frombuffer(self._rows.heats, np.float64)[members]
        held_rows, fixed = self._entries.held(self._tier.name)
        heats[(heats >= colder_than) | np.isin(members, held_rows)] = math.inf
        fixed = [*fixed, *(Place(offset, record.size) for offset, record in self.reserved.items())]
        start, end = self._tier.coldest_range(
            size,
            np.append(starts, np.array([place.offset for place in fixed], np.int64)),
            np.append(sizes, np.array([place.size for place in fixed], np.int64)),
            np.append(heats, np.full(len(fixed), math.inf)),
        )
        return members[(starts < end) & (starts + sizes > start)].tolist()
