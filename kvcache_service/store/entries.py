"""Which entries live in which tier, which are leased, and which to evict."""

import heapq
import math
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fusionkv.kvcache_service.index.heat import FrequencySketch
from fusionkv.kvcache_service.index.index import Index
from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.index.rows import PROTECTED
from fusionkv.kvcache_service.keys import entry_key, path_keys, tenant_of
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.store.contents import TierContents
from fusionkv.kvcache_service.tiers.base import Place, Recovered, Tier
from fusionkv.kvcache_service.tiers.extents import ALIGNMENT, aligned
from fusionkv.protos.runtime.errors import ResourceExhausted


@dataclass(eq=False, slots=True, weakref_slot=True)
class StoredEntry:
    """An entry in use, with the places of its bytes by tier.

    An entry without holds may be evicted or lose a copy. A lease is held by a client that may fetch it; a pin, while
    its bytes are being read or moved. An entry deleted while held becomes invisible at once, and its places are freed
    with the last hold.

    There is at most one object per entry, created on demand from the index's rows. Only `Residents` changes heat and
    places, in both.
    """

    record: EntryRecord
    heat: float
    places: dict[str, Place] = field(default_factory=dict)
    leases: int = 0
    pins: int = 0
    row: int | None = None
    """Row in the index; None if invisible."""

    @property
    def visible(self) -> bool:
        return self.row is not None

    @property
    def held(self) -> bool:
        return self.leases > 0 or self.pins > 0


class Leases:
    """Active leases by id. `clock` is monotonic, in seconds; `ended` is called when an entry loses its last lease."""

    def __init__(self, limit: int, clock: Callable[[], float], ended: Callable[[StoredEntry], None]) -> None:
        self._limit = limit
        self._clock = clock
        self._ended = ended
        self._held: dict[int, list[StoredEntry]] = {}
        self._expiry: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, entries: Iterable[StoredEntry], seconds: float) -> int:
        """Leases distinct entries; returns the lease's id. Raises ResourceExhausted at the limit of active leases."""
        self.expire()
        if len(self._held) >= self._limit:
            raise ResourceExhausted(
                f"{self._limit} leases are active: release leases when done, or raise max_leases in [kvcache]"
            )
        # Random, so that ids from before a restart are not reused; 0 means "no lease".
        lease = secrets.randbits(63) + 1
        self._held[lease] = list(entries)
        for entry in self._held[lease]:
            entry.leases += 1
        heapq.heappush(self._expiry, (self._clock() + seconds, lease))
        return lease

    def release(self, lease: int) -> None:
        """Ends a lease; an unknown id is ignored."""
        for entry in self._held.pop(lease, ()):
            entry.leases -= 1
            if entry.leases == 0:
                self._ended(entry)
        # The heap is rebuilt when most of its leases are released.
        if len(self._expiry) > 2 * len(self._held) + 64:
            self._expiry = [item for item in self._expiry if item[1] in self._held]
            heapq.heapify(self._expiry)

    def expire(self) -> None:
        now = self._clock()
        while self._expiry and self._expiry[0][0] <= now:
            self.release(heapq.heappop(self._expiry)[1])

    def check_integrity(self, entries: Iterable[StoredEntry]) -> None:
        """Raises AssertionError unless `entries` count the leases that they have, and every lease will expire."""
        counts = Counter(id(entry) for held in self._held.values() for entry in held)
        assert {lease for _, lease in self._expiry} >= set(self._held)
        assert counts == {id(entry): entry.leases for entry in entries if entry.leases}, "leases and counts disagree"


class TierListener(Protocol):
    """Is told on the event loop which visible entries come to a tier, and leave it."""

    def stored(self, record: EntryRecord, tier: str) -> None: ...

    def removed(self, key: bytes, tier: str) -> None: ...


class Residents:
    """Entries and their places in the tiers, fastest first. The last tier is the home: every entry is in it.

    Must be used on the event loop's thread. Moves no bytes.
    """

    def __init__(self, tiers: Sequence[Tier], counters: Counters, tenant_share: float = 1.0) -> None:
        """tenant_share: the part of each tier that a tenant's entries may take; 1 sets no limit."""
        self.tiers, self.home = tuple(tiers), tiers[-1]
        self._tenant_share = tenant_share
        # Bytes of a tenant's places in a tier, also of reserved ones, and of invisible entries that are held.
        self._taken: Counter[tuple[str, bytes]] = Counter()
        self.index = Index(len(tiers))
        self._counters = counters
        self.listener: TierListener | None = None
        self._entries: weakref.WeakValueDictionary[int, StoredEntry] = weakref.WeakValueDictionary()
        self._withdrawn: set[StoredEntry] = set()
        self.finder: Callable[[bytes], Recovered | None] | None = None  # during recovery: searches the home tier
        self._unrecovered: set[int] = set()  # rows found by key that were not recovered yet
        self.touched: set[int] = set()  # rows whose heat is to be saved
        self._evicted = FrequencySketch()  # keys that left the home tier for others
        self.replaced: weakref.WeakValueDictionary[bytes, StoredEntry] = weakref.WeakValueDictionary()
        """Invisible entries that were replaced by another; clients with a lease may still fetch them."""
        rows = self.index.rows
        self._places = {tier.name: column for tier, column in zip(self.tiers, rows.places, strict=True)}
        self._contents = {
            tier.name: TierContents(
                tier, rows, self._places[tier.name], self._evictable, self._held, shared=tenant_share < 1
            )
            for tier in tiers
        }

    def __len__(self) -> int:
        return len(self.index.rows)

    def __iter__(self) -> Iterator[StoredEntry]:
        return map(self._entry, self.index.rows)

    def get(self, key: bytes) -> StoredEntry | None:
        row = self._row(key)
        return None if row is None else self._entry(row)

    def lookup(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]]
    ) -> list[tuple[HitKind, StoredEntry | None, bytes]]:
        """As `Index.lookup`, with entries in place of rows.

        During recovery, entries are also searched in the home tier: by exact path, or directly after the system
        prompt.
        """
        if self.finder is not None:
            for i, key in enumerate(path_keys(namespace, path)):
                if self._row(key) is None and i:
                    # `_row` adds what it finds to the index; any() stops at the first that exists.
                    alone = [path[0], path[i]]
                    any(self._row(entry_key(namespace, alone, v)) is not None for v in (*variants[i], b""))
        return [
            (kind, None if row is None else self._entry(row), key)
            for kind, row, key in self.index.lookup(namespace, path, variants)
        ]

    def replicas(self, record: EntryRecord) -> list[StoredEntry]:
        """All entries of a record's group: same chunk, system prompt and encoding."""
        return [self._entry(row) for row in self.index.replicas(record)]

    def fastest(self, entry: StoredEntry) -> Tier:
        return next(tier for tier in self.tiers if tier.name in entry.places)

    def count(self, tier: Tier) -> int:
        return len(self._contents[tier.name])

    @property
    def reserved(self) -> int:
        """Number of reserved places."""
        return sum(len(contents.reserved) for contents in self._contents.values())

    def hottest(self, count: int) -> list[bytes]:
        """Keys of the `count` hottest entries."""
        return [self.index.rows.key(row) for row in self._contents[self.home.name].hottest(count)]

    def share(self, tier: Tier) -> int:
        """Maximum bytes of a tenant's entries in a tier."""
        return int(self._tenant_share * tier.capacity_bytes) // ALIGNMENT * ALIGNMENT

    def excess(self, tier: Tier, record: EntryRecord) -> int:
        """Bytes by which a tenant exceeds its share of a tier with one more entry; at most 0 without shares."""
        taken = self._taken[tier.name, tenant_of(record.namespace)] + aligned(record.size)
        return taken - self.share(tier) if self._tenant_share < 1 else 0

    def reserve(
        self, tier: Tier, record: EntryRecord, colder_than: float = math.inf
    ) -> tuple[Place, list[tuple[bytes, Place]]]:
        """Reserves a place, if needed by evicting entries that are not held and are colder than `colder_than`.

        Those are the tenant's own while it would exceed its share of the tier.

        Raises NoSpace if evicting all these is not enough; nothing was changed then.

        Returns:
            The place, and key and place of entries evicted from the home tier. `Tier.forget` must be called for these
            before the place is written.
        """
        place, rows = self._contents[tier.name].reserve(record, colder_than, self.excess(tier, record))
        self._count(tier, record, 1)
        evicted: list[tuple[bytes, Place]] = []
        for entry in map(self._entry, rows):
            vacated = self._remove_from_tier(entry, tier)
            self._count(tier, entry.record, -1)
            if tier is self.home:
                self._counters.add("evictions", tier=tier.name)
                self._remember(entry)
                evicted.append((entry.record.key, vacated))
                self.withdraw(entry)
            else:
                self._counters.add("demotions", tier=tier.name)
        return place, evicted

    def with_withdrawn(self) -> list[StoredEntry]:
        """Visible entries, and invisible ones that are still held."""
        return [*self, *self._withdrawn]

    def check_integrity(self, idle: bool = False) -> None:
        """Checks that index, entries and tiers agree, and that each place has one owner.

        idle: no call is in progress, so nothing is reserved or pinned.

        Raises:
            AssertionError: a check failed.
        """
        self.index.check_integrity()
        assert all(entry.visible and self.home.name in entry.places for entry in self)
        assert all(entry.held and not entry.visible for entry in self._withdrawn), "a deleted entry was not freed"
        for row, entry in list(self._entries.items()):
            assert entry.row == row
            assert entry.record == self.index.rows.record(row)
            assert entry.heat == self.index.rows.heats[row]
            offsets = {name: column[row] for name, column in self._places.items() if column[row] >= 0}
            assert {name: place.offset for name, place in entry.places.items()} == offsets
        for tier in self.tiers:
            owners = [entry for entry in self.with_withdrawn() if tier.name in entry.places]
            places = {entry.places[tier.name]: entry.record.key if entry.visible else None for entry in owners}
            assert len(places) == len(owners), "two entries at one place"
            assert all(entry.places[tier.name].size == entry.record.size for entry in owners)
            contents, taken = self._contents[tier.name], Counter[tuple[str, bytes]]()
            contents.check_integrity(places, sum(entry.visible for entry in owners))
            for record in [*(entry.record for entry in owners), *contents.reserved.values()]:
                taken[tier.name, tenant_of(record.namespace)] += aligned(record.size)
            assert taken == {key: size for key, size in self._taken.items() if key[0] == tier.name}
        if idle:
            assert not self.reserved, "a reservation leaked"
            assert all(entry.pins == 0 for entry in self.with_withdrawn()), "a pin leaked"

    def eviction_candidates(self, tier: Tier, limit_bytes: int, limit: int) -> list[StoredEntry]:
        """The entries without holds to evict for a tier to use `limit_bytes`; at most `limit` entries."""
        candidates = [self._entry(row) for row in self._contents[tier.name].surplus(limit_bytes, limit)]
        for entry in candidates:
            self._remember(entry)
        return candidates

    def unreserve(self, tier: Tier, place: Place) -> None:
        """Frees a reserved place."""
        self._count(tier, self._contents[tier.name].reserved.pop(place.offset), -1)
        tier.free(place)

    def add_copy(self, entry: StoredEntry, tier: Tier, place: Place) -> None:
        """Makes a reserved place a copy of an entry."""
        del self._contents[tier.name].reserved[place.offset]
        entry.places[tier.name] = place
        if entry.row is not None:
            self._add_to_tier(entry.row, tier.name, place)

    def recover(self, entries: Iterable[Recovered]) -> None:
        """Makes persisted entries of the home tier visible."""
        for recovered in entries:
            try:
                self._add_recovered(recovered)
            except KeyError:  # already found by key
                known = self.index.row(recovered.record.key)
                if known is not None and self._places[self.home.name][known] == recovered.place.offset:
                    self._unrecovered.discard(known)

    def end_recovery(self) -> None:
        """Deletes entries found by key but not recovered: the index is damaged, or their place overlaps another."""
        self.finder = None
        for entry in map(self._entry, self._unrecovered):
            if not self.home.claim(entry.places[self.home.name]):
                self._remove_from_tier(entry, self.home)
                self._count(self.home, entry.record, -1)
            self.withdraw(entry)
        self._unrecovered.clear()

    def publish(self, entry: StoredEntry, pulled: bool = False) -> None:
        """Makes an entry visible. Its bytes must be in the home tier.

        pulled: Copied from the remote tier for a Lookup, which is its first use.
        """
        assert self.home.name in entry.places
        entry.row = self.index.add(entry.record, entry.heat)
        uses = self.index.rows.uses
        # An entry that is asked for again soon after its eviction was evicted too early.
        uses[entry.row] = min(PROTECTED, (1 if pulled else uses[entry.row]) + self._evicted.count(entry.record.key))
        self._entries[entry.row] = entry
        for name, place in entry.places.items():
            self._add_to_tier(entry.row, name, place)

    def use(self, entry: StoredEntry, heat: float) -> None:
        """Counts a use of a visible entry, and raises its heat."""
        assert entry.row is not None
        entry.heat = self.index.rows.heats[entry.row] = heat
        self.touched.add(entry.row)
        uses = self.index.rows.uses
        if uses[entry.row] < PROTECTED:
            uses[entry.row] += 1
            if uses[entry.row] == PROTECTED:
                for name in entry.places:
                    self._contents[name].protect(entry.row)

    def withdraw(self, entry: StoredEntry) -> None:
        """Makes a visible entry invisible, and frees its places unless it is held."""
        assert entry.row is not None
        row, entry.row = entry.row, None
        del self._entries[row]
        for name in entry.places:
            self._contents[name].remove(row)
            if self.listener is not None:
                self.listener.removed(entry.record.key, name)
        self.index.remove(entry.record.key)
        self._withdrawn.add(entry)
        self.reclaim(entry)

    def reclaim(self, entry: StoredEntry) -> None:
        """Frees the places of an entry that is invisible and no longer held. Called when a hold ends."""
        if entry.visible or entry.held:
            return
        self._withdrawn.remove(entry)
        for tier in self.tiers:
            place = entry.places.pop(tier.name, None)
            if place is not None:
                self._count(tier, entry.record, -1)
                tier.free(place)

    def _row(self, key: bytes) -> int | None:
        row = self.index.row(key)
        if row is None and self.finder is not None and (persisted := self.finder(key)) is not None:
            row = self._add_recovered(persisted)
            self._unrecovered.add(row)
        return row

    def _add_recovered(self, recovered: Recovered) -> int:
        """Makes a persisted entry visible; returns its row. Raises KeyError if it is."""
        row = self.index.add(recovered.record, recovered.heat)
        self._count(self.home, recovered.record, 1)
        self._add_to_tier(row, self.home.name, recovered.place)
        return row

    def _entry(self, row: int) -> StoredEntry:
        entry = self._entries.get(row)
        if entry is None:
            rows = self.index.rows
            record = rows.record(row)
            places = {
                name: Place(column[row], record.size) for name, column in self._places.items() if column[row] >= 0
            }
            entry = self._entries[row] = StoredEntry(record, rows.heats[row], places, row=row)
        return entry

    def _evictable(self, row: int) -> bool:
        entry = self._entries.get(row)
        return entry is None or not entry.held

    def _held(self, tier: Tier) -> tuple[list[int], list[Place]]:
        """Rows of visible entries with holds, and places of invisible ones in a tier."""
        rows = [row for row, entry in self._entries.items() if entry.held]
        return rows, [entry.places[tier.name] for entry in self._withdrawn if tier.name in entry.places]

    def _remember(self, evicted: StoredEntry) -> None:
        # As many as there are entries: with a hundred times as many, bench/cache/churn.py finds 5 points less.
        self._evicted.limit = min(FrequencySketch.LIMIT, len(self))
        self._evicted.add(evicted.record.key)

    def _add_to_tier(self, row: int, name: str, place: Place) -> None:
        self._contents[name].add(row, place)
        if self.listener is not None:
            self.listener.stored(self.index.rows.record(row), name)

    def _count(self, tier: Tier, record: EntryRecord, places: int) -> None:
        """Counts places of an entry that were taken, or freed (-1), as its tenant's."""
        tenant = (tier.name, tenant_of(record.namespace))
        self._taken[tenant] += places * aligned(record.size)
        if not self._taken[tenant]:
            del self._taken[tenant]

    def _remove_from_tier(self, entry: StoredEntry, tier: Tier) -> Place:
        """Removes a visible entry from a tier; returns the place, for the caller to free."""
        assert entry.row is not None
        self._contents[tier.name].remove(entry.row)
        if self.listener is not None:
            self.listener.removed(entry.record.key, tier.name)
        return entry.places.pop(tier.name)
