"""A process that checks an LMDB database by copying it: arguments are source, target, map bytes and time limit (s).

LMDB does not validate pages. A damaged page may terminate the process by SIGABRT or SIGBUS (10 of 35 databases with
three zeroed pages did), and a wrong number in the list of free pages makes later writes overwrite pages in use. So a
separate process reads all entries first, and writes them to new pages.
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
# Errors of the environment, which do not indicate damage.
_NOT_DAMAGE = (lmdb.DiskError, lmdb.LockError, lmdb.MapFullError, lmdb.ReadersFullError, lmdb.ReadonlyError)
# More than any version has had, so that an unknown database is reported, not taken for damage.
_MAX_DATABASES = 16
# Entries per transaction, whose pages stay in memory until it ends.
_BATCH = 100_000
# Meta page after the page header: magic, format, address, map size, and page size, which is the offset of the second
# meta page.
_META = struct.Struct("=16xIIQQI")
MAGIC, FORMAT = 0xBEEFC0DE, 1


class Later(Exception):
    """The database was written by a later version of this program."""


def rewrite(directory: str, new: str, map_bytes: int) -> None:
    """Copies every entry of every named database, in key order.

    Raises:
        lmdb.Error: Something cannot be read, or is inconsistent.
        Later: The database contains something that this version does not know.
    """
    if _later_format(f"{directory}/data.mdb"):
        raise Later("its file is of a later format of LMDB")
    old = lmdb.open(directory, map_size=map_bytes, max_dbs=_MAX_DATABASES, readonly=True, lock=False, create=False)
    with old.begin() as txn:
        names = [name for name, _ in txn.cursor()]
    # If one of the two known databases is missing, the names are damaged.
    if {RECORDS, HEATS} < set(names):
        raise Later(f"it has {len(names)} databases, and this version knows two")
    os.makedirs(new, exist_ok=True)
    # Without a lock file: it is written through a map, which raises SIGBUS on a full device.
    made = lmdb.open(new, map_size=map_bytes, max_dbs=_MAX_DATABASES, sync=False, lock=False)
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
            consumed, added = cursor.putmulti(islice(entries, _BATCH), append=True)
        copied += added
        if consumed < _BATCH:
            break
    # With `append`, keys that are out of order are not added.
    if copied != (expected := txn.stat(database)["entries"]):
        raise lmdb.CorruptedError(f"{copied} of {expected} entries are in order")


def _known(txn: Any, database: Any) -> Iterator[tuple[bytes, bytes]]:
    for key, value in txn.cursor(db=database):
        if record.later(key, value):
            raise Later(f"it has records of version {value[0]}, and this version reads up to {record.NEWEST}")
        yield key, value


def _later_format(path: str) -> bool:
    """Whether both meta pages name the same later format."""
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
    process.end_with_parent()
    signal.alarm(int(sys.argv[4]))  # a damaged tree may contain a cycle
    try:
        rewrite(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except Later as error:
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
