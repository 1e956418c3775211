"""A first-fit allocator of extents in a linear range of bytes."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ALIGNMENT = 4096
# Bounds the memory of a search to 100 MiB.
_MAX_BLOCKS = 1 << 22


class NoSpace(Exception):
    """No hole is large enough, and none can be made."""


@dataclass(frozen=True, slots=True)
class Place:
    """Location of an entry's bytes within a tier, in bytes."""

    offset: int
    size: int


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

    def take(self, start: int, end: int) -> None:
        """Removes an interval from the start of a hole on."""
        i = bisect_left(self.starts, start)
        assert self.starts[i] == start < end <= self.ends[i], f"{start}..{end} is not free"
        if end < self.ends[i]:
            self.starts[i] = end
        else:
            del self.starts[i], self.ends[i]


class Extents:
    """Space within 0..capacity. A place starts at a multiple of 4096 and crosses no multiple of `boundary`.

    Only holes are stored: owners keep their places, so memory does not grow with their number.
    """

    def __init__(self, capacity_bytes: int, boundary: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT * ALIGNMENT
        self._boundary = boundary or max(self.capacity_bytes, ALIGNMENT)
        self.restore(np.empty(0, np.int64), np.empty(0, np.int64))

    def reserve(self, size: int, victims: Iterable[Place] = ()) -> tuple[Place, list[int]]:
        """Allocates a place for `size` bytes; returns it, and the offsets of the victims freed for it.

        victims: places that may be freed, in order of preference. They are consumed until a hole is large enough;
        only those that overlap the new place are freed.

        Raises NoSpace if `size` exceeds the capacity, or freeing all victims is not enough; nothing was changed then.
        """
        length = aligned(size)
        if length > min(self.capacity_bytes, self._boundary):
            raise NoSpace
        start = self._holes.find(length)
        freed: list[Place] = []
        if start is None:
            start, freed = self._plan(length, victims)
            for victim in freed:
                self.free(victim)
        self._holes.take(start, start + length)
        self.used_bytes += length
        return Place(start, size), [victim.offset for victim in freed]

    def free(self, place: Place) -> None:
        self._holes.add(place.offset, place.offset + aligned(place.size))
        self.used_bytes -= aligned(place.size)

    def fit(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Mask of valid places: aligned, within the range and one boundary, and not over one that begins before."""
        ends = starts + -(-sizes // ALIGNMENT) * ALIGNMENT
        valid = (starts >= 0) & (starts % ALIGNMENT == 0) & (sizes > 0) & (ends <= self.capacity_bytes)
        valid &= starts // self._boundary == (ends - 1) // self._boundary
        order = np.flatnonzero(valid)
        order = order[np.argsort(starts[order], kind="stable")]
        covered = starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]
        valid[order[1:][covered]] = False
        return valid

    def restore(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        """Replaces all places; each must `fit`, and none may overlap another."""
        order = np.argsort(starts)
        starts, lengths = starts[order], -(-sizes[order] // ALIGNMENT) * ALIGNMENT
        ends = starts + lengths
        assert np.all(ends[:-1] <= starts[1:]), "two extents overlap"
        gaps = np.stack([np.concatenate([[0], ends]), np.concatenate([starts, [self.capacity_bytes]])], axis=1)
        self._holes = Holes([], [], self._boundary)
        for start, end in gaps[gaps[:, 0] < gaps[:, 1]].tolist():
            for at in (start, *range((start // self._boundary + 1) * self._boundary, end, self._boundary)):
                self._holes.add(at, min(end, (at // self._boundary + 1) * self._boundary))
        self.used_bytes = int(lengths.sum())
        """Allocated bytes; each place is rounded up to a multiple of 4096."""

    def coldest_range(
        self, size: int, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], heats: npt.NDArray[np.float64]
    ) -> tuple[int, int]:
        """Finds a range for `size` bytes whose hottest place is as cold as possible, in 0.2 us per place.

        Considers ranges that begin at multiples of an eighth of the length, or of the length, and cross no boundary.
        In a very large tier they are longer. Returns start and end; (0, 0) if there is none.

        starts, sizes, heats: of all allocated places. Those of infinite heat are in no range.
        """
        length = aligned(size)
        least = aligned(self.capacity_bytes // _MAX_BLOCKS)
        for step in (max(least, aligned(-(-length // 8))), max(least, length)):
            count = -(-length // step)
            # The heat of the hottest place in each block of `step` bytes; a line is the range between two boundaries.
            lines, columns = -(-self.capacity_bytes // self._boundary), -(-self._boundary // step)
            if columns < count:
                continue
            within = starts % self._boundary
            first = starts // self._boundary * columns + within // step
            spans = (within + sizes - 1) // step - within // step + 1
            behind = np.cumsum(spans) - spans
            blocks = np.repeat(first - behind, spans) + np.arange(spans.sum())
            table = np.full((lines, columns), -np.inf)
            np.maximum.at(table.reshape(-1), blocks, np.repeat(heats, spans))
            ends = np.arange(1, columns + 1) * step
            table[:, ends > self._boundary] = np.inf
            table[-1, (lines - 1) * self._boundary + ends > self.capacity_bytes] = np.inf
            hottest = np.lib.stride_tricks.sliding_window_view(table, count, axis=1).max(axis=2)
            line, column = divmod(int(hottest.argmin()), hottest.shape[1])
            if hottest[line, column] < np.inf:
                start = line * self._boundary + column * step
                return start, start + count * step
        return 0, 0

    def check_integrity(self, held: Mapping[Place, bytes | None]) -> None:
        """Raises AssertionError unless `held` are the allocated places: keys, or None while one is being written."""
        taken = {place.offset: aligned(place.size) for place in held}
        free = list(zip(self._holes.starts, self._holes.ends, strict=True))
        at = 0
        for start, end in sorted([*free, *((s, s + n) for s, n in taken.items())]):
            assert at == start < end, f"a gap or an overlap at {at}"
            assert start // self._boundary == (end - 1) // self._boundary, f"{start}..{end} crosses a boundary"
            at = end
        assert at == self.capacity_bytes
        merged = all(e != s or s % self._boundary == 0 for (_, e), (s, _) in itertools.pairwise(free))
        assert merged, "two holes touch"
        assert self.used_bytes == sum(taken.values())

    def _plan(self, length: int, victims: Iterable[Place]) -> tuple[int, list[Place]]:
        holes, candidates = self._holes.copy(), []
        for victim in victims:
            candidates.append(victim)
            start, end = holes.add(victim.offset, victim.offset + aligned(victim.size))
            if end - start >= length:
                return start, [place for place in candidates if start <= place.offset < start + length]
        raise NoSpace
