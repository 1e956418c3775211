"""Whether an LMDB database is whole, found out by a process of its own: directory, bytes of its map, most seconds.

LMDB trusts what it reads: a page that was damaged on the disk may end the process that meets it, by SIGABRT or SIGBUS
(10 of 35 databases with three pages of zeros did). So this one meets all of them first.
"""

import contextlib
import signal
import sys

import lmdb

from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.tiers import ledger_pages

DAMAGED, LATER = 3, 4
RECORDS, HEATS = b"records", b"heat"
# These say what the machine lacks, and nothing about the bytes.
_NOT_DAMAGE = (lmdb.DiskError, lmdb.LockError, lmdb.MapFullError, lmdb.ReadersFullError, lmdb.ReadonlyError)
# Asks for so many free pages in a row that the list of them is read.
_PROBE_BYTES = 1 << 20
# More than any version has had: what is unknown is to be named, and not to look like damage.
_MOST_DATABASES = 16


class Later(Exception):
    """A later version of this program wrote the database."""


class _Undo(Exception):
    """Ends a transaction without a trace."""


def check(directory: str, map_bytes: int) -> None:
    """Reads every record of every database, and the list of free pages. Changes nothing.

    Raises:
        lmdb.Error: something can't be read, or does not fit together.
        Later: it is whole, as far as this version can tell, and holds what it does not know.
    """
    with contextlib.suppress(OSError):  # a broken sector, say, which LMDB meets by SIGBUS: that counts
        if ledger_pages.later(f"{directory}/data.mdb"):
            raise Later("its file is of a later format of LMDB")
        ledger_pages.check(f"{directory}/data.mdb")
    env = lmdb.open(directory, map_size=map_bytes, max_dbs=_MOST_DATABASES, sync=False, create=False)
    with env.begin() as txn:
        names = [name for name, _ in txn.cursor()]
    # Without the two that are known, a name is damaged.
    if {RECORDS, HEATS} < set(names):
        raise Later(f"it has {len(names)} databases, and this version knows two")
    databases = [env.open_db(name, create=False) for name in names]
    with env.begin() as txn:
        for database in databases:
            for key, value in txn.cursor(db=database):
                if not 0 < len(key) <= env.max_key_size():
                    raise lmdb.CorruptedError(f"a key of {len(key)} bytes")
                if record.later(key, value):
                    raise Later(f"it has records of version {value[0]}, and this version reads up to {record.NEWEST}")
    try:
        with env.begin(write=True) as txn:
            for database in databases:
                txn.put(b"probe", bytes(_PROBE_BYTES), db=database)
            raise _Undo
    except _Undo:
        pass
    env.close()


def main() -> None:
    signal.alarm(int(sys.argv[3]))  # what takes longer goes round in circles
    try:
        check(sys.argv[1], int(sys.argv[2]))
    except Later as error:
        print(error)
        sys.exit(LATER)
    except _NOT_DAMAGE:
        pass
    except lmdb.Error as error:
        # Without a class of its own it is what the system said (no permission, say), but for one.
        if type(error) is not lmdb.Error or "data format" in str(error):
            print(error)
            sys.exit(DAMAGED)


if __name__ == "__main__":
    main()
