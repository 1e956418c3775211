"""The disk tier's persistent index: record, offset and heat by key, in LMDB."""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from fusionkv.kvcache_service.index.heat import decode as decode_heat
from fusionkv.kvcache_service.index.record import EntryRecord, decode, decode_place, encode
from fusionkv.kvcache_service.tiers.index_file import DAMAGED, HEATS, LATER, RECORDS
from fusionkv.protos.runtime import process

log = logging.getLogger(__name__)

_FILE = "data.mdb"
_HEAT = struct.Struct("<d")
# Exit statuses that prove damage. Others, such as SIGKILL, must not delete anything.
_BROKEN = {DAMAGED, *(-number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV))}


class DiskIndex:
    """Persistent map from key to (record, offset, heat); each call is one transaction. Thread-safe.

    Every method raises OSError if the database cannot be read or written, for example on a full device.
    """

    def __init__(
        self,
        directory: Path,
        map_bytes: int,
        sync: bool,
        *,
        discard: bool = False,
        before_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Checks, rewrites and opens the database, of at most `map_bytes`. A damaged one is discarded.

        Args:
            sync: Flush every transaction to the device.
            discard: Discard the content.
            before_change: Called before the first change, and after a discard. May be called by two threads at once.

        Raises:
            OSError: It cannot be opened, or was written by a later version. Nothing was changed.
        """
        self._directory = directory
        new = directory.with_name(f"{directory.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        # A directory of its own: the process of a service that was killed may still be writing to another.
        copy = new / secrets.token_hex(8)
        damage = _rewrite(directory, copy)
        if damage and not discard:
            log.error("the index in %s is unreadable (%s): the disk tier starts empty", directory, damage)
        if directory.exists() and (damage or discard):
            shutil.rmtree(directory)
        elif (file := copy / _FILE).exists():
            file.replace(directory / _FILE)
        shutil.rmtree(new, ignore_errors=True)
        if discard:
            # Not earlier: the next start would trust this index by the mark if this one were killed.
            before_change()
        self._before_change = None if discard else before_change
        directory.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._env = lmdb.open(str(directory), map_size=map_bytes, max_dbs=2, sync=sync, metasync=sync)
            self._records = self._env.open_db(RECORDS)
            self._heats = self._env.open_db(HEATS)
        # Otherwise a crash of the machine might restore the old file, without later entries, or leave none.
        for folder in (directory, directory.parent):
            sync_directory(folder)

    def put(self, entries: Iterable[tuple[EntryRecord, int, float]]) -> None:
        with self._changing() as txn:
            for record, offset, heat in entries:
                txn.put(record.key, encode(record, offset), db=self._records)
                txn.put(record.key, _HEAT.pack(heat), db=self._heats)

    def delete(self, entries: Sequence[tuple[bytes, int]]) -> None:
        """Deletes (key, offset) pairs whose record still has that offset, or is unreadable."""
        with self._changing() as txn:
            for key, offset in entries:
                value = txn.get(key, db=self._records)
                if value is not None and ((stored := decode_place(key, value)) is None or stored[0] == offset):
                    txn.delete(key, db=self._records)
                    txn.delete(key, db=self._heats)

    def save_heat(self, heats: Sequence[tuple[bytes, float]]) -> None:
        """Updates the heat of keys that have a record."""
        with self._changing() as txn:
            for key, heat in heats:
                if txn.get(key, db=self._records) is not None:
                    txn.put(key, _HEAT.pack(heat), db=self._heats)

    def load(self) -> Iterator[tuple[bytes, tuple[EntryRecord, int] | None, float]]:
        """Yields key, (record, offset) or None if unreadable, and heat (0 if missing)."""
        with self._errors(), self._env.begin() as txn:
            for key, value in txn.cursor(db=self._records):
                heat = decode_heat(txn.get(key, db=self._heats))
                try:
                    entry = decode(key, value)
                except ValueError:
                    entry = None
                yield key, entry, heat

    def places(self) -> Iterator[tuple[int, int]]:
        """Yields offset and size of each record, in the order of `load`; (-1, 0) if unreadable."""
        with self._errors(), self._env.begin() as txn:
            for key, value in txn.cursor(db=self._records):
                yield decode_place(key, value) or (-1, 0)

    def close(self) -> None:
        with self._errors():
            self._env.sync(True)
            self._env.close()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Any]:
        """A transaction that writes."""
        if (before_change := self._before_change) is not None:
            before_change()
            self._before_change = None
        with self._errors(), self._env.begin(write=True) as txn:
            yield txn

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise OSError(f"the index in {self._directory}: {error}") from error


def _rewrite(directory: Path, new: Path) -> str:
    """Checks the database in a subprocess, which LMDB may crash, and copies it to `new`, if there is room.

    Returns the damage found; empty if there is none. Raises OSError if a later version wrote the database.
    """
    file = directory / _FILE
    if not file.exists() or not file.stat().st_size:
        return ""
    argv = [sys.executable, "-P", "-m", "fusionkv.kvcache_service.tiers.index_file", str(directory), str(new)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    reason = done.stdout.strip()
    if done.returncode:
        shutil.rmtree(new, ignore_errors=True)
    ended = f"the process that reads it {process.how_ended(done.returncode)}"
    if done.returncode == LATER:
        raise OSError(
            f"the index in {directory} was written by a later version of FusionKV ({reason}): start that version "
            "again, or give this one a data_dir of its own"
        )
    if done.returncode in _BROKEN:
        return reason or ended
    if done.returncode:
        log.warning("the index in %s was not checked: %s", directory, reason or done.stderr.strip()[-500:] or ended)
    return ""


def sync_directory(path: Path) -> None:
    """Flushes a directory, for new files to survive a crash of the machine."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
