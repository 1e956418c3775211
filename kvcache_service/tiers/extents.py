"""Space: which stretches of a linear range of bytes are taken and which are free."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable

ALIGNMENT = 4096


class NoSpace(Exception):
    """There is no hole that is large enough, and none can be made."""


def aligned(size: int) -> int:
    """`size` rounded up to whole blocks of 4096 bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Holes:
    """Free half-open intervals, sorted, touching ones merged except at the multiples of `boundary`.

    First fit, lowest address first: what was used before, and is in memory or in the file already, is used again.
    """

    def __init__(self, starts: list[int], ends: list[int], boundary: int) -> None:
        self.starts, self.ends, self._boundary = starts, ends, boundary

    def copy(self) -> "Holes":
        return Holes(self.starts.copy(), self.ends.copy(), self._boundary)

    def find(self, length: int) -> int | None:
        """Start of the first hole of at least `length` bytes."""
        return next((s for s, e in zip(self.starts, self.ends, strict=True) if e - s >= length), None)

    def add(self, start: int, end: int) -> tuple[int, int]:
        """Adds an interval that is not free yet; gives the hole that it is part of then."""
        i = bisect_left(self.starts, start)
        if i < len(self.starts) and self.starts[i] == end and end % self._boundary:
            end = self.ends[i]
            del self.starts[i], self.ends[i]
        if i and self.ends[i - 1] == start and start % self._boundary:
            start = self.starts[i - 1]
            self.ends[i - 1] = end
        else:
            self.starts.insert(i, start)
            self.ends.insert(i, end)
        return start, end

    def take(self, start: int, end: int) -> None:
        """Removes an interval that lies within one hole."""
        i = bisect_left(self.starts, start + 1) - 1
        low, high = self.starts[i], self.ends[i]
        assert low <= start < end <= high, f"{start}..{end} is not free"
        del self.starts[i], self.ends[i]
        if end < high:
            self.starts.insert(i, end)
            self.ends.insert(i, high)
        if low < start:
            self.starts.insert(i, low)
            self.ends.insert(i, start)


class Extents:
    """Who owns which region of 0..capacity; an extent starts at a multiple of 4096 and crosses no `boundary`."""

    def __init__(self, capacity: int, boundary: int | None = None) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self._boundary = boundary or max(self.capacity, ALIGNMENT)
        starts = list(range(0, self.capacity, self._boundary))
        self._holes = Holes(starts, [min(s + self._boundary, self.capacity) for s in starts], self._boundary)
        self._taken: dict[int, int] = {}  # start -> length
        self.used = 0

    def allocate(self, size: int, victims: Iterable[int] = ()) -> tuple[int, list[int]]:
        """Takes an extent for `size` bytes: its start, and the victims that were freed for it.

        `victims` are starts of extents that may be freed, the first to go first. Of those looked at until a hole is
        large enough, only the ones that lie in the way of the new extent are freed.

        Raises:
            NoSpace: not even all victims make a hole; nothing was changed.
        """
        length = aligned(size)
        if length > min(self.capacity, self._boundary):
            raise NoSpace
        start = self._holes.find(length)
        freed: list[int] = []
        if start is None:
            start, freed = self._plan(length, victims)
            for victim in freed:
                self.free(victim)
        self._holes.take(start, start + length)
        self._taken[start] = length
        self.used += length
        return start, freed

    def occupy(self, start: int, size: int) -> None:
        """Takes a given extent, at recovery.

        Raises:
            NoSpace: it is not within the range, crosses a boundary or is taken.
        """
        length = aligned(size)
        i = bisect_left(self._holes.starts, start + 1) - 1
        if start % ALIGNMENT or i < 0 or start + length > self._holes.ends[i]:
            raise NoSpace
        self._holes.take(start, start + length)
        self._taken[start] = length
        self.used += length

    def free(self, start: int) -> None:
        length = self._taken.pop(start)
        self._holes.add(start, start + length)
        self.used -= length

    def _plan(self, length: int, victims: Iterable[int]) -> tuple[int, list[int]]:
        holes, looked_at = self._holes.copy(), []
        for victim in victims:
            looked_at.append(victim)
            start, end = holes.add(victim, victim + self._taken[victim])
            if end - start >= length:
                return start, [v for v in looked_at if start <= v < start + length]
        raise NoSpace

    def check_integrity(self, held: Iterable[int]) -> None:
        """Taken extents are exactly those `held`; taken and free ones tile the range; the count of bytes is right."""
        assert set(held) == set(self._taken), "extents taken and extents held disagree"
        free = list(zip(self._holes.starts, self._holes.ends, strict=True))
        regions = sorted([*free, *((s, s + n) for s, n in self._taken.items())])
        at = 0
        for start, end in regions:
            assert at == start < end, f"a gap or an overlap at {at}"
            assert start // self._boundary == (end - 1) // self._boundary, f"{start}..{end} crosses a boundary"
            at = end
        assert at == self.capacity
        merged = all(e != s or s % self._boundary == 0 for (_, e), (s, _) in itertools.pairwise(free))
        assert merged, "two holes touch"
        assert self.used == sum(self._taken.values())
