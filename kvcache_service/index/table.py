"""A hash table from digests to row numbers, 14 bytes per row; digests are stored in the rows."""

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

# A slot contains 32 bits of the digest and the row + 1; 0 is an empty slot.
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
MAX_ROWS = _ROW_MASK - 1
# Shards grow one at a time: at 10 million rows, 40 thousand slots move in 2 ms, not 10 million in 1 s.
_SHARDS = 256
_FIRST_SLOTS = 8


class Table:
    """Rows by digest: open addressing with linear probing. The first 5 bytes of digests must be uniform.

    Digests that agree in those 40 bits must be distinguished by the caller, from the rows.
    """

    def __init__(self) -> None:
        self._shards = [array("Q", bytes(8 * _FIRST_SLOTS)) for _ in range(_SHARDS)]
        self._counts = [0] * _SHARDS

    def __len__(self) -> int:
        return sum(self._counts)

    def rows(self, digest: bytes) -> Iterator[int]:
        """Candidate rows of a digest."""
        slots = self._shards[digest[0]]
        mask, tag = len(slots) - 1, int.from_bytes(digest[1:5])
        at = tag & mask
        while slot := slots[at]:
            if slot >> _ROW_BITS == tag:
                yield (slot & _ROW_MASK) - 1
            at = (at + 1) & mask

    def add(self, digest: bytes, row: int) -> None:
        """Adds a row, which must not exist under this digest."""
        shard = digest[0]
        slots = self._shards[shard]
        # The load factor is at most 3/4: a find probes 1.5 slots on average, 2.5 at the maximum.
        if 4 * (self._counts[shard] + 1) > 3 * len(slots):
            slots = self._shards[shard] = _grown(slots)
        mask, tag = len(slots) - 1, int.from_bytes(digest[1:5])
        at = tag & mask
        while slots[at]:
            at = (at + 1) & mask
        slots[at] = tag << _ROW_BITS | (row + 1)
        self._counts[shard] += 1

    def remove(self, digest: bytes, row: int) -> None:
        """Removes a row. Raises KeyError if it does not exist under this digest."""
        shard = digest[0]
        slots = self._shards[shard]
        mask, tag = len(slots) - 1, int.from_bytes(digest[1:5])
        slot, at = tag << _ROW_BITS | (row + 1), tag & mask
        while slots[at] != slot:
            if not slots[at]:
                raise KeyError(row)
            at = (at + 1) & mask
        # Later slots of the same probe sequence move up: a gap would end probes too early.
        gap, at = at, (at + 1) & mask
        while slots[at]:
            home = (slots[at] >> _ROW_BITS) & mask
            if (at - home) & mask >= (at - gap) & mask:
                slots[gap] = slots[at]
                gap = at
            at = (at + 1) & mask
        slots[gap] = 0
        self._counts[shard] -= 1

    def check_integrity(self) -> None:
        """Asserts that every row is reachable from its home slot, and that counts are right."""
        for slots, count in zip(self._shards, self._counts, strict=True):
            mask = len(slots) - 1
            taken = [at for at, slot in enumerate(slots) if slot]
            assert len(taken) == count
            assert 4 * count <= 3 * len(slots)
            for at in taken:
                home = (slots[at] >> _ROW_BITS) & mask
                assert all(slots[(home + i) & mask] for i in range((at - home) & mask)), "a probe ends too early"


def _grown(slots: "array[int]") -> "array[int]":
    """Rehashes into twice as many slots."""
    old: npt.NDArray[np.uint64] = np.frombuffer(slots, np.uint64)
    moving = old[old != 0]
    new = array("Q", bytes(16 * len(slots)))
    to, mask = np.frombuffer(new, np.uint64), 2 * len(slots) - 1
    at = (moving >> np.uint64(_ROW_BITS)).astype(np.int64) & mask
    while len(moving):
        # Vectorised: of all rows that target one empty slot, the last gets it, and the others probe the next slot.
        empty = to[at] == 0
        to[at[empty]] = moving[empty]
        displaced = to[at] != moving
        moving, at = moving[displaced], (at[displaced] + 1) & mask
    return new
