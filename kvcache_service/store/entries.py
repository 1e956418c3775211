"""Entries by key and path, the objects of those in use, and leases of them."""

import contextlib
import heapq
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusionkv.kvcache_service.index.index import Index
from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.tiers.base import Place
from fusionkv.protos.runtime.errors import ResourceExhausted

if TYPE_CHECKING:
    from fusionkv.kvcache_service.events import EventPublisher  # its packages are optional


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

    @contextlib.contextmanager
    def kept(self, lease: int) -> Iterator[None]:
        """Releases a lease if an error ends what is done here: its caller never learns of it."""
        try:
            yield
        except BaseException:
            self.release(lease)
            raise

    def expire(self) -> None:
        now = self._clock()
        while self._expiry and self._expiry[0][0] <= now:
            self.release(heapq.heappop(self._expiry)[1])

    def check_integrity(self, entries: Iterable[StoredEntry]) -> None:
        """Raises AssertionError unless `entries` count the leases that they have, and every lease will expire."""
        counts = Counter(id(entry) for held in self._held.values() for entry in held)
        assert {lease for _, lease in self._expiry} >= set(self._held)
        assert counts == {id(entry): entry.leases for entry in entries if entry.leases}, "leases and counts disagree"


class Entries:
    """All visible entries, and the invisible ones that are still held. Must be used on the event loop's thread."""

    def __init__(self, tiers: Sequence[str]) -> None:
        """tiers: their names, fastest first."""
        self.index = Index(len(tiers))
        self.offsets = dict(zip(tiers, self.index.rows.places, strict=True))
        """For each tier, the offsets of entries by row, -1 for none."""
        self.in_use: weakref.WeakValueDictionary[int, StoredEntry] = weakref.WeakValueDictionary()
        self.withdrawn: set[StoredEntry] = set()
        self.listener: EventPublisher | None = None
        """Is told which visible entries come to a tier, and leave it."""

    def __len__(self) -> int:
        return len(self.index.rows)

    def __iter__(self) -> Iterator[StoredEntry]:
        """All visible entries."""
        return map(self.of, self.index.rows)

    def of(self, row: int) -> StoredEntry:
        """The entry of a row of the index."""
        entry = self.in_use.get(row)
        if entry is None:
            rows = self.index.rows
            record = rows.record(row)
            places = {
                name: Place(column[row], record.size) for name, column in self.offsets.items() if column[row] >= 0
            }
            entry = self.in_use[row] = StoredEntry(record, rows.heats[row], places, row=row)
        return entry

    def get(self, key: bytes) -> StoredEntry | None:
        row = self.index.row(key)
        return None if row is None else self.of(row)

    def lookup(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]]
    ) -> list[tuple[HitKind, StoredEntry | None, bytes]]:
        """As `Index.lookup`, with entries in place of rows."""
        found = self.index.lookup(namespace, path, variants)
        return [(kind, None if row is None else self.of(row), key) for kind, row, key in found]

    def replicas(self, record: EntryRecord) -> list[StoredEntry]:
        """All entries of a record's group: same chunk, system prompt and encoding."""
        return [self.of(row) for row in self.index.replicas(record)]

    def evictable(self, row: int) -> bool:
        """Whether a visible entry has no holds."""
        entry = self.in_use.get(row)
        return entry is None or not entry.held

    def held(self, tier: str) -> tuple[list[int], list[Place]]:
        """Rows of visible entries with holds, and places of invisible ones in a tier."""
        rows = [row for row, entry in self.in_use.items() if entry.held]
        return rows, [entry.places[tier] for entry in self.withdrawn if tier in entry.places]

    def publish(self, entry: StoredEntry) -> int:
        """Makes an entry visible; returns its row."""
        entry.row = self.index.add(entry.record, entry.heat)
        self.in_use[entry.row] = entry
        return entry.row

    def withdraw(self, entry: StoredEntry) -> None:
        """Makes a visible entry invisible; its row must not be in a tier any more."""
        assert entry.row is not None
        del self.in_use[entry.row]
        entry.row = None
        self.index.remove(entry.record.key)
        self.withdrawn.add(entry)

    def check_integrity(self) -> None:
        """Raises AssertionError unless index and objects agree, and withdrawn entries are held."""
        self.index.check_integrity()
        assert all(entry.held and not entry.visible for entry in self.withdrawn), "a deleted entry was not freed"
        for row, entry in list(self.in_use.items()):
            assert entry.row == row
            assert entry.record == self.index.rows.record(row)
            assert entry.heat == self.index.rows.heats[row]
            offsets = {name: column[row] for name, column in self.offsets.items() if column[row] >= 0}
            assert {name: place.offset for name, place in entry.places.items()} == offsets
