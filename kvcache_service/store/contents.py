"""The entries in one tier: their places, the order of their eviction, and places that are reserved for new ones."""

import contextlib
import itertools
import math
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

import numpy as np

from fusionkv.kvcache_service.index.heat import ColdQueue
from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.index.rows import PROTECTED, Rows
from fusionkv.kvcache_service.keys import tenant_of
from fusionkv.kvcache_service.tiers.base import Place, Tier
from fusionkv.kvcache_service.tiers.extents import NoSpace, aligned

# Number of the coldest entries among which room is searched; then the coldest range is taken. More would block the
# event loop: among a million of the smallest entries, a search for 64 MiB took a minute.
_MAX_VICTIMS = 1024
# Share of the used bytes that entries on probation keep while there are others to evict: a tenth, as in S3-FIFO. With
# a quarter, bench/cache/churn.py finds up to 3 points less.
_PROBATION_SHARE = 0.1


class TierContents:
    """Entries are rows of the index, with offsets in the tier, -1 for none. Moves no bytes.

    As in 2Q (Johnson and Shasha 1994), entries used once are on probation, and are evicted before those used again:
    a scan of chunks that nobody asks for twice takes a tenth of the tier. Within both, the coldest goes first.
    """

    def __init__(
        self,
        tier: Tier,
        rows: Rows,
        offsets: "array[int]",
        evictable: Callable[[int], bool],
        held: Callable[[Tier], tuple[list[int], list[Place]]],
        *,
        shared: bool,
    ) -> None:
        """evictable: whether a row has no holds. held: all rows with holds, and places of invisible entries.

        shared: whether tenants have shares of the tier.
        """
        self._tier = tier
        self._rows = rows
        self._offsets = offsets
        self._evictable = evictable
        self._held = held
        self._probation = ColdQueue(rows.heats, lambda row: offsets[row] >= 0 and rows.uses[row] < PROTECTED)
        self._protected = ColdQueue(rows.heats, lambda row: offsets[row] >= 0 and rows.uses[row] >= PROTECTED)
        self._probation_bytes = 0
        # Empty unless tenants have shares, since a row in a queue takes 48 bytes.
        self._by_tenant: dict[bytes, ColdQueue] = {}
        self._shared = shared
        self.reserved: dict[int, EntryRecord] = {}
        """Entries for which places are reserved, by offset."""

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def add(self, row: int, place: Place) -> None:
        self._offsets[row] = place.offset
        if self._shared:
            tenant = self._rows.tenant(row)
            if tenant not in self._by_tenant:
                self._by_tenant[tenant] = ColdQueue(
                    self._rows.heats, lambda row: self._offsets[row] >= 0 and self._rows.tenant(row) == tenant
                )
            self._by_tenant[tenant].add(row)
        if self._rows.uses[row] >= PROTECTED:
            self._protected.add(row)
        else:
            self._probation.add(row)
            self._probation_bytes += aligned(place.size)

    def protect(self, row: int) -> None:
        """Ends the probation of a row of this tier, whose uses were just raised to `PROTECTED`."""
        self._leave_probation(row)
        self._protected.add(row)

    def remove(self, row: int) -> None:
        """Removes a row, which must still be in the index; the caller frees its place."""
        self._offsets[row] = -1
        if self._shared:
            tenant = self._rows.tenant(row)
            self._by_tenant[tenant].remove(row)
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
        if self._rows.uses[row] >= PROTECTED:
            self._protected.remove(row)
        else:
            self._leave_probation(row)

    def hottest(self, count: int) -> list[int]:
        """The `count` hottest rows, hottest first."""
        heats = np.frombuffer(self._rows.heats)
        members = np.flatnonzero(np.frombuffer(self._offsets, np.int64) >= 0)
        if len(members) > count:
            members = members[np.argpartition(-heats[members], count)[:count]]
        hottest: list[int] = members[np.argsort(-heats[members])].tolist()
        return hottest

    def reserve(self, record: EntryRecord, colder_than: float = math.inf, excess: int = 0) -> tuple[Place, list[int]]:
        """Reserves a place, if needed that of rows that are not held and are colder than `colder_than`.

        excess: bytes of the tenant's own rows to be removed in any case.

        Raises NoSpace if evicting all these is not enough; nothing was changed then.

        Returns:
            The place, and the rows that are to be removed for it. Their places are free already.
        """
        own = self._surplus_of_tenant(record, excess, colder_than)
        candidates, size = dict[int, int](), record.size

        def victims(coldest: Iterable[int]) -> Iterator[Place]:
            for row in itertools.chain(own, (row for row in coldest if row not in own)):
                candidates[self._offsets[row]] = row
                yield Place(self._offsets[row], self._rows.size(row))

        with contextlib.closing(self._in_order(colder_than)) as order:
            try:
                place, freed = self._tier.reserve(size, victims(itertools.islice(order, _MAX_VICTIMS)))
            except NoSpace:
                if len(candidates) < _MAX_VICTIMS:
                    raise
                place, freed = self._tier.reserve(size, victims(self._coldest_range(size, colder_than)))
        self.reserved[place.offset] = record
        removed = [candidates[offset] for offset in freed]
        for row in own.keys() - set(removed):
            self._tier.free(Place(self._offsets[row], self._rows.size(row)))
            removed.append(row)
        return place, removed

    def _surplus_of_tenant(self, record: EntryRecord, excess: int, colder_than: float) -> dict[int, None]:
        """The tenant's coldest rows to remove for `excess` bytes, or at least for those of a record.

        A tenant whose excess is larger, since the share was lowered, loses at most 1024 rows at once for it.

        Raises NoSpace if these rows have fewer bytes.
        """
        own, least = dict[int, None](), min(excess, aligned(record.size))
        queue = self._by_tenant.get(tenant_of(record.namespace))
        if excess > 0 and queue is not None:
            with contextlib.closing(queue.coldest(self._evictable)) as coldest:
                for row in itertools.takewhile(lambda row: self._rows.heats[row] < colder_than, coldest):
                    own[row] = None
                    size = aligned(self._rows.size(row))
                    excess, least = excess - size, least - size
                    if excess <= 0 or (least <= 0 and len(own) >= _MAX_VICTIMS):
                        break
        if least > 0:
            raise NoSpace
        return own

    def surplus(self, limit_bytes: int, limit: int) -> list[int]:
        """The rows without holds to remove for the tier to use `limit_bytes`; at most `limit` rows."""
        rows: list[int] = []
        excess = self._tier.used_bytes - limit_bytes
        with contextlib.closing(self._in_order(math.inf)) as order:
            while excess > 0 and len(rows) < limit and (row := next(order, None)) is not None:
                rows.append(row)
                excess -= aligned(self._rows.size(row))
        return rows

    def check_integrity(self, places: Mapping[Place, bytes | None], visible: int) -> None:
        """Checks that the tier has these places and the reserved ones, each with one owner.

        places: of all entries, with the key of each visible one. visible: number of these.

        Raises:
            AssertionError: a check failed.
        """
        reserved = {Place(offset, record.size): None for offset, record in self.reserved.items()}
        assert not reserved.keys() & places.keys(), "a reserved place is an entry's"
        self._tier.check_integrity({**reserved, **places})
        self._probation.check_integrity()
        self._protected.check_integrity()
        assert len(self) == visible
        for queue in self._by_tenant.values():
            queue.check_integrity()
        assert sum(map(len, self._by_tenant.values())) == visible * self._shared
        there, uses = np.frombuffer(self._offsets, np.int64) >= 0, np.frombuffer(self._rows.uses, np.uint8)
        members = np.flatnonzero(there & (uses < PROTECTED))
        assert self._probation_bytes == sum(aligned(self._rows.size(row)) for row in members.tolist())

    def _leave_probation(self, row: int) -> None:
        self._probation.remove(row)
        self._probation_bytes -= aligned(self._rows.size(row))

    def _in_order(self, colder_than: float) -> Generator[int]:
        """Yields the rows without holds that are colder than `colder_than`, in the order of their eviction.

        First come those on probation until the others are left with their share, then the others, then the rest.
        """
        excess = self._probation_bytes - _PROBATION_SHARE * self._tier.used_bytes

        def is_colder(row: int) -> bool:
            return self._rows.heats[row] < colder_than

        probation, protected = (queue.coldest(self._evictable) for queue in (self._probation, self._protected))
        with contextlib.closing(probation), contextlib.closing(protected):
            colder = itertools.takewhile(is_colder, probation)
            while excess > 0 and (row := next(colder, None)) is not None:
                excess -= aligned(self._rows.size(row))
                yield row
            yield from itertools.takewhile(is_colder, protected)
            yield from colder

    def _coldest_range(self, size: int, colder_than: float) -> list[int]:
        """Rows in the range of `Extents.coldest_range`; none if there is no range."""
        offsets = np.frombuffer(self._offsets, np.int64)
        members = np.flatnonzero(offsets >= 0)
        starts, sizes = offsets[members], self._rows.sizes()[members].astype(np.int64)
        heats = np.frombuffer(self._rows.heats, np.float64)[members]
        held_rows, fixed = self._held(self._tier)
        heats[(heats >= colder_than) | np.isin(members, held_rows)] = math.inf
        fixed = [*fixed, *(Place(offset, record.size) for offset, record in self.reserved.items())]
        start, end = self._tier.coldest_range(
            size,
            np.append(starts, np.array([place.offset for place in fixed], np.int64)),
            np.append(sizes, np.array([place.size for place in fixed], np.int64)),
            np.append(heats, np.full(len(fixed), math.inf)),
        )
        chosen: list[int] = members[(starts < end) & (starts + sizes > start)].tolist()
        return chosen
