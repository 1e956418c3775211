"""Heat, the exponentially decayed access frequency of entries; the coldest ones; approximate counts of lookups."""

import heapq
import math
import struct
from array import array
from collections.abc import Callable, Generator

_FLOAT, _INT = struct.Struct("<d"), struct.Struct("<Q")
_ROW_BITS = 32
_ROW = (1 << _ROW_BITS) - 1


def after_access(heat: float, now: float) -> float:
    """Heat after another access at `now`, in half-lives since a fixed time; after the first, it is `now`.

    With accesses at times t, the decayed frequency at time s is the sum of 2^((t - s) / half_life). Its logarithm
    is log2(sum 2^(t / half_life)) - s / half_life, whose second term is the same for all entries. So heat is the
    first term: it orders entries at any time, needs no decay, and never falls.
    """
    high, low = max(heat, now), min(heat, now)
    return high + math.log2(1.0 + 2.0 ** max(low - high, -1000.0))


def decode(value: bytes | None) -> float:
    """Decodes persisted heat, a little-endian double; 0, the coldest, if it is invalid.

    It has no checksum, and ColdQueue orders heats by their bits: a negative heat or NaN would never be evicted.
    """
    heat: float = _FLOAT.unpack(value)[0] if value is not None and len(value) == _FLOAT.size else 0.0
    return heat if 0.0 < heat < math.inf else 0.0


class ColdQueue:
    """Priority queue of rows by heat, updated lazily. A row belongs to it while `member` says so.

    Heat never falls, so the heat in a heap item is a lower bound. An item is refreshed only when it reaches the
    front, and an access costs nothing here. An item is one integer (48 bytes with its heap slot): the bits of the
    heat, which order non-negative floats as their values, and the row.
    """

    def __init__(self, heats: "array[float]", member: Callable[[int], bool]) -> None:
        self._heats = heats
        self._member = member
        self._heap: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: int) -> None:
        """Adds a row that became a member."""
        heapq.heappush(self._heap, self._item(row))
        self._count += 1

    def remove(self, row: int) -> None:
        """Removes a row that is no member any more. Its item stays until it reaches the front."""
        self._count -= 1
        # The heap is rebuilt when more than half of its items are stale.
        if len(self._heap) > 2 * self._count + 64:
            rows = {item & _ROW for item in self._heap}
            self._heap = [self._item(row) for row in rows if self._member(row)]
            heapq.heapify(self._heap)

    def coldest(self, evictable: Callable[[int], bool]) -> Generator[int]:
        """Yields rows for which `evictable` is true, coldest first. They remain members."""
        popped: list[int] = []
        try:
            while self._heap:
                item = heapq.heappop(self._heap)
                row = item & _ROW
                now = self._item(row)
                # The row was removed, or its number was reused: the new entry has an item of its own, which is not
                # above the stale one.
                if not self._member(row) or item > now or (popped and popped[-1] == item):
                    continue
                if now != item:
                    heapq.heappush(self._heap, now)
                    continue
                popped.append(item)
                if evictable(row):
                    yield row
        finally:
            for item in popped:
                heapq.heappush(self._heap, item)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every member has an item, which is not above its heat."""
        members = {row for row in range(len(self._heats)) if self._member(row)}
        assert len(members) == len(self)
        lowest: dict[int, int] = {}
        for item in self._heap:
            lowest[item & _ROW] = min(item, lowest.get(item & _ROW, item))
        assert all(row in lowest and lowest[row] <= self._item(row) for row in members)

    def _item(self, row: int) -> int:
        bits: int = _INT.unpack(_FLOAT.pack(self._heats[row]))[0]
        return bits << _ROW_BITS | row


class FrequencySketch:
    """Counts recent names: the last `limit` to 2 * `limit` distinct ones, in about 150 bytes per name.

    Names are truncated to 8 bytes: among 65,536 names, two collide with a probability of 1 in 4 billion.
    """

    LIMIT = 32_768

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def add(self, name: bytes) -> None:
        self._young[name[:8]] = self.count(name) + 1
        if len(self._young) >= self.limit:
            self._young, self._old = {}, self._young

    def count(self, name: bytes) -> int:
        """Number of recent calls of `add` for a name; 0 if forgotten."""
        return self._young.get(name[:8]) or self._old.get(name[:8], 0)
