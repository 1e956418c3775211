"""What a tenant's entries take of a tier, and which of them are evicted for its share."""

import contextlib
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable

from fusionkv.kvcache_service.index.heat import ColdQueue
from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.index.rows import Rows
from fusionkv.kvcache_service.keys import tenant_of
from fusionkv.kvcache_service.tiers.extents import ALIGNMENT, NoSpace, aligned

# Rows of a tenant that are evicted at once for its share; more would block the event loop.
_MAX_VICTIMS = 1024


class TenantShares:
    """The shares of one tier. Entries are rows of the index."""

    def __init__(self, rows: Rows, offsets: "array[int]", capacity_bytes: int, share: float) -> None:
        """share: the part of the tier that a tenant's entries may take; 1 sets no limit."""
        self.limit = int(share * capacity_bytes) // ALIGNMENT * ALIGNMENT
        """Maximum bytes of a tenant's entries."""
        self._limited = share < 1
        self._rows = rows
        self._offsets = offsets
        # Bytes of a tenant's places, also of reserved ones, and of invisible entries that are held.
        self._taken: Counter[bytes] = Counter()
        # Empty unless tenants have shares, since a row in a queue takes 48 bytes.
        self._coldest: dict[bytes, ColdQueue] = {}

    def excess(self, record: EntryRecord) -> int:
        """Bytes by which a tenant exceeds its share with one more entry; at most 0 without shares."""
        taken = self._taken[tenant_of(record.namespace)] + aligned(record.size)
        return taken - self.limit if self._limited else 0

    def count(self, record: EntryRecord, places: int) -> None:
        """Counts places of an entry that were taken, or freed (-1), as its tenant's."""
        tenant = tenant_of(record.namespace)
        self._taken[tenant] += places * aligned(record.size)
        if not self._taken[tenant]:
            del self._taken[tenant]

    def add(self, row: int) -> None:
        """Adds a row that may be evicted."""
        if self._limited:
            tenant = self._rows.tenant(row)
            if tenant not in self._coldest:
                self._coldest[tenant] = ColdQueue(
                    self._rows.heats, lambda row: self._offsets[row] >= 0 and self._rows.tenant(row) == tenant
                )
            self._coldest[tenant].add(row)

    def remove(self, row: int) -> None:
        """Removes a row, whose offset must be -1 by now, and which must still be in the index."""
        if self._limited:
            tenant = self._rows.tenant(row)
            self._coldest[tenant].remove(row)
            if not self._coldest[tenant]:
                del self._coldest[tenant]

    def surplus(self, record: EntryRecord, evictable: Callable[[int], bool], colder_than: float) -> dict[int, None]:
        """The tenant's coldest rows, colder than `colder_than`, to remove for one more entry to fit its share.

        A tenant whose excess is larger, since the share was lowered, loses at most 1024 rows at once for it.

        Raises NoSpace if these rows have too few bytes for the entry.
        """
        excess = self.excess(record)
        own, least = dict[int, None](), min(excess, aligned(record.size))
        queue = self._coldest.get(tenant_of(record.namespace))
        if excess > 0 and queue is not None:
            with contextlib.closing(queue.coldest(evictable)) as coldest:
                for row in itertools.takewhile(lambda row: self._rows.heats[row] < colder_than, coldest):
                    own[row] = None
                    size = aligned(self._rows.size(row))
                    excess, least = excess - size, least - size
                    if excess <= 0 or (least <= 0 and len(own) >= _MAX_VICTIMS):
                        break
        if least > 0:
            raise NoSpace
        return own

    def check_integrity(self, members: list[int], owned: Iterable[EntryRecord]) -> None:
        """Raises AssertionError unless exactly the rows `members` are queued, and `owned` have the counted bytes."""
        for queue in self._coldest.values():
            queue.check_integrity()
        assert sum(map(len, self._coldest.values())) == len(members) * self._limited
        taken = Counter[bytes]()
        for record in owned:
            taken[tenant_of(record.namespace)] += aligned(record.size)
        assert taken == self._taken
