"""Writes an LMDB database anew, as a process of its own: its directory, the new one, bytes of the map, most seconds.

LMDB trusts what it reads. A page that was damaged on the disk may end the process that meets it, by SIGABRT or
SIGBUS (10 of 35 databases with three pages of zeros did). A wrong number in the list of free pages lets what is
written later land on a page that is in use. So this process meets all entries first, and writes them to other pages.
"""

import os
import signal
import struct
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lmdb

from fusionkv.kvcache_service.index import record
from fusionkv.protos.runtime import process

DAMAGED, LATER = 3, 4
RECORDS, HEATS = b"records", b"heat"
# These say what the machine lacks, and nothing about the bytes.
_NOT_DAMAGE = (lmdb.DiskError, lmdb.LockError, lmdb.MapFullError, lmdb.ReadersFullError, lmdb.ReadonlyError)
# More than any version has had: what is unknown is to be named, and not to look like damage.
_MOST_DATABASES = 16
# Entries of a transaction, whose pages are in memory until it ends.
_TOGETHER = 100_000
# Behind a page's head: what LMDB is known by, the format of its file, an address, a size; and the bytes of a page,
# which say where the second such page is.
_META = struct.Struct("=16xIIQQI")
MAGIC, FORMAT = 0xBEEFC0DE, 1


class Later(Exception):
    """A later version of this program wrote the database."""


def rewrite(directory: str, new: str, map_bytes: int) -> None:
    """Copies every entry of every database, in the order of their keys.

    Raises:
        lmdb.Error: something can't be read, or does not fit together.
        Later: the database holds what this version does not know.
    """
    if _later_format(f"{directory}/data.mdb"):
        raise Later("its file is of a later format of LMDB")
    old = lmdb.open(directory, map_size=map_bytes, max_dbs=_MOST_DATABASES, readonly=True, lock=False, create=False)
    with old.begin() as txn:
        names = [name for name, _ in txn.cursor()]
    # Without the two that are known, a name is damaged.
    if {RECORDS, HEATS} < set(names):
        raise Later(f"it has {len(names)} databases, and this version knows two")
    # A lock file is written through a map, which ends the process (SIGBUS) on a device that is full.
    made = lmdb.open(new, map_size=map_bytes, max_dbs=_MOST_DATABASES, sync=False, lock=False)
    for name in names:
        database = old.open_db(name, create=False)
        with old.begin() as txn:
            _copy(txn, database, made, made.open_db(name))
    made.sync(True)
    made.close()
    old.close()


def _copy(txn: Any, database: Any, made: Any, into: Any) -> None:
    entries, copied = _known(txn, database), 0
    while True:
        with made.begin(write=True, db=into) as writing, writing.cursor() as cursor:
            consumed, added = cursor.putmulti(islice(entries, _TOGETHER), append=True)
        copied += added
        if consumed < _TOGETHER:
            break
    # A key that is not above the one before it is not added.
    if copied != (expected := txn.stat(database)["entries"]):
        raise lmdb.CorruptedError(f"{copied} of {expected} entries are in order")


def _known(txn: Any, database: Any) -> Iterator[tuple[bytes, bytes]]:
    for key, value in txn.cursor(db=database):
        if record.later(key, value):
            raise Later(f"it has records of version {value[0]}, and this version reads up to {record.NEWEST}")
        yield key, value


def _later_format(path: str) -> bool:
    """Whether both pages that say what the file is name one later format."""
    with open(path, "rb") as file:
        first = file.read(_META.size)
        if len(first) < _META.size:
            return False
        file.seek(_META.unpack(first)[-1])
        second = file.read(_META.size)
    if len(second) < _META.size:
        return False
    magic, form, *_ = _META.unpack(first)
    return (magic, form) == _META.unpack(second)[:2] and magic == MAGIC and form > FORMAT


def main() -> None:
    process.end_with_parent()  # or two such processes might write one file after a kill -9
    signal.alarm(int(sys.argv[4]))  # what takes longer goes round in circles
    try:
        rewrite(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except Later as error:
        print(error)
        sys.exit(LATER)
    except (*_NOT_DAMAGE, OSError) as error:
        print(error)
        sys.exit(os.EX_TEMPFAIL)
    except lmdb.Error as error:
        # Without a class of its own it is what the system said (no permission, say), but for one.
        damaged = type(error) is not lmdb.Error or "data format" in str(error)
        print(error)
        sys.exit(DAMAGED if damaged else os.EX_TEMPFAIL)


if __name__ == "__main__":
    main()
