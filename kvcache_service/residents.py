"""Who is where: the entries, the tiers that hold their bytes, and who has to go when room is needed."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fusionkv.kvcache_service.heat import ColdQueue
from fusionkv.kvcache_service.index import Index
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.record import Record
from fusionkv.kvcache_service.tiers.base import Place, Tier


@dataclass(eq=False, slots=True)
class Resident:
    """One entry and where its bytes are.

    | held by      | meaning                             | may lose a copy or be evicted |
    |--------------|-------------------------------------|-------------------------------|
    | nobody       |                                     | yes                           |
    | a lease      | somebody is about to fetch it       | no                            |
    | a pin        | its bytes are read or moved now     | no                            |

    An entry that is deleted while it is held turns invisible at once and gives its places back with the last hold.
    """

    record: Record
    heat: float
    places: dict[str, Place] = field(default_factory=dict)
    leases: int = 0
    pins: int = 0
    visible: bool = False

    @property
    def held(self) -> bool:
        return self.leases > 0 or self.pins > 0


class Residents:
    """Entries in tiers, the fastest first. The last tier is the home: an entry is there or nowhere.

    For the event loop's thread alone; moves no bytes.
    """

    def __init__(self, tiers: Sequence[Tier], counters: Counters) -> None:
        self.tiers = tuple(tiers)
        self.index = Index()
        self._counters = counters
        self._entries: dict[bytes, Resident] = {}
        self._leaving: set[Resident] = set()
        self._reserved: set[tuple[str, int]] = set()
        self._cold: dict[str, ColdQueue[Resident]] = {tier.name: ColdQueue() for tier in tiers}

    @property
    def home(self) -> Tier:
        return self.tiers[-1]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Resident | None:
        return self._entries.get(key)

    def count(self, tier: Tier) -> int:
        """Entries in a tier."""
        return len(self._cold[tier.name])

    def reserve(
        self, tier: Tier, size: int, colder_than: float = math.inf
    ) -> tuple[Place, list[tuple[bytes, Place]]]:
        """A place in a tier, at the cost of entries that nobody holds and that are colder than `colder_than`.

        The keys and places of those that it took the place of in the home tier are returned: the entries are gone,
        and the tier has to forget them before the place is written to.

        Raises:
            NoSpace: these entries together don't make room; none was touched.
        """
        looked_at: dict[int, Resident] = {}
        with contextlib.closing(self._cold[tier.name].coldest(lambda entry: not entry.held)) as coldest:

            def victims() -> Iterator[Place]:
                for entry in itertools.takewhile(lambda entry: entry.heat < colder_than, coldest):
                    place = entry.places[tier.name]
                    looked_at[place.offset] = entry
                    yield place

            place, freed = tier.reserve(size, victims())
        evicted: list[tuple[bytes, Place]] = []
        for entry in (looked_at[offset] for offset in freed):
            left = entry.places.pop(tier.name)
            self._cold[tier.name].remove(entry)
            if tier is self.home:
                self._counters.add("evictions", tier=tier.name)
                evicted.append((entry.record.key, left))
                self.withdraw(entry)
            else:
                self._counters.add("demotions", tier=tier.name)
        self._reserved.add((tier.name, place.offset))
        return place, evicted

    def cancel(self, tier: Tier, place: Place) -> None:
        """Gives a reserved place back."""
        self._reserved.remove((tier.name, place.offset))
        tier.free(place)

    def settle(self, entry: Resident, tier: Tier, place: Place) -> None:
        """Turns a reserved place into a copy of an entry."""
        self._reserved.remove((tier.name, place.offset))
        self.adopt(entry, tier, place)

    def adopt(self, entry: Resident, tier: Tier, place: Place) -> None:
        """Turns a place that a tier recovered into a copy of an entry."""
        entry.places[tier.name] = place
        self._cold[tier.name].add(entry)

    def publish(self, entry: Resident) -> None:
        """Makes an entry visible; its bytes are in the home tier."""
        assert self.home.name in entry.places
        self._entries[entry.record.key] = entry
        self.index.add(entry.record)
        entry.visible = True

    def withdraw(self, entry: Resident) -> None:
        """Makes a visible entry invisible, and frees its places unless somebody holds it."""
        del self._entries[entry.record.key]
        self.index.remove(entry.record.key)
        entry.visible = False
        self._leaving.add(entry)
        self.let_go(entry)

    def let_go(self, entry: Resident) -> None:
        """Called when a hold on an entry ended: an invisible one that nobody holds gives its places back."""
        if entry.visible or entry.held:
            return
        self._leaving.remove(entry)
        for tier in self.tiers:
            place = entry.places.pop(tier.name, None)
            if place is not None:
                self._cold[tier.name].remove(entry)
                tier.free(place)

    def all(self) -> Iterator[Resident]:
        """Visible entries, and invisible ones that somebody still holds."""
        return itertools.chain(self._entries.values(), self._leaving)

    def check_integrity(self) -> None:
        """Index, entries and tiers agree; every place is somebody's; every entry is at home."""
        self.index.check_integrity()
        assert {record.key for record in self.index} == set(self._entries)
        assert all(entry.visible and self.home.name in entry.places for entry in self)
        assert all(entry.held and not entry.visible for entry in self._leaving), "a deleted entry was not freed"
        for tier in self.tiers:
            held: dict[int, bytes | None] = {}
            owners = [entry for entry in self.all() if tier.name in entry.places]
            for entry in owners:
                place = entry.places[tier.name]
                assert place.offset not in held, "two entries at one place"
                assert place.size == entry.record.size
                held[place.offset] = entry.record.key if entry.visible else None
            reserved = {offset for name, offset in self._reserved if name == tier.name}
            assert not reserved & set(held), "a reserved place is an entry's"
            tier.check_integrity({**held, **dict.fromkeys(reserved)})
            self._cold[tier.name].check_integrity()
            assert len(self._cold[tier.name]) == len(owners)

    def check_idle(self) -> None:
        """Nothing is reserved or pinned: asserted when no call is under way."""
        assert not self._reserved, "a reservation leaked"
        assert all(entry.pins == 0 for entry in self.all()), "a pin leaked"
