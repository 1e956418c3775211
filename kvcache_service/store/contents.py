"""The entries in one tier: their places, coldest first, and places that are reserved for new ones."""

import contextlib
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from fusionkv.kvcache_service.index.heat import ColdQueue
from fusionkv.kvcache_service.index.rows import Rows
from fusionkv.kvcache_service.tiers.base import Place, Tier
from fusionkv.kvcache_service.tiers.extents import NoSpace, aligned

# Number of the coldest entries among which room is searched; then the coldest range is taken. More would block the
# event loop: among a million of the smallest entries, a search for 64 MiB took a minute.
_MAX_VICTIMS = 1024


class TierContents:
    """Entries are rows of the index, with offsets in the tier, -1 for none. Moves no bytes."""

    def __init__(
        self,
        tier: Tier,
        rows: Rows,
        offsets: "array[int]",
        evictable: Callable[[int], bool],
        held: Callable[[Tier], tuple[list[int], list[Place]]],
    ) -> None:
        """evictable: whether a row has no holds. held: all rows with holds, and places of invisible entries."""
        self._tier = tier
        self._rows = rows
        self._offsets = offsets
        self._evictable = evictable
        self._held = held
        self._cold = ColdQueue(rows.heats, offsets)
        self.reserved: dict[int, int] = {}
        """Sizes of reserved places, by offset."""

    def __len__(self) -> int:
        return len(self._cold)

    def add(self, row: int, place: Place) -> None:
        self._offsets[row] = place.offset
        self._cold.add(row)

    def remove(self, row: int) -> None:
        """Removes a row; the caller frees its place."""
        self._offsets[row] = -1
        self._cold.remove(row)

    def hottest(self, count: int) -> list[int]:
        """The `count` hottest rows, hottest first."""
        heats = np.frombuffer(self._rows.heats)
        members = np.flatnonzero(np.frombuffer(self._offsets, np.int64) >= 0)
        if len(members) > count:
            members = members[np.argpartition(-heats[members], count)[:count]]
        hottest: list[int] = members[np.argsort(-heats[members])].tolist()
        return hottest

    def reserve(self, size: int, colder_than: float = math.inf) -> tuple[Place, list[int]]:
        """Reserves a place, if needed that of rows that are not held and are colder than `colder_than`.

        Raises NoSpace if evicting all these is not enough; nothing was changed then.

        Returns:
            The place, and the rows that are to be removed for it. Their places are free already.
        """
        candidates: dict[int, int] = {}

        def victims(coldest: Iterable[int]) -> Iterator[Place]:
            for row in coldest:
                candidates[self._offsets[row]] = row
                yield Place(self._offsets[row], self._rows.size(row))

        with contextlib.closing(self._cold.coldest(self._evictable)) as coldest:
            colder = itertools.takewhile(lambda row: self._rows.heats[row] < colder_than, coldest)
            try:
                place, freed = self._tier.reserve(size, victims(itertools.islice(colder, _MAX_VICTIMS)))
            except NoSpace:
                if len(candidates) < _MAX_VICTIMS:
                    raise
                place, freed = self._tier.reserve(size, victims(self._coldest_range(size, colder_than)))
        self.reserved[place.offset] = place.size
        return place, [candidates[offset] for offset in freed]

    def surplus(self, limit_bytes: int, limit: int) -> list[int]:
        """The coldest rows without holds to remove for the tier to use `limit_bytes`; at most `limit` rows."""
        rows: list[int] = []
        excess = self._tier.used_bytes - limit_bytes
        with contextlib.closing(self._cold.coldest(self._evictable)) as coldest:
            while excess > 0 and len(rows) < limit and (row := next(coldest, None)) is not None:
                rows.append(row)
                excess -= aligned(self._rows.size(row))
        return rows

    def check_integrity(self, places: Mapping[Place, bytes | None], visible: int) -> None:
        """Checks that the tier has these places and the reserved ones, each with one owner.

        places: of all entries, with the key of each visible one. visible: number of these.

        Raises:
            AssertionError: a check failed.
        """
        reserved = {Place(offset, size): None for offset, size in self.reserved.items()}
        assert not reserved.keys() & places.keys(), "a reserved place is an entry's"
        self._tier.check_integrity({**reserved, **places})
        self._cold.check_integrity()
        assert len(self) == visible

    def _coldest_range(self, size: int, colder_than: float) -> list[int]:
        """Rows in the range of `Extents.coldest_range`; none if there is no range."""
        offsets = np.frombuffer(self._offsets, np.int64)
        members = np.flatnonzero(offsets >= 0)
        starts, sizes = offsets[members], self._rows.sizes()[members].astype(np.int64)
        heats = np.frombuffer(self._rows.heats, np.float64)[members]
        held_rows, fixed = self._held(self._tier)
        heats[(heats >= colder_than) | np.isin(members, held_rows)] = math.inf
        fixed = [*fixed, *(Place(offset, length) for offset, length in self.reserved.items())]
        start, end = self._tier.coldest_range(
            size,
            np.append(starts, np.array([place.offset for place in fixed], np.int64)),
            np.append(sizes, np.array([place.size for place in fixed], np.int64)),
            np.append(heats, np.full(len(fixed), math.inf)),
        )
        chosen: list[int] = members[(starts < end) & (starts + sizes > start)].tolist()
        return chosen
