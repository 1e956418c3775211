"""Who is where: the entries, the tiers that hold their bytes, and who has to go when room is needed."""

import contextlib
import heapq
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fusionkv.kvcache_service.hits import HitKind
from fusionkv.kvcache_service.index.heat import ColdQueue
from fusionkv.kvcache_service.index.index import Index
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.keys import entry_key, path_keys
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.tiers.base import Place, Recovered, Tier
from fusionkv.kvcache_service.tiers.extents import aligned


@dataclass(eq=False, slots=True, weakref_slot=True)
class StoredEntry:
    """One entry that somebody looks at, and where its bytes are.

    | held by      | meaning                             | may lose a copy or be evicted |
    |--------------|-------------------------------------|-------------------------------|
    | nobody       |                                     | yes                           |
    | a lease      | somebody is about to fetch it       | no                            |
    | a pin        | its bytes are read or moved now     | no                            |

    An entry that is deleted while it is held turns invisible at once and gives its places back with the last hold.
    There is at most one such object for an entry, and none while nobody refers to one: the index's rows know all
    that has to last. So heat and places are changed by `Residents` alone, in both.
    """

    record: Record
    heat: float
    places: dict[str, Place] = field(default_factory=dict)
    leases: int = 0
    pins: int = 0
    row: int | None = None
    """In the index, while it is visible."""

    @property
    def visible(self) -> bool:
        return self.row is not None

    @property
    def held(self) -> bool:
        return self.leases > 0 or self.pins > 0


class Residents:
    """Entries in tiers, the fastest first. The last tier is the home: an entry is there or nowhere.

    For the event loop's thread alone; moves no bytes.
    """

    def __init__(self, tiers: Sequence[Tier], counters: Counters) -> None:
        self.tiers = tuple(tiers)
        self.index = Index(len(tiers))
        self._counters = counters
        self._seen: weakref.WeakValueDictionary[int, StoredEntry] = weakref.WeakValueDictionary()
        self._leaving: set[StoredEntry] = set()
        self._finder: Callable[[bytes], Recovered | None] | None = None
        self._early: set[int] = set()  # rows of entries that the finder found and `recover` did not yet
        self.replaced: weakref.WeakValueDictionary[bytes, StoredEntry] = weakref.WeakValueDictionary()
        """Invisible entries in whose place another serves; whoever has a lease on one may still fetch it."""
        self._reserved: dict[tuple[str, int], int] = {}
        rows = self.index.rows
        self._places = {tier.name: column for tier, column in zip(self.tiers, rows.places, strict=True)}
        self._cold = {tier.name: ColdQueue(rows.heats, self._places[tier.name]) for tier in tiers}

    @property
    def home(self) -> Tier:
        return self.tiers[-1]

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[StoredEntry]:
        return map(self._resident, self.index.rows)

    def get(self, key: bytes) -> StoredEntry | None:
        row = self._row(key)
        return None if row is None else self._resident(row)

    def find(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]]
    ) -> list[tuple[HitKind, StoredEntry | None, bytes]]:
        """As `Index.find`: how each element was found, its entry, and the key of an exact one.

        Until all entries are recovered, those not yet there are looked up in the home tier: by the exact path, or as
        encoded right behind the system prompt.
        """
        if self._finder is not None:
            for i, key in enumerate(path_keys(namespace, path)):
                if self._row(key) is None and i:
                    alone = [path[0], path[i]]
                    any(self._row(entry_key(namespace, alone, v)) is not None for v in (*variants[i], b""))
        return [
            (kind, None if row is None else self._resident(row), key)
            for kind, row, key in self.index.find(namespace, path, variants)
        ]

    def replicas(self, record: Record) -> list[StoredEntry]:
        """All entries of a record's chunk behind its system prompt, encoded in the same way."""
        return [self._resident(row) for row in self.index.replicas(record)]

    def count(self, tier: Tier) -> int:
        """Entries in a tier."""
        return len(self._cold[tier.name])

    def hottest(self) -> float:
        """The highest heat of all entries, when none has left yet; 0 without any."""
        return max(self.index.rows.heats, default=0.0)

    def warmest(self, most: int) -> list[bytes]:
        """The keys of the hottest entries."""
        rows = self.index.rows
        return [rows.key(row) for row in heapq.nlargest(most, rows, rows.heats.__getitem__)]

    def saved(self, row: int) -> tuple[bytes, float] | None:
        """Key and heat of the entry in a row, if there is one."""
        rows = self.index.rows
        return (rows.key(row), rows.heats[row]) if row in rows else None

    def reserve(
        self, tier: Tier, size: int, colder_than: float = math.inf
    ) -> tuple[Place, list[tuple[bytes, Place]]]:
        """A place in a tier, at the cost of entries that nobody holds and that are colder than `colder_than`.

        The keys and places of those that it took the place of in the home tier are returned: the entries are gone,
        and the tier has to forget them before the place is written to.

        Raises:
            NoSpace: these entries together don't make room; none was touched.
        """
        rows, places = self.index.rows, self._places[tier.name]
        looked_at: dict[int, int] = {}
        with contextlib.closing(self._cold[tier.name].coldest(self._free_to_go)) as coldest:

            def victims() -> Iterator[Place]:
                for row in itertools.takewhile(lambda row: rows.heats[row] < colder_than, coldest):
                    looked_at[places[row]] = row
                    yield Place(places[row], rows.size(row))

            place, freed = tier.reserve(size, victims())
        evicted: list[tuple[bytes, Place]] = []
        for entry in (self._resident(looked_at[offset]) for offset in freed):
            left = self._leave(entry, tier)
            if tier is self.home:
                self._counters.add("evictions", tier=tier.name)
                evicted.append((entry.record.key, left))
                self.withdraw(entry)
            else:
                self._counters.add("demotions", tier=tier.name)
        self._reserved[tier.name, place.offset] = place.size
        return place, evicted

    def surplus(self, tier: Tier, limit_bytes: int, most: int) -> list[StoredEntry]:
        """The coldest entries that nobody holds, at most `most`, without which a tier uses up to `limit_bytes`."""
        rows: list[int] = []
        excess = tier.used_bytes - limit_bytes
        with contextlib.closing(self._cold[tier.name].coldest(self._free_to_go)) as coldest:
            while excess > 0 and len(rows) < most and (row := next(coldest, None)) is not None:
                rows.append(row)
                excess -= aligned(self.index.rows.size(row))
        return [self._resident(row) for row in rows]

    def cancel(self, tier: Tier, place: Place) -> None:
        """Gives a reserved place back."""
        del self._reserved[tier.name, place.offset]
        tier.free(place)

    def settle(self, entry: StoredEntry, tier: Tier, place: Place) -> None:
        """Turns a reserved place into a copy of an entry."""
        del self._reserved[tier.name, place.offset]
        entry.places[tier.name] = place
        if entry.row is not None:
            self._enter(entry.row, tier.name, place)

    def begin_recovery(self) -> None:
        """From here to `end_recovery`, entries of the home tier are found by key before `recover` gets to them."""
        self._finder = self.home.finder()

    def recover(self, found: Iterable[Recovered]) -> None:
        """Makes entries visible that the home tier has from before."""
        for one in found:
            try:
                self._enter(self.index.add(one.record, one.heat), self.home.name, one.place)
            except KeyError:  # it was found by key before
                row = self.index.row(one.record.key)
                if row is not None and self._places[self.home.name][row] == one.place.offset:
                    self._early.discard(row)

    def end_recovery(self) -> None:
        """Drops entries found by key that were not recovered: the index is damaged, or another has their bytes."""
        self._finder = None
        for entry in map(self._resident, self._early):
            if not self.home.claim(entry.places[self.home.name]):
                self._leave(entry, self.home)
            self.withdraw(entry)
        self._early.clear()

    def publish(self, entry: StoredEntry) -> None:
        """Makes an entry visible; its bytes are in the home tier."""
        assert self.home.name in entry.places
        entry.row = self.index.add(entry.record, entry.heat)
        self._seen[entry.row] = entry
        for name, place in entry.places.items():
            self._enter(entry.row, name, place)

    def warm(self, entry: StoredEntry, heat: float) -> None:
        """Gives a visible entry a heat that is not below the one it has."""
        assert entry.row is not None
        entry.heat = self.index.rows.heats[entry.row] = heat

    def withdraw(self, entry: StoredEntry) -> None:
        """Makes a visible entry invisible, and frees its places unless somebody holds it."""
        assert entry.row is not None
        row, entry.row = entry.row, None
        self.index.remove(entry.record.key)
        del self._seen[row]
        for name in entry.places:
            self._cold[name].remove(row)
        self._leaving.add(entry)
        self.let_go(entry)

    def let_go(self, entry: StoredEntry) -> None:
        """Called when a hold on an entry ended: an invisible one that nobody holds gives its places back."""
        if entry.visible or entry.held:
            return
        self._leaving.remove(entry)
        for tier in self.tiers:
            place = entry.places.pop(tier.name, None)
            if place is not None:
                tier.free(place)

    def all(self) -> Iterator[StoredEntry]:
        """Visible entries, and invisible ones that somebody still holds."""
        return itertools.chain(self, self._leaving)

    def _row(self, key: bytes) -> int | None:
        row = self.index.row(key)
        if row is None and self._finder is not None and (found := self._finder(key)) is not None:
            row = self.index.add(found.record, found.heat)
            self._enter(row, self.home.name, found.place)
            self._early.add(row)
        return row

    def _resident(self, row: int) -> StoredEntry:
        entry = self._seen.get(row)
        if entry is None:
            rows = self.index.rows
            record = rows.record(row)
            places = {
                name: Place(column[row], record.size) for name, column in self._places.items() if column[row] >= 0
            }
            entry = self._seen[row] = StoredEntry(record, rows.heats[row], places, row=row)
        return entry

    def _free_to_go(self, row: int) -> bool:
        entry = self._seen.get(row)
        return entry is None or not entry.held

    def _enter(self, row: int, name: str, place: Place) -> None:
        self._places[name][row] = place.offset
        self._cold[name].add(row)

    def _leave(self, entry: StoredEntry, tier: Tier) -> Place:
        """Takes a copy from a visible entry; the place is the caller's."""
        assert entry.row is not None
        self._places[tier.name][entry.row] = -1
        self._cold[tier.name].remove(entry.row)
        return entry.places.pop(tier.name)

    def check_integrity(self) -> None:
        """Index, entries and tiers agree; every place is somebody's; every entry is at home."""
        self.index.check_integrity()
        assert all(entry.visible and self.home.name in entry.places for entry in self)
        assert all(entry.held and not entry.visible for entry in self._leaving), "a deleted entry was not freed"
        for row, entry in list(self._seen.items()):
            assert entry.row == row
            assert entry.record == self.index.rows.record(row)
            assert entry.heat == self.index.rows.heats[row]
            offsets = {name: column[row] for name, column in self._places.items() if column[row] >= 0}
            assert {name: place.offset for name, place in entry.places.items()} == offsets
        for tier in self.tiers:
            held: dict[Place, bytes | None] = {
                Place(offset, size): None for (name, offset), size in self._reserved.items() if name == tier.name
            }
            owners = [entry for entry in self.all() if tier.name in entry.places]
            for entry in owners:
                place = entry.places[tier.name]
                assert place not in held, "two entries at one place, or a reserved place is an entry's"
                assert place.size == entry.record.size
                held[place] = entry.record.key if entry.visible else None
            tier.check_integrity(held)
            self._cold[tier.name].check_integrity()
            assert len(self._cold[tier.name]) == sum(entry.visible for entry in owners)

    def check_idle(self) -> None:
        """Nothing is reserved or pinned: asserted when no call is under way."""
        assert not self._reserved, "a reservation leaked"
        assert all(entry.pins == 0 for entry in self.all()), "a pin leaked"
