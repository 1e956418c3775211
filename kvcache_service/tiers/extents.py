"""A first-fit allocator of extents in a linear range of bytes."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

ALIGNMENT = 4096


class NoSpace(Exception):
    """No hole is large enough, and none can be made."""


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of 4096."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Holes:
    """Sorted free half-open intervals. Adjacent ones are merged, except at multiples of `boundary`.

    First fit from the lowest address reuses pages and file blocks that are already allocated.
    """

    def __init__(self, starts: list[int], ends: list[int], boundary: int) -> None:
        self.starts, self.ends, self._boundary = starts, ends, boundary

    def copy(self) -> "Holes":
        return Holes(self.starts.copy(), self.ends.copy(), self._boundary)

    def find(self, length: int) -> int | None:
        """Start of the first hole of at least `length` bytes."""
        return next((s for s, e in zip(self.starts, self.ends, strict=True) if e - s >= length), None)

    def add(self, start: int, end: int) -> tuple[int, int]:
        """Adds an interval that is not free; returns the hole that contains it afterwards."""
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

    def cover(self, start: int, end: int) -> bool:
        """Whether an interval lies within one hole."""
        i = bisect_left(self.starts, start + 1) - 1
        return i >= 0 and end <= self.ends[i]

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
    """Free space within 0..capacity. An extent starts at a multiple of 4096 and crosses no multiple of `boundary`.

    Only holes are stored: owners keep start and size of their extents, so memory does not grow with their number.
    """

    def __init__(self, capacity: int, boundary: int | None = None) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self._boundary = boundary or max(self.capacity, ALIGNMENT)
        starts = list(range(0, self.capacity, self._boundary))
        self._holes = Holes(starts, [min(s + self._boundary, self.capacity) for s in starts], self._boundary)
        self.used = 0

    def allocate(self, size: int, victims: Iterable[tuple[int, int]] = ()) -> tuple[int, list[int]]:
        """Allocates an extent for `size` bytes, and frees victims if no hole is large enough.

        Args:
            victims: Start and size of extents that may be freed, in order of preference. They are consumed until a
                hole is large enough; only those that overlap the new extent are freed.

        Returns:
            Start of the extent, and the starts of the freed victims.

        Raises:
            NoSpace: Freeing all victims is not enough. Nothing was changed.
        """
        length = aligned(size)
        if length > min(self.capacity, self._boundary):
            raise NoSpace
        start = self._holes.find(length)
        freed: list[tuple[int, int]] = []
        if start is None:
            start, freed = self._plan(length, victims)
            for victim in freed:
                self.free(*victim)
        self._holes.take(start, start + length)
        self.used += length
        return start, [victim for victim, _ in freed]

    def claim(self, start: int, size: int) -> bool:
        """Allocates the given extent if it is free."""
        end = start + aligned(size)
        if not self._holes.cover(start, end):
            return False
        self._holes.take(start, end)
        self.used += end - start
        return True

    def free(self, start: int, size: int) -> None:
        """Frees an extent, given the size that it was allocated with."""
        self._holes.add(start, start + aligned(size))
        self.used -= aligned(size)

    def fit(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Mask of valid extents: aligned, within the range, and within one boundary."""
        ends = starts + -(-sizes // ALIGNMENT) * ALIGNMENT
        whole = (starts >= 0) & (starts % ALIGNMENT == 0) & (sizes > 0) & (ends <= self.capacity)
        same: npt.NDArray[np.bool_] = starts // self._boundary == (ends - 1) // self._boundary
        return whole & same

    def restore(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        """Allocates all extents of an empty range at once; each must `fit`, and none may overlap another."""
        order = np.argsort(starts)
        starts, lengths = starts[order], -(-sizes[order] // ALIGNMENT) * ALIGNMENT
        ends = starts + lengths
        assert np.all(ends[:-1] <= starts[1:]), "two extents overlap"
        gaps = np.stack([np.concatenate([[0], ends]), np.concatenate([starts, [self.capacity]])], axis=1)
        self._holes = Holes([], [], self._boundary)
        for start, end in gaps[gaps[:, 0] < gaps[:, 1]].tolist():
            for at in (start, *range((start // self._boundary + 1) * self._boundary, end, self._boundary)):
                self._holes.starts.append(at)
                self._holes.ends.append(min(end, (at // self._boundary + 1) * self._boundary))
        self.used = int(lengths.sum())

    def _plan(self, length: int, victims: Iterable[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
        holes, candidates = self._holes.copy(), []
        for victim, size in victims:
            candidates.append((victim, size))
            start, end = holes.add(victim, victim + aligned(size))
            if end - start >= length:
                return start, [(v, n) for v, n in candidates if start <= v < start + length]
        raise NoSpace

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Asserts that `held` (size by start) and the holes tile the range, and that `used` is right."""
        taken = {start: aligned(size) for start, size in held.items()}
        free = list(zip(self._holes.starts, self._holes.ends, strict=True))
        regions = sorted([*free, *((s, s + n) for s, n in taken.items())])
        at = 0
        for start, end in regions:
            assert at == start < end, f"a gap or an overlap at {at}"
            assert start // self._boundary == (end - 1) // self._boundary, f"{start}..{end} crosses a boundary"
            at = end
        assert at == self.capacity
        merged = all(e != s or s % self._boundary == 0 for (_, e), (s, _) in itertools.pairwise(free))
        assert merged, "two holes touch"
        assert self.used == sum(taken.values())
