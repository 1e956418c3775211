"""Which entries live in which tier, and which to evict."""

import math
import weakref
from collections.abc import Iterable, Sequence

from fusionkv.kvcache_service.index.heat import FrequencySketch
from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.index.rows import PROTECTED
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.store.contents import TierContents
from fusionkv.kvcache_service.store.entries import Entries, StoredEntry
from fusionkv.kvcache_service.tiers.base import Place, Recovered, Tier


class Residents:
    """Entries in the tiers, fastest first. The last tier is the home: every entry is in it.

    Must be used on the event loop's thread. Moves no bytes.
    """

    def __init__(self, tiers: Sequence[Tier], counters: Counters, tenant_share: float = 1.0) -> None:
        """tenant_share: the part of each tier that a tenant's entries may take; 1 sets no limit."""
        self.tiers, self.home = tuple(tiers), tiers[-1]
        self.entries = Entries([tier.name for tier in tiers])
        self.contents = {tier.name: TierContents(tier, self.entries, tenant_share) for tier in tiers}
        """By the tier's name."""
        self._counters = counters
        self._evicted = FrequencySketch()  # keys that left the home tier for others
        self.replaced: weakref.WeakValueDictionary[bytes, StoredEntry] = weakref.WeakValueDictionary()
        """Invisible entries that were replaced by another; clients with a lease may still fetch them."""

    def fastest(self, entry: StoredEntry) -> Tier:
        """The fastest tier with an entry's bytes."""
        return next(tier for tier in self.tiers if tier.name in entry.places)

    def hottest(self, count: int) -> list[bytes]:
        """Keys of the `count` hottest entries."""
        return [self.entries.index.rows.key(row) for row in self.contents[self.home.name].hottest(count)]

    def reserve(
        self, tier: Tier, record: EntryRecord, colder_than: float = math.inf
    ) -> tuple[Place, list[tuple[bytes, Place]]]:
        """As `TierContents.reserve`, with the entries evicted or dropped.

        Returns:
            The place, and key and place of entries evicted from the home tier. `Tier.forget` must be called for these
            before the place is written.
        """
        contents, evicted = self.contents[tier.name], list[tuple[bytes, Place]]()
        place, rows = contents.reserve(record, colder_than)
        for row in rows:
            entry = self.entries.of(row)
            contents.remove(row)
            contents.tenants.count(entry.record, -1)
            vacated = entry.places.pop(tier.name)
            if tier is self.home:
                self._counters.add("evictions", tier=tier.name)
                _remember(self._evicted, entry, len(self.entries))
                evicted.append((entry.record.key, vacated))
                self.withdraw(entry)
            else:
                self._counters.add("demotions", tier=tier.name)
        return place, evicted

    def eviction_candidates(self, tier: Tier, limit_bytes: int, limit: int) -> list[StoredEntry]:
        """The entries without holds to evict for a tier to use `limit_bytes`; at most `limit` entries."""
        candidates = [self.entries.of(row) for row in self.contents[tier.name].surplus(limit_bytes, limit)]
        for entry in candidates:
            _remember(self._evicted, entry, len(self.entries))
        return candidates

    def recover(self, entries: Iterable[Recovered]) -> None:
        """Makes entries visible that the home tier has persisted."""
        contents = self.contents[self.home.name]
        for recovered in entries:
            row = self.entries.index.add(recovered.record, recovered.heat)
            contents.tenants.count(recovered.record, 1)
            contents.add(row, recovered.place)

    def add_copy(self, entry: StoredEntry, tier: Tier, place: Place) -> None:
        """Makes a reserved place a copy of an entry."""
        del self.contents[tier.name].reserved[place.offset]
        entry.places[tier.name] = place
        if entry.row is not None:
            self.contents[tier.name].add(entry.row, place)

    def publish(self, entry: StoredEntry, pulled: bool = False) -> None:
        """Makes an entry visible. Its bytes must be in the home tier.

        pulled: Copied from the remote tier for a Lookup, which is its first use.
        """
        assert self.home.name in entry.places
        row = self.entries.publish(entry)
        uses = self.entries.index.rows.uses
        # An entry that is asked for again soon after its eviction was evicted too early.
        uses[row] = min(PROTECTED, (1 if pulled else uses[row]) + self._evicted.count(entry.record.key))
        for name, place in entry.places.items():
            self.contents[name].add(row, place)

    def use(self, entry: StoredEntry, heat: float) -> None:
        """Counts a use of a visible entry, and raises its heat."""
        assert entry.row is not None
        rows = self.entries.index.rows
        entry.heat = rows.heats[entry.row] = heat
        if rows.uses[entry.row] < PROTECTED:
            rows.uses[entry.row] += 1
            if rows.uses[entry.row] == PROTECTED:
                for name in entry.places:
                    self.contents[name].order.protect(entry.row)

    def withdraw(self, entry: StoredEntry) -> None:
        """Makes a visible entry invisible, and frees its places unless it is held."""
        assert entry.row is not None
        for name in entry.places:
            self.contents[name].remove(entry.row)
        self.entries.withdraw(entry)
        self.reclaim(entry)

    def reclaim(self, entry: StoredEntry) -> None:
        """Frees the places of an entry that is invisible and no longer held. Called when a hold ends."""
        if entry.visible or entry.held:
            return
        self.entries.withdrawn.remove(entry)
        for name, place in entry.places.items():
            self.contents[name].free(entry.record, place)
        entry.places.clear()

    def check_integrity(self, idle: bool = False) -> None:
        """Raises AssertionError unless index, entries and tiers agree, and each place has one owner.

        idle: no call is in progress, so nothing is reserved or pinned.
        """
        self.entries.check_integrity()
        assert all(self.home.name in entry.places for entry in self.entries)
        for contents in self.contents.values():
            contents.check_integrity()
            assert not idle or not contents.reserved, "a reservation leaked"
        assert not idle or all(e.pins == 0 for e in (*self.entries, *self.entries.withdrawn)), "a pin leaked"


def _remember(sketch: FrequencySketch, evicted: StoredEntry, entries: int) -> None:
    # As many as there are entries: with a hundred times as many, bench/cache/churn.py finds 5 points less.
    sketch.limit = min(FrequencySketch.LIMIT, entries)
    sketch.add(evicted.record.key)
