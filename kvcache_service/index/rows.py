"""Columnar storage of all visible entries: 160 bytes per entry, 64 more if signed, against 1 KB as objects.

Rows are found by a hash table from digests to row numbers, 14 bytes per row; digests are stored in the rows.
"""

import struct
from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fusionkv.kvcache_service.index.record import MAX_SIGNATURE_BYTES, OFFERED, VARIANT, EntryRecord
from fusionkv.kvcache_service.keys import DIGEST_BYTES, tenant_of

# key, chunk, variant, checksum, size, tokens, base, flags
_FIXED = struct.Struct("<32s32s32s16sIIIB3x")
_SIZE_AT = struct.calcsize("<32s32s32s16s")
# Length and bytes.
_SIGNATURE = struct.Struct(f"{1 + MAX_SIGNATURE_BYTES}p")
_NOWHERE = -1
# Uses from which an entry is kept rather than those that were used once.
PROTECTED = 2
# A slot contains 32 bits of the digest and the row + 1; 0 is an empty slot.
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
# Shards grow one at a time: at 10 million rows, 40 thousand slots move in 2 ms, not 10 million in 1 s.
_SHARDS = 256
_FIRST_SLOTS = 8


class Prefixes:
    """Namespace and preceding digests of each row. Equal ones are stored once, with a count, and numbered from 1.

    Nearly all entries are encoded directly after a system prompt, so there are few.
    """

    def __init__(self) -> None:
        self._of_row = array("I")  # numbers; 0: no row
        self._numbers: dict[tuple[bytes, bytes], int] = {}
        self._values: list[tuple[bytes, bytes]] = [(b"", b"")]
        self._uses = array("Q", [0])
        self._free: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return (row for row, number in enumerate(self._of_row) if number)

    def __getitem__(self, row: int) -> tuple[bytes, bytes]:
        """Namespace, and digests from the preceding chunk back to the system prompt."""
        return self._values[self._of_row[row]]

    def add(self, row: int, namespace: bytes, trail: bytes) -> None:
        """Adds a row, which must have been removed, or be the next one."""
        value = (namespace, trail)
        number = self._numbers.get(value)
        if number is None:
            if not self._free:
                self._free.append(len(self._values))
                self._values.append(value)
                self._uses.append(0)
            number = self._numbers[value] = self._free.pop()
            self._values[number] = value
        self._uses[number] += 1
        self._of_row[row : row + 1] = array("I", [number])

    def remove(self, row: int) -> None:
        number, self._of_row[row] = self._of_row[row], 0
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._numbers[self._values[number]]
            self._values[number] = (b"", b"")
            self._free.append(number)

    def in_namespace(self, namespace: bytes) -> list[int]:
        """Rows of a namespace; takes 10 ms at 10 million rows."""
        numbers = [number for (name, _), number in self._numbers.items() if name == namespace]
        inside = np.isin(np.frombuffer(self._of_row, np.uint32), np.array(numbers, np.uint32))
        return np.flatnonzero(inside).tolist()

    def check_integrity(self, count: int) -> None:
        """Raises AssertionError unless there are so many rows, and each number's count is right."""
        numbers, counts = np.unique([number for number in self._of_row if number], return_counts=True)
        assert sum(counts.tolist()) == count
        known = {number: self._uses[number] for number in self._numbers.values()}
        assert known == dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        assert len(known) + len(self._free) == len(self._values) - 1


class Rows:
    """Records, heats, uses and places by row number. Numbers of removed rows are reused.

    `heats`, `uses` and `places` (one column per tier, offset or -1) are written by the owner. An entry that a request
    offered begins with one use; one that was encoded ahead, for others to come, is `PROTECTED`.
    """

    def __init__(self, tiers: int) -> None:
        self.heats = array("d")
        self.uses = array("B")  # up to PROTECTED
        self.places = tuple(array("q") for _ in range(tiers))
        self._fixed = bytearray()
        self._signatures = bytearray()  # up to the last row that was ever signed
        self.prefixes = Prefixes()
        self._free = array("I")

    def __len__(self) -> int:
        return len(self.heats) - len(self._free)

    def __iter__(self) -> Iterator[int]:
        return iter(self.prefixes)

    def add(self, record: EntryRecord, heat: float) -> int:
        flags = VARIANT * bool(record.variant) | OFFERED * record.offered
        numbers = (record.size, record.tokens, record.base, flags)
        fixed = _FIXED.pack(record.key, record.chunk, record.variant, record.checksum, *numbers)
        if not self._free:
            self._free.append(len(self.heats))
            self._fixed += fixed
            self.heats.append(0.0)
            self.uses.append(0)
            for column in self.places:
                column.append(_NOWHERE)
        row = self._free.pop()
        self._fixed[row * _FIXED.size : (row + 1) * _FIXED.size] = fixed
        self.prefixes.add(row, record.namespace, record.trail[DIGEST_BYTES:])
        self.heats[row] = heat
        self.uses[row] = 1 if record.offered else PROTECTED
        at = row * _SIGNATURE.size
        if record.signature and (missing := at + _SIGNATURE.size - len(self._signatures)) > 0:
            self._signatures += bytes(missing)
        if at < len(self._signatures):
            _SIGNATURE.pack_into(self._signatures, at, record.signature)
        return row

    def remove(self, row: int) -> None:
        self.prefixes.remove(row)
        for column in self.places:
            column[row] = _NOWHERE
        self._free.append(row)

    def key(self, row: int) -> bytes:
        at = row * _FIXED.size
        return bytes(self._fixed[at : at + DIGEST_BYTES])

    def size(self, row: int) -> int:
        at = row * _FIXED.size + _SIZE_AT
        return int.from_bytes(self._fixed[at : at + 4], "little")

    def tenant(self, row: int) -> bytes:
        return tenant_of(self.prefixes[row][0])

    def sizes(self) -> npt.NDArray[np.uint32]:
        """Sizes by row number. While this view exists, no row can be added."""
        return np.frombuffer(self._fixed, np.uint32).reshape(-1, _FIXED.size // 4)[:, _SIZE_AT // 4]

    def record(self, row: int) -> EntryRecord:
        key, chunk, variant, checksum, size, tokens, base, flags = _FIXED.unpack_from(self._fixed, row * _FIXED.size)
        namespace, prefix = self.prefixes[row]
        at = row * _SIGNATURE.size
        signature = _SIGNATURE.unpack_from(self._signatures, at)[0] if at < len(self._signatures) else b""
        return EntryRecord(
            key, namespace, chunk + prefix, variant if flags & VARIANT else b"", size, tokens, base, checksum,
            offered=bool(flags & OFFERED), signature=signature,
        )  # fmt: skip

    def matches(self, row: int, namespace: bytes, system: bytes, chunk: bytes, variant: bytes) -> bool:
        """Whether a row has this namespace, system prompt, chunk and variant."""
        at = row * _FIXED.size + DIGEST_BYTES
        own_namespace, prefix = self.prefixes[row]
        same = self._fixed[at : at + 2 * DIGEST_BYTES] == chunk + (variant or bytes(DIGEST_BYTES))
        return same and own_namespace == namespace and prefix.endswith(system)

    def check_integrity(self) -> None:
        """Raises AssertionError unless free rows are unused, columns of one length, and reference counts right."""
        assert len(set(self._free)) == len(self._free)
        assert not {*self} & {*self._free}
        assert all(len(column) == len(self.heats) for column in (self.uses, *self.places))
        assert len(self._fixed) == _FIXED.size * len(self.heats)
        assert len(self._signatures) <= _SIGNATURE.size * len(self.heats)
        assert len(self._signatures) % _SIGNATURE.size == 0
        self.prefixes.check_integrity(len(self))


class DigestTable:
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
        """Raises AssertionError unless every row is reachable from its home slot, and counts are right."""
        for slots, count in zip(self._shards, self._counts, strict=True):
            mask = len(slots) - 1
            taken = [at for at, slot in enumerate(slots) if slot]
            assert len(taken) == count
            assert 4 * count <= 3 * len(slots)
            for at in taken:
                home = (slots[at] >> _ROW_BITS) & mask
                assert all(slots[(home + i) & mask] for i in range((at - home) & mask)), "a probe ends too early"


def _grown(slots: "array[int]") -> "array[int]":
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
