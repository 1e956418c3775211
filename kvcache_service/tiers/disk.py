"""The disk tier: entries in flat segment files, each at a multiple of 4096, and their index in LMDB.

Order of a write: bytes into the segment file, then the index record, then the caller is told. A process that is
killed in between leaves bytes that no record names, which the next start sees as free space. Space is given to a new
entry only after the old one's record is gone.

With `sync` both steps are flushed to the device. Without it they are in the kernel when a Put is acknowledged:
kill -9 loses nothing, but after a crash of the machine the index may be torn, so it is not used then (`_trusted`).
"""

import contextlib
import errno
import fcntl
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fusionkv.kvcache_service.index import heat as heats
from fusionkv.kvcache_service.index.record import Record, decode
from fusionkv.kvcache_service.tiers.base import Place, Recovered, Tier, Unreachable
from fusionkv.kvcache_service.tiers.disk_index import DiskIndex, sync_directory
from fusionkv.kvcache_service.tiers.extents import Extents
from fusionkv.kvcache_service.tiers.index_reader import IndexReader
from fusionkv.kvcache_service.tiers.index_rewrite import HEATS, RECORDS
from fusionkv.protos.runtime.checksum import Checksum

log = logging.getLogger(__name__)

# A segment bounds an entry. Its offsets fit the 2 GiB that one preadv moves at most.
SEGMENT_BYTES = 1 << 30
_READ_BYTES = 1 << 20
_MARK_BYTES = 64
# Why a file can't be opened now, which says nothing about what is in it.
_FOR_NOW = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DiskTier(Tier):
    """Segment files `segments/<n>.kv` below `directory`, written and read with pwritev and pread."""

    name = "disk"
    blocking = True
    readable = True
    """Whether the files hold the entries' bytes as they are."""

    def __init__(self, directory: Path, capacity_bytes: int, *, sync: bool = False) -> None:
        """Opens or makes the tier.

        Raises:
            OSError: the directory can't be used, or another process uses it.
        """
        super().__init__(Extents(capacity_bytes, SEGMENT_BYTES))
        self._directory = directory
        self._sync = sync
        (directory / "segments").mkdir(parents=True, exist_ok=True)
        self._lock = _lock(directory / "lock")
        self._files: dict[int, int] = {}  # segment -> file descriptor

    @cached_property
    def _ledger(self) -> DiskIndex:
        """The index, checked and opened by the first use. It starts empty if it can't be used.

        Raises:
            OSError: a later version wrote it: then nothing is changed.
        """
        trusted = self._trusted()
        if not trusted:
            log.warning(
                "%s was in use when the machine stopped, without sync: the disk tier starts empty", self._directory
            )
        # The index of the smallest entries with long paths is about as large as they are; the map is only an
        # address range, the file grows with use.
        map_bytes = (64 << 20) + self.capacity_bytes
        return DiskIndex(
            self._directory / "index", map_bytes, self._sync, anew=not trusted, first=lambda: self._mark(_boot_id())
        )

    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        file, offset = self._at(place, at)
        pieces = [piece for piece in data if len(piece)]
        while pieces:
            written = os.pwritev(file, pieces, offset)
            offset += written
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if written:
                pieces[0] = pieces[0][written:]

    def read(self, place: Place, at: int, size: int) -> memoryview:
        file, offset = self._at(place, at)
        data = os.pread(file, size, offset)
        if len(data) != size:
            raise OSError(f"segment {offset // SEGMENT_BYTES} of {self._directory} is truncated")
        return memoryview(data)

    def commit(self, record: Record, place: Place, heat: float) -> None:
        if self._sync:
            os.fdatasync(self._at(place, 0)[0])
        self._ledger.put([(record, place.offset, heat)])

    def forget(self, entries: Sequence[tuple[bytes, Place]]) -> None:
        self._ledger.delete([(key, place.offset) for key, place in entries])

    def save_heat(self, heats: Sequence[tuple[bytes, float]]) -> None:
        self._ledger.save_heat(heats)

    def recover(self) -> Iterator[Recovered]:
        """What the index names and the segment files hold. The rest of the index is deleted.

        Bytes are not read here (a start takes seconds, not minutes; every read verifies them), except where two
        records claim the same bytes: there only one whose checksum agrees stays. The index is read twice, first for
        the places alone, so that ten million records never are in memory together.
        """
        lengths = {int(p.stem): p.stat().st_size for p in (self._directory / "segments").glob("*.kv")}
        found: list[array[int]] = [array("q"), array("q")]
        for offset, size in self._ledger.places():
            if offset % SEGMENT_BYTES + size > lengths.get(offset // SEGMENT_BYTES, 0):
                offset = -1
            found[0].append(offset)
            found[1].append(size)
        starts, sizes = (np.array(column, np.int64) for column in found)
        good = self._extents.fit(starts, sizes)
        self._drop_false_claims(starts, sizes, good)
        self._extents.restore(starts[good], sizes[good])
        # 30 bytes a record that the index, which grows from here on, can have.
        del found, starts, sizes
        bad: list[tuple[bytes, int]] = []
        for keep, (key, known, heat) in zip(good, self._ledger.load(), strict=True):
            if keep and known is not None:
                yield Recovered(known[0], Place(known[1], known[0].size), heat)
            else:
                bad.append((key, -1 if known is None else known[1]))
        if bad:
            log.warning(
                "%d of %d entries in %s are damaged or out of its bounds and dropped",
                len(bad),
                len(good),
                self._directory,
            )
            # Where that can't be written down, the same are dropped at the next start.
            try:
                self._ledger.delete(bad)
            except OSError as error:
                log.warning("can't drop them from the index: %s", error)

    def finder(self) -> Callable[[bytes], Recovered | None]:
        """As `recover` would, but for two records that claim the same bytes: there both are found."""
        if not self._trusted():
            return super().finder()
        reader = IndexReader(self._directory / "index" / "data.mdb")

        def find(key: bytes) -> Recovered | None:
            value = reader.get(RECORDS, key)
            try:
                record, offset = decode(key, value or b"")
                segment, at = divmod(offset, SEGMENT_BYTES)
                whole = at + record.size <= self._path(segment, "kv").stat().st_size
            except (ValueError, OSError):
                return None
            if not whole or not self._extents.fit(np.array([offset]), np.array([record.size])).all():
                return None
            return Recovered(record, Place(offset, record.size), heats.stored(reader.get(HEATS, key)))

        return find

    def extent(self, place: Place) -> tuple[int, int]:
        """Number of the segment that a place is in, and the offset in its file."""
        return divmod(place.offset, SEGMENT_BYTES)

    def open_segment(self, segment: int) -> int:
        """A new read-only descriptor of a segment's file. Raises OSError when there is no such file."""
        return os.open(self._path(segment, "kv"), os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        for file in self._files.values():
            os.fsync(file)
            os.close(file)
        self._files.clear()
        if "_ledger" in self.__dict__:
            self._ledger.close()
            self._mark("")
        os.close(self._lock)

    def check_integrity(self, held: Mapping[Place, bytes | None]) -> None:
        super().check_integrity(held)
        recorded = {}
        for key, known, _ in self._ledger.load():
            assert known is not None, f"record {key.hex()} is unreadable"
            recorded[Place(known[1], known[0].size)] = key
        assert recorded == {place: key for place, key in held.items() if key is not None}, "index and store disagree"

    def _drop_false_claims(
        self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], good: npt.NDArray[np.bool_]
    ) -> None:
        """Of places that overlap only those stay `good` whose bytes have their record's checksum, the first first."""
        order = np.flatnonzero(good)
        order = order[np.argsort(starts[order], kind="stable")]
        ends = np.maximum.accumulate((starts + sizes)[order])
        meet = np.flatnonzero(starts[order][1:] < ends[:-1])
        if not len(meet):
            return
        doubtful = set(order[np.unique(np.concatenate([meet, meet + 1]))].tolist())
        for number, (_, known, _) in enumerate(self._ledger.load()):
            if number in doubtful:
                good[number] = known is not None and self._intact(known[0], known[1])
        kept_end = 0
        for number in order[good[order]].tolist():
            if starts[number] < kept_end:
                good[number] = False
            else:
                kept_end = int(starts[number] + sizes[number])

    def _intact(self, record: Record, offset: int) -> bool:
        hasher, place = Checksum(), Place(offset, record.size)
        with contextlib.suppress(OSError):
            for at in range(0, place.size, _READ_BYTES):
                hasher.update(self.read(place, at, min(_READ_BYTES, place.size - at)))
        return hasher.digest() == record.checksum

    def _at(self, place: Place, at: int) -> tuple[int, int]:
        """File descriptor and offset within the file of a byte of a place."""
        segment, offset = divmod(place.offset, SEGMENT_BYTES)
        return self._file(self._files, segment, "kv"), offset + at

    def _file(self, files: dict[int, int], segment: int, ending: str) -> int:
        """The descriptor of a segment's file, opened or made on first use.

        Raises:
            Unreachable: it can't be opened now, since no descriptor is left, for one.
            OSError: it can't be opened.
        """
        file = files.get(segment)
        if file is None:
            path = self._path(segment, ending)
            try:
                file = _made(path)
            except OSError as error:
                if error.errno in _FOR_NOW:
                    raise Unreachable(f"can't open {path}: {error.strerror}") from error
                raise
            # Two threads may get here at once: the first one's descriptor is used, the other's is closed.
            if files.setdefault(segment, file) != file:
                os.close(file)
                file = files[segment]
        return file

    def _path(self, segment: int, ending: str) -> Path:
        return self._directory / "segments" / f"{segment:06d}.{ending}"

    def _trusted(self) -> bool:
        """Whether the index is whole: the tier was closed, or flushed all it wrote, or the machine has not restarted.

        A kernel that goes on running writes everything that a killed process gave it; one that crashed may have
        written any part of it, in any order.
        """
        mark = self._directory / "boot"
        was = mark.read_text().strip() if mark.exists() else ""
        return was in ("", "sync", _boot_id())

    def _mark(self, text: str) -> None:
        """Notes on the device who uses the tier: a boot of the machine, one that syncs, or nobody.

        Always as many bytes, written over those before, since a full device takes these and no others. A mark that is
        torn is no boot of the machine, so what it stands for is not trusted.
        """
        file = os.open(self._directory / "boot", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, ("sync" if text and self._sync else text).ljust(_MARK_BYTES).encode(), 0)
            os.fsync(file)
        finally:
            os.close(file)
        sync_directory(self._directory)


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"


def _made(path: Path) -> int:
    """A descriptor of a file that is there, or is made and survives a crash of the machine."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        sync_directory(path.parent)
    except OSError:
        os.close(file)
        raise
    return file


def _lock(path: Path) -> int:
    """Takes the directory for this process, until it ends."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(file, 32, 0).decode(errors="replace").strip()
        os.close(file)
        raise OSError(
            f"{path.parent} is in use by process {owner or 'unknown'}: give each cache service a data_dir of its own"
        ) from None
    # Over what stands there: a full device has room for no more, and who the owner is is said for people alone.
    with contextlib.suppress(OSError):
        os.pwrite(file, f"{os.getpid()}\n".ljust(32).encode(), 0)
    return file
