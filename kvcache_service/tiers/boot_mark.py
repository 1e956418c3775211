"""The mark of the disk tier by which its index is trusted, or not, after a crash of the machine."""

import os
from pathlib import Path

from fusionkv.kvcache_service.tiers.disk_index import sync_directory

_MARK_BYTES = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class BootMark:
    """A file with a boot id from the first change of the tier on, "sync" if it flushes every write, or nothing when
    closed.

    The mark has a fixed size and is written in place, which works on a full device. A torn mark equals no boot id, so
    the index is then not trusted.
    """

    def __init__(self, file: Path, sync: bool) -> None:
        self._file = file
        self._sync = sync

    def trusted(self) -> bool:
        """Whether the index is complete: not changed, flushed on every write, or written since the last boot.

        The kernel writes everything that a killed process wrote. After a crash of the machine, any part of it may be
        missing.
        """
        was = self._file.read_text(errors="replace").strip() if self._file.exists() else ""
        return was in ("", "sync", _boot_id())

    def in_use(self) -> None:
        self._write("sync" if self._sync else _boot_id())

    def closed(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        file = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, text.ljust(_MARK_BYTES).encode(), 0)
            os.fsync(file)
        finally:
            os.close(file)
        sync_directory(self._file.parent)


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"
