"""Checks the LMDB file of the disk tier's index, which may be damaged, in a process of its own.

LMDB does not validate pages. A damaged page may terminate the process by SIGABRT or SIGBUS (10 of 35 databases with
three zeroed pages did), and a wrong number in the list of free pages makes later writes overwrite pages in use. So a
separate process reads all entries first, in 2 s per million, and copies them to new pages. Its arguments are source
and target.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lmdb

from fusionkv.kvcache_service.index import record
from fusionkv.protos.runtime import process

DAMAGED, LATER = 3, 4
RECORDS, HEATS = b"records", b"heat"
# Errors of the environment, which do not indicate damage.
_NOT_DAMAGE = (lmdb.DiskError, lmdb.LockError, lmdb.MapFullError, lmdb.ReadersFullError, lmdb.ReadonlyError)


class LaterVersion(Exception):
    """The database contains something of a later version of this program."""


def rewrite(directory: str, new: str) -> None:
    """Reads every entry, in key order, and copies the database.

    Raises lmdb.Error if something cannot be read, or is inconsistent; LaterVersion if a later version wrote it.
    """
    with lmdb.open(directory, max_dbs=2, readonly=True, lock=False, create=False) as env:
        for name in (RECORDS, HEATS):
            database = env.open_db(name, create=False)
            with env.begin() as txn:
                _check(txn, database)
        os.makedirs(new)
        env.copy(new, compact=True)
    with Path(new, "data.mdb").open("rb") as copy:
        os.fsync(copy.fileno())


def _check(txn: Any, database: Any) -> None:
    count, last = 0, b""
    for key, value in txn.cursor(db=database):
        if record.is_later(key, value):
            raise LaterVersion(f"it has records of version {value[0]}, and this version reads up to {record.NEWEST}")
        if key <= last:
            raise lmdb.CorruptedError("entries are out of order")
        count, last = count + 1, key
    if count != (expected := txn.stat(database)["entries"]):
        raise lmdb.CorruptedError(f"{count} of {expected} entries are there")


def main() -> None:
    process.end_with_parent()
    try:
        rewrite(*sys.argv[1:])
    except LaterVersion as error:
        print(error)
        sys.exit(LATER)
    except (*_NOT_DAMAGE, OSError) as error:
        print(error)
        sys.exit(os.EX_TEMPFAIL)
    except lmdb.Error as error:
        print(error)
        if type(error) is not lmdb.Error:
            sys.exit(DAMAGED)
        # Otherwise an error of the system (no permission, for example), with one exception.
        sys.exit(LATER if "data format" in str(error) else os.EX_TEMPFAIL)


if __name__ == "__main__":
    main()
