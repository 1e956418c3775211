"""Heat: how often an entry was asked for, older accesses counting less, and the queue of the coldest."""

import heapq
import math
import struct
from array import array
from collections.abc import Callable, Generator

_FLOAT, _INT = struct.Struct("<d"), struct.Struct("<Q")
_ROW_BITS = 32
_ROW = (1 << _ROW_BITS) - 1


def first(now: float, half_life: float) -> float:
    """Heat after one access at `now`, seconds since any fixed time."""
    return now / half_life


def again(heat: float, now: float, half_life: float) -> float:
    """Heat after one more access.

    With accesses at times t, the decayed frequency at time s is the sum of 2^((t - s) / half_life). Its logarithm
    is log2(sum 2^(t / half_life)) - s / half_life, and the second part is the same for all entries. So the first
    part alone orders them at any time: nothing has to be decayed, and heat never falls.
    """
    t = now / half_life
    high, low = max(heat, t), min(heat, t)
    return high + math.log2(1.0 + 2.0 ** max(low - high, -1000.0))


def stored(value: bytes | None) -> float:
    """Heat as a tier keeps it, a little-endian double; the coldest for what is none.

    No checksum covers it, and the queue below orders heats by their bits: one below zero, or none, would never go.
    """
    found: float = _FLOAT.unpack(value)[0] if value is not None and len(value) == _FLOAT.size else 0.0
    return found if 0.0 < found < math.inf else 0.0


class ColdQueue:
    """The rows of one tier, the coldest first. A row is in the tier when it has a place there.

    Heat never falls while an entry lives, so the heat noted at the last visit is a lower bound, and a row is only
    moved when it comes to the front with an old note: an access costs nothing here. A note is one integer (48 bytes
    with its place in the heap): the bits of the heat, which order non-negative floats as their values do, and the
    row.
    """

    def __init__(self, heats: "array[float]", places: "array[int]") -> None:
        self._heats = heats
        self._places = places
        self._notes: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: int) -> None:
        """Adds a row that got its place."""
        heapq.heappush(self._notes, self._note(row))
        self._count += 1

    def remove(self, row: int) -> None:
        """Called when a row lost its place; its note stays until it comes to the front."""
        self._count -= 1
        # More than half of the notes being such, all are dropped.
        if len(self._notes) > 2 * self._count + 64:
            rows = {note & _ROW for note in self._notes}
            self._notes = [self._note(row) for row in rows if self._places[row] >= 0]
            heapq.heapify(self._notes)

    def coldest(self, may_go: Callable[[int], bool]) -> Generator[int]:
        """The rows that `may_go`, the coldest first; all of them are members still afterwards."""
        seen: list[int] = []
        try:
            while self._notes:
                note = heapq.heappop(self._notes)
                row = note & _ROW
                now = self._note(row)
                # The row has left, or its number is another entry's now: that one has a note of its own, which the
                # old one is above or becomes equal to.
                if self._places[row] < 0 or note > now or (seen and seen[-1] == note):
                    continue
                if now != note:
                    heapq.heappush(self._notes, now)
                    continue
                seen.append(note)
                if may_go(row):
                    yield row
        finally:
            for note in seen:
                heapq.heappush(self._notes, note)

    def _note(self, row: int) -> int:
        bits: int = _INT.unpack(_FLOAT.pack(self._heats[row]))[0]
        return bits << _ROW_BITS | row

    def check_integrity(self) -> None:
        members = {row for row, place in enumerate(self._places) if place >= 0}
        assert len(members) == self._count
        lowest: dict[int, int] = {}
        for note in self._notes:
            lowest[note & _ROW] = min(note, lowest.get(note & _ROW, note))
        assert all(row in lowest and lowest[row] <= self._note(row) for row in members)
