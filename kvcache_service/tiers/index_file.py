"""The LMDB file of the disk tier's index, which may be damaged: a process that checks it, and a lookup without check.

LMDB does not validate pages. A damaged page may terminate the process by SIGABRT or SIGBUS (10 of 35 databases with
three zeroed pages did), and a wrong number in the list of free pages makes later writes overwrite pages in use. So a
separate process reads all entries first, and writes them to new pages. Its arguments are source, target, map bytes
and limit of CPU seconds. Meanwhile, `IndexReader` finds single entries: a check takes 2 s per million entries.

The file layout is that of `mdb.c` in LMDB 0.9 (`MDB_meta`, `MDB_page`, `MDB_node`, `MDB_db`), in native byte order.
"""

import contextlib
import mmap
import os
import signal
import struct
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from fusionkv.kvcache_service.index import record
from fusionkv.protos.runtime import process

DAMAGED, LATER = 3, 4
RECORDS, HEATS = b"records", b"heat"
# Errors of the environment, which do not indicate damage.
_NOT_DAMAGE = (lmdb.DiskError, lmdb.LockError, lmdb.MapFullError, lmdb.ReadersFullError, lmdb.ReadonlyError)
# More than any version has had, so that an unknown database is reported, not taken for damage.
_MAX_DATABASES = 16
# Entries per transaction, whose pages stay in memory until it ends.
_BATCH = 100_000
# Each of the two meta pages: magic, format, address, map size, page size, root page of the names, transaction.
_META = struct.Struct("=16xIIQQI44x40xQ8xQ")
_MAGIC, _FORMAT = 0xBEEFC0DE, 1
_PAGE, _NODE, _NUMBER = struct.Struct("=10xHHxx"), struct.Struct("=HHHH"), struct.Struct("=H")
_LEAF, _BIG = 2, 1
_ROOT_OFFSET, _ROOT = 40, struct.Struct("=Q")
# LMDB's own limit (CURSOR_STACK). A damaged tree may contain a cycle.
_MAX_DEPTH = 32
# Above the largest record: a path of 65,535 digests of 32 bytes.
_MAX_VALUE_BYTES = 4 << 20


class LaterVersion(Exception):
    """The database contains something of a later version of this program."""


def rewrite(directory: str, new: str, map_bytes: int) -> None:
    """Copies every entry of every named database, in key order.

    Raises lmdb.Error if something cannot be read, or is inconsistent; LaterVersion if a later version wrote it.
    """
    with contextlib.suppress(struct.error):
        first, second = _metas(Path(directory, "data.mdb"))
        if first[:2] == second[:2] and first[0] == _MAGIC and first[1] > _FORMAT:
            raise LaterVersion("its file is of a later format of LMDB")
    source = lmdb.open(directory, map_size=map_bytes, max_dbs=_MAX_DATABASES, readonly=True, lock=False, create=False)
    with source.begin() as txn:
        names = [name for name, _ in txn.cursor()]
    # If one of the two known databases is missing, the names are damaged.
    if {RECORDS, HEATS} < set(names):
        raise LaterVersion(f"it has {len(names)} databases, and this version knows two")
    os.makedirs(new, exist_ok=True)
    # Without a lock file: it is written through a map, which raises SIGBUS on a full device.
    target = lmdb.open(new, map_size=map_bytes, max_dbs=_MAX_DATABASES, sync=False, lock=False)
    for name in names:
        database = source.open_db(name, create=False)
        with source.begin() as txn:
            _copy(txn, database, target, target.open_db(name))
    target.sync(True)
    target.close()
    source.close()


def _copy(txn: Any, database: Any, target: Any, into: Any) -> None:
    entries, copied = _checked(txn, database), 0
    while True:
        with target.begin(write=True, db=into) as writing, writing.cursor() as cursor:
            consumed, added = cursor.putmulti(islice(entries, _BATCH), append=True)
        copied += added
        if consumed < _BATCH:
            break
    # With `append`, keys that are out of order are not added.
    if copied != (expected := txn.stat(database)["entries"]):
        raise lmdb.CorruptedError(f"{copied} of {expected} entries are in order")


def _checked(txn: Any, database: Any) -> Iterator[tuple[bytes, bytes]]:
    for key, value in txn.cursor(db=database):
        if record.is_later(key, value):
            raise LaterVersion(f"it has records of version {value[0]}, and this version reads up to {record.NEWEST}")
        yield key, value


def _metas(file: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The fields of both meta pages. Raises struct.error if the file is too short."""
    with file.open("rb") as opened:
        first = _META.unpack(opened.read(_META.size))
        opened.seek(first[4])  # the page size
        return first, _META.unpack(opened.read(_META.size))


class IndexReader:
    """The last committed state of an LMDB file, which must not be written to meanwhile. Damage is a miss."""

    def __init__(self, file: Path) -> None:
        """Opens the file. A file that is missing or of another format counts as empty."""
        self._data: mmap.mmap | bytes = b""
        self._page_bytes, self._names = 0, 0
        with contextlib.suppress(OSError, ValueError, struct.error), file.open("rb") as opened:
            first, second = _metas(file)
            if first[:2] == second[:2] == (_MAGIC, _FORMAT):
                self._data = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
                self._page_bytes = first[4]
                self._names = max(first, second, key=lambda meta: meta[-1])[-2]

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


def main() -> None:
    process.end_with_parent()
    # A damaged tree may contain a cycle. Not by the clock: a paused machine or a slow disk is no damage.
    signal.setitimer(signal.ITIMER_PROF, int(sys.argv[4]))
    try:
        rewrite(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except LaterVersion as error:
        print(error)
        sys.exit(LATER)
    except (*_NOT_DAMAGE, OSError) as error:
        print(error)
        sys.exit(os.EX_TEMPFAIL)
    except lmdb.Error as error:
        # Plain lmdb.Error is an error of the system (no permission, for example), with one exception.
        damaged = type(error) is not lmdb.Error or "data format" in str(error)
        print(error)
        sys.exit(DAMAGED if damaged else os.EX_TEMPFAIL)


if __name__ == "__main__":
    main()
