"""The disk tier's index: records, places and heat of its entries in LMDB."""

import contextlib
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import lmdb

from fusionkv.kvcache_service.index import heat
from fusionkv.kvcache_service.index.record import Record, decode, encode, place
from fusionkv.kvcache_service.tiers.index_rewrite import DAMAGED, HEATS, LATER, RECORDS

log = logging.getLogger(__name__)

_FILE = "data.mdb"
_HEAT = struct.Struct("<d")
_REWRITE = ("-m", "fusionkv.kvcache_service.tiers.index_rewrite")
# How a process ends that met a damaged page. Others (SIGKILL, say) must not delete anything.
_BROKEN = {DAMAGED, *(-number for number in (signal.SIGABRT, signal.SIGALRM, signal.SIGBUS, signal.SIGSEGV))}
# Longer than a slow disk takes.
_REWRITE_SECONDS, _REWRITE_BYTES_A_SECOND = 60, 1 << 20


class DiskIndex:
    """Durable map from key to (record, offset, heat), one transaction a call, from any thread.

    Every method raises OSError when the database can't be read or written (the device is full, say).
    """

    def __init__(
        self,
        directory: Path,
        map_bytes: int,
        sync: bool,
        *,
        anew: bool = False,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens the database, written anew. It starts empty if it is damaged, or with `anew`; `first` runs before.

        Raises:
            OSError: it can't be opened, or a later version of this program wrote it: then nothing is changed.
        """
        self._directory = directory
        new = directory.with_name(f"{directory.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        damage = _rewrite(directory, new, map_bytes)
        first()
        if damage and not anew:
            log.error("the index in %s is unreadable (%s): the disk tier starts empty", directory, damage)
        if damage or anew:
            shutil.rmtree(directory, ignore_errors=anew)
        elif (file := new / _FILE).exists():
            file.replace(directory / _FILE)
            if sync:  # or a crash of the machine might bring the old file back, without what is put from now on
                sync_directory(directory)
        shutil.rmtree(new, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._env = lmdb.open(str(directory), map_size=map_bytes, max_dbs=2, sync=sync, metasync=sync)
            self._records = self._env.open_db(RECORDS)
            self._heats = self._env.open_db(HEATS)

    def put(self, entries: Iterable[tuple[Record, int, float]]) -> None:
        with self._errors(), self._env.begin(write=True) as txn:
            for record, offset, warmth in entries:
                txn.put(record.key, encode(record, offset), db=self._records)
                txn.put(record.key, _HEAT.pack(warmth), db=self._heats)

    def delete(self, entries: Sequence[tuple[bytes, int]]) -> None:
        """Deletes keys that are recorded at the given offset still, or that are unreadable."""
        with self._errors(), self._env.begin(write=True) as txn:
            for key, offset in entries:
                value = txn.get(key, db=self._records)
                if value is not None and _offset(key, value) in (offset, None):
                    txn.delete(key, db=self._records)
                    txn.delete(key, db=self._heats)

    def save_heat(self, heats: Sequence[tuple[bytes, float]]) -> None:
        """Notes the heat of those keys that are recorded."""
        with self._errors(), self._env.begin(write=True) as txn:
            for key, warmth in heats:
                if txn.get(key, db=self._records) is not None:
                    txn.put(key, _HEAT.pack(warmth), db=self._heats)

    def load(self) -> Iterator[tuple[bytes, tuple[Record, int] | None, float]]:
        """Key, (record, offset) or None where it is unreadable, and heat (0 when there is none)."""
        with self._errors(), self._env.begin() as txn:
            for key, value in txn.cursor(db=self._records):
                warmth = heat.stored(txn.get(key, db=self._heats))
                try:
                    known = decode(key, value)
                except ValueError:
                    known = None
                yield key, known, warmth

    def places(self) -> Iterator[tuple[int, int]]:
        """Offset and size of each record, in the order of `load`; (-1, 0) for an unreadable one."""
        with self._errors(), self._env.begin() as txn:
            for key, value in txn.cursor(db=self._records):
                yield place(key, value) or (-1, 0)

    def close(self) -> None:
        with self._errors():
            self._env.sync(True)
            self._env.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise OSError(f"the index in {self._directory}: {error}") from error


def _rewrite(directory: Path, new: Path, map_bytes: int) -> str:
    """What is wrong with the database, as another process found it, which may have ended of it; empty if nothing.

    Then the database is in `new` as well, unless the machine has no room for it: then it is used as it is.

    Raises:
        OSError: a later version of this program wrote it.
    """
    file = directory / _FILE
    if not file.exists() or not file.stat().st_size:
        return ""
    limit = _REWRITE_SECONDS + file.stat().st_size // _REWRITE_BYTES_A_SECOND
    argv = [sys.executable, "-P", *_REWRITE, str(directory), str(new), str(map_bytes), str(limit)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    said = done.stdout.strip()
    if done.returncode:
        shutil.rmtree(new, ignore_errors=True)
    if done.returncode == LATER:
        raise OSError(
            f"the index in {directory} was written by a later version of FusionKV ({said}): start that version "
            "again, or give this one a data_dir of its own"
        )
    if done.returncode in _BROKEN:
        return said or f"reading it ends a process with {signal.Signals(-done.returncode).name}"
    if done.returncode:
        log.warning("the index in %s was not checked: %s", directory, said or done.stderr.strip()[-500:])
    return ""


def sync_directory(path: Path) -> None:
    """Makes new names in a directory survive a crash of the machine."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _offset(key: bytes, value: bytes) -> int | None:
    known = place(key, value)
    return None if known is None else known[0]
