"""The order in which a tier's entries are evicted: those used once first, and within both kinds the coldest."""

import contextlib
import itertools
from array import array
from collections.abc import Callable, Generator

import numpy as np

from fusionkv.kvcache_service.index.heat import ColdQueue
from fusionkv.kvcache_service.index.rows import PROTECTED, Rows
from fusionkv.kvcache_service.tiers.extents import aligned

# Share of the used bytes that entries on probation keep while there are others to evict: a tenth, as in S3-FIFO. With
# a quarter, bench/cache/churn.py finds up to 3 points less.
_PROBATION_SHARE = 0.1


class EvictionOrder:
    """As in 2Q (Johnson and Shasha 1994), entries used once are on probation, and evicted before those used again.

    A scan of chunks that nobody asks for twice takes a tenth of the tier. Entries are rows of the index.
    """

    def __init__(self, rows: Rows, offsets: "array[int]") -> None:
        """offsets: those of the tier by row, -1 for none."""
        self._rows = rows
        self._probation = ColdQueue(rows.heats, lambda row: offsets[row] >= 0 and rows.uses[row] < PROTECTED)
        self._protected = ColdQueue(rows.heats, lambda row: offsets[row] >= 0 and rows.uses[row] >= PROTECTED)
        self._probation_bytes = 0

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def add(self, row: int) -> None:
        if self._rows.uses[row] >= PROTECTED:
            self._protected.add(row)
        else:
            self._probation.add(row)
            self._probation_bytes += aligned(self._rows.size(row))

    def protect(self, row: int) -> None:
        """Ends the probation of a row, whose uses were just raised to `PROTECTED`."""
        self._leave_probation(row)
        self._protected.add(row)

    def remove(self, row: int) -> None:
        """Removes a row, whose offset must be -1 by now."""
        if self._rows.uses[row] >= PROTECTED:
            self._protected.remove(row)
        else:
            self._leave_probation(row)

    def coldest(self, evictable: Callable[[int], bool], colder_than: float, used_bytes: int) -> Generator[int]:
        """Yields the evictable rows that are colder than `colder_than`, in the order of their eviction.

        First come those on probation until the others are left with their share of `used_bytes`, then the others,
        then the rest.
        """
        excess = self._probation_bytes - _PROBATION_SHARE * used_bytes

        def is_colder(row: int) -> bool:
            return self._rows.heats[row] < colder_than

        probation, protected = (queue.coldest(evictable) for queue in (self._probation, self._protected))
        with contextlib.closing(probation), contextlib.closing(protected):
            colder = itertools.takewhile(is_colder, probation)
            while excess > 0 and (row := next(colder, None)) is not None:
                excess -= aligned(self._rows.size(row))
                yield row
            yield from itertools.takewhile(is_colder, protected)
            yield from colder

    def check_integrity(self, members: list[int]) -> None:
        """Raises AssertionError unless exactly these rows are in a queue, and the bytes on probation are right."""
        self._probation.check_integrity()
        self._protected.check_integrity()
        assert len(self) == len(members)
        uses = np.frombuffer(self._rows.uses, np.uint8)
        on_probation = (row for row in members if uses[row] < PROTECTED)
        assert self._probation_bytes == sum(aligned(self._rows.size(row)) for row in on_probation)

    def _leave_probation(self, row: int) -> None:
        self._probation.remove(row)
        self._probation_bytes -= aligned(self._rows.size(row))
