"""A read-only LMDB lookup that treats damage as a miss, for an index that has not been checked.

LMDB itself may terminate the process at a damaged page (index_rewrite.py), and a check takes 2 s per million entries.
The file layout is that of `mdb.c` in LMDB 0.9 (`MDB_meta`, `MDB_page`, `MDB_node`, `MDB_db`), in native byte order.
"""

import contextlib
import mmap
import struct
from pathlib import Path

from fusionkv.kvcache_service.tiers.index_rewrite import FORMAT, MAGIC

# Each of the two meta pages: magic, format, address, map size, page size, root page of the names, transaction.
_META = struct.Struct("=16xIIQQI44x40xQ8xQ")
_PAGE, _NODE, _NUMBER = struct.Struct("=10xHHxx"), struct.Struct("=HHHH"), struct.Struct("=H")
_LEAF, _BIG = 2, 1
_ROOT_OFFSET, _ROOT = 40, struct.Struct("=Q")
# LMDB's own limit (CURSOR_STACK). A damaged tree may contain a cycle.
_MAX_DEPTH = 32
# Above the largest record: a path of 65,535 digests of 32 bytes.
_MAX_VALUE_BYTES = 4 << 20


class IndexReader:
    """The last committed state of an LMDB file, which must not be written to meanwhile."""

    def __init__(self, file: Path) -> None:
        """Opens the file. A file that is missing or of another format counts as empty."""
        self._data: mmap.mmap | bytes = b""
        self._page_bytes, self._names = 0, 0
        with contextlib.suppress(OSError, ValueError, struct.error), file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
            first = _META.unpack_from(data)
            second = _META.unpack_from(data, first[4])
            if first[:2] == second[:2] == (MAGIC, FORMAT):
                self._data, self._page_bytes = data, first[4]
                self._names = max(first, second, key=lambda meta: int(meta[-1]))[-2]

    def get(self, database: bytes, key: bytes) -> bytes | None:
        """Value of a key in a named database; None if missing, or if a page on the path to it is damaged."""
        try:
            described = self._find(self._names, database)
            return described and self._find(_ROOT.unpack_from(described, _ROOT_OFFSET)[0], key)
        except (struct.error, OverflowError):
            return None

    def _find(self, page: int, key: bytes) -> bytes | None:
        data = self._data
        for _ in range(_MAX_DEPTH):
            start = page * self._page_bytes
            flags, lower = _PAGE.unpack_from(data, start)
            # Finds the last key <= `key`. The first key of a branch page is implicit: lower than all others.
            low, high = (0 if flags & _LEAF else 1), (lower - 16) // 2
            while low < high:
                middle = (low + high) // 2
                node = start + _NUMBER.unpack_from(data, start + 16 + 2 * middle)[0]
                if data[node + 8 : node + 8 + _NODE.unpack_from(data, node)[3]] <= key:
                    low = middle + 1
                else:
                    high = middle
            if not low:
                return None
            node = start + _NUMBER.unpack_from(data, start + 14 + 2 * low)[0]
            short, long, more, length = _NODE.unpack_from(data, node)
            if not flags & _LEAF:
                page = short | long << 16 | more << 32
                continue
            size, at = short | long << 16, node + 8 + length
            if data[node + 8 : at] != key or size > _MAX_VALUE_BYTES:
                return None
            if more & _BIG:
                at = _ROOT.unpack_from(data, at)[0] * self._page_bytes + 16
            return data[at : at + size]
        return None
