"""The disk tier: entries in segment files, aligned to 4096 bytes, with an index in LMDB.

A write stores the bytes in the segment file, then the index record, then acknowledges. A process killed in between
leaves bytes without a record, which are free space at the next start. Space is reused only after the old record was
deleted.

With `sync`, both steps are flushed to the device. Without it, they are in the page cache when a Put is acknowledged:
kill -9 loses nothing, but a crash of the machine may leave a torn index, which is then discarded (`BootMark`).
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.tiers.base import Place, Recovered, Tier
from fusionkv.kvcache_service.tiers.boot_mark import BootMark
from fusionkv.kvcache_service.tiers.disk_index import DiskIndex
from fusionkv.kvcache_service.tiers.segments import SEGMENT_BYTES, SegmentFiles
from fusionkv.protos.runtime.process import data_folder

log = logging.getLogger(__name__)


class DiskTier(Tier):
    """Stores entries in segment files `segments/<n>.kv` of a directory, by pwritev and pread."""

    name = "disk"
    blocking = True
    readable = True
    """Whether segment files contain entries' bytes unencrypted."""

    def __init__(self, directory: Path, capacity_bytes: int, *, sync: bool = False) -> None:
        """Opens or creates the tier. Raises OSError if the directory cannot be used, or another process uses it."""
        super().__init__(capacity_bytes, SEGMENT_BYTES)
        self._directory = directory
        self._sync = sync
        data_folder(directory, "lock", "boot", "index/data.mdb")
        self.segments = SegmentFiles(directory / "segments")
        self._lock = _lock(directory / "lock")
        self._boot_mark = BootMark(directory / "boot", sync)

    def check_integrity(self, held: Mapping[Place, bytes | None]) -> None:
        """As `Extents.check_integrity`, and that the index has a record of each place with a key, and no other."""
        super().check_integrity(held)
        recorded = {}
        for key, entry, _ in self._index.load():
            assert entry is not None, f"record {key.hex()} is unreadable"
            record, offset = entry
            recorded[Place(offset, record.size)] = key
        assert recorded == {place: key for place, key in held.items() if key is not None}, "index and store disagree"

    @cached_property
    def _index(self) -> DiskIndex:
        """The index, checked and opened on first use; empty if the one on disk cannot be used.

        Raises OSError if it was written by a later version; nothing was changed then.
        """
        trusted = self._boot_mark.trusted()
        if not trusted:
            log.warning(
                "%s was in use when the machine stopped, without sync: the disk tier starts empty", self._directory
            )
        # For the smallest entries with long paths, the index is about as large as their bytes. If the capacity was
        # larger, what is beyond is deleted, which writes pages anew. The map only reserves address space: the file
        # grows with use.
        directory = self._directory / "index"
        present = sum(file.stat().st_size for file in directory.glob("*.mdb"))
        map_bytes = (64 << 20) + self.capacity_bytes + 2 * present
        changing = self._boot_mark.in_use
        return DiskIndex(directory, map_bytes, self._sync, discard=not trusted, before_change=changing)

    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        self.segments.write(place, at, data)

    def read(self, place: Place, at: int, size: int) -> memoryview:
        return self.segments.read(place, at, size)

    def commit(self, record: EntryRecord, place: Place, heat: float) -> None:
        if self._sync:
            self.segments.sync(place)
        self._index.put([(record, place.offset, heat)])

    def forget(self, entries: Sequence[tuple[bytes, Place]]) -> None:
        self._index.delete([(key, place.offset) for key, place in entries])

    def save_heat(self, heats: Sequence[tuple[bytes, float]]) -> None:
        self._index.save_heat(heats)

    def recover(self) -> Iterator[Recovered]:
        """Yields the entries whose record is valid and whose place lies within the segment files; deletes the rest.

        Segment files beyond the capacity, which was larger then, are shortened or removed.

        Bytes are not read, since every read verifies them. The index is read twice, at first only for the places, to
        bound memory.
        """
        lengths = self.segments.lengths()
        places = (
            (offset if offset % SEGMENT_BYTES + size <= lengths.get(offset // SEGMENT_BYTES, 0) else -1, size)
            for offset, size in self._index.places()
        )
        starts, sizes = np.fromiter(places, np.dtype((np.int64, 2))).T
        good = self.fit(starts, sizes)
        self.restore(starts[good], sizes[good])
        # Frees 30 bytes per record before the in-memory index grows.
        del starts, sizes
        bad: list[tuple[bytes, int]] = []
        for keep, (key, entry, heat) in zip(good, self._index.load(), strict=True):
            record, offset = entry or (None, -1)
            if keep and record is not None:
                yield Recovered(record, Place(offset, record.size), heat)
            else:
                bad.append((key, offset))
        if bad:
            log.warning(
                "%d of %d entries in %s are damaged or out of bounds and dropped",
                len(bad),
                len(good),
                self._directory,
            )
            # If this fails, the next start drops the same entries.
            try:
                self._index.delete(bad)
            except OSError as error:
                log.warning("can't delete damaged entries from the index: %s", error)
        for segment, length in lengths.items():
            left = max(0, self.capacity_bytes - segment * SEGMENT_BYTES)
            if length > left:
                try:
                    self.segments.cut(segment, left)
                except OSError as error:
                    log.warning("segment %d of %s keeps its %d bytes: %s", segment, self._directory, length, error)

    def close(self) -> None:
        self.segments.close()
        if "_index" in self.__dict__:
            self._index.close()
            self._boot_mark.closed()
        os.close(self._lock)


def readable_files(tiers: Sequence[Tier]) -> DiskTier | None:
    """The disk tier, if there is one and its files are not encrypted."""
    return next((tier for tier in tiers if isinstance(tier, DiskTier) and tier.readable), None)


def _lock(path: Path) -> int:
    """Locks the directory until the descriptor returned is closed, or this process ends."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(file, 32, 0).decode(errors="replace").strip()
        os.close(file)
        raise OSError(
            f"{path.parent} is in use by process {owner or 'unknown'}: give each cache service a data_dir of its own"
        ) from None
    # Written in place, which works on a full device. The process id is only for error messages.
    with contextlib.suppress(OSError):
        os.pwrite(file, f"{os.getpid()}\n".ljust(32).encode(), 0)
    return file
