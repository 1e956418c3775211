"""The segment files of the disk tier: each holds 1 GiB of its bytes."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.kvcache_service.tiers.disk_index import sync_directory
from fusionkv.kvcache_service.tiers.extents import Place

# The maximum size of an entry, below the 2 GiB that one preadv transfers at most.
SEGMENT_BYTES = 1 << 30
# Transient reasons why a file cannot be opened: its content may be intact.
_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS}


class SegmentFiles:
    """Files `<n>.kv` of a directory, and others beside them with another ending. Thread-safe; raises OSError."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._files: dict[tuple[int, str], int] = {}  # (segment, ending) -> file descriptor

    def lengths(self) -> dict[int, int]:
        """Bytes of each segment that exists."""
        files = (path for path in self._directory.glob("*.kv") if path.stem.isdecimal() and path.is_file())
        return {int(path.stem): path.stat().st_size for path in files}

    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        file, offset = self._locate(place, at)
        pieces = [piece for piece in data if len(piece)]
        while pieces:
            written = os.pwritev(file, pieces, offset)
            offset += written
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if written:
                pieces[0] = pieces[0][written:]

    def read(self, place: Place, at: int, size: int) -> memoryview:
        file, offset = self._locate(place, at)
        data = os.pread(file, size, offset)
        if len(data) != size:
            raise OSError(f"segment {place.offset // SEGMENT_BYTES} of {self._directory.parent} is truncated")
        return memoryview(data)

    def sync(self, place: Place) -> None:
        """Flushes the bytes of a place to the device."""
        os.fdatasync(self._locate(place, 0)[0])

    def cut(self, segment: int, length: int) -> None:
        """Shortens a segment, which no place reaches beyond; at 0, removes it and what lies beside it."""
        if length:
            os.truncate(self._path(segment, "kv"), length)
            return
        for ending in ("kv", "seal"):
            self._path(segment, ending).unlink(missing_ok=True)

    def open(self, segment: int) -> int:
        """Opens a segment read-only; the caller closes it. Raises OSError if it does not exist."""
        return os.open(self._path(segment, "kv"), os.O_RDONLY | os.O_CLOEXEC)

    def file(self, segment: int, ending: str) -> int:
        """File descriptor of a segment's file, opened or created on first use.

        Raises OSError if it cannot be opened: Unreachable for a transient reason, such as too many open files.
        """
        file = self._files.get((segment, ending))
        if file is None:
            path = self._path(segment, ending)
            try:
                file = _open_durably(path)
            except OSError as error:
                if error.errno in _TRANSIENT:
                    raise Unreachable(f"can't open {path}: {error.strerror}") from error
                raise
            # Two threads may open the same file: the second descriptor is closed.
            if self._files.setdefault((segment, ending), file) != file:
                os.close(file)
                file = self._files[segment, ending]
        return file

    def close(self) -> None:
        """Flushes and closes all files."""
        for file in self._files.values():
            os.fsync(file)
            os.close(file)
        self._files.clear()

    def _locate(self, place: Place, at: int) -> tuple[int, int]:
        """File descriptor of the segment, and offset in it, of byte `at` of a place."""
        segment, offset = divmod(place.offset, SEGMENT_BYTES)
        return self.file(segment, "kv"), offset + at

    def _path(self, segment: int, ending: str) -> Path:
        return self._directory / f"{segment:06d}.{ending}"


def _open_durably(path: Path) -> int:
    """Opens a file, creating it if needed such that it survives a crash of the machine."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        sync_directory(path.parent)
    except OSError:
        os.close(file)
        raise
    return file
