"""The memory tier: one arena of shared memory."""

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence

from fusionkv.kvcache_service.tiers.base import Place, Tier

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python's fcntl has it from 3.13 on


class MemoryTier(Tier):
    """Stores entries in an anonymous shared file, which vanishes with the process.

    `arena` is its name and `file` a read-only descriptor, for other processes on this machine (local.py). The first
    write to a page allocates it (1.3 GB/s, against 15 for later ones), so the lowest free addresses are used first.
    """

    name = "memory"
    blocking = False

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        # A memfd is not subject to the 64 MiB limit of a container's /dev/shm.
        fd = os.memfd_create("fusionkv-kvcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, self.capacity_bytes)
            self._map = mmap.mmap(fd, self.capacity_bytes)
            _seal(fd)
            # Reopened, since a duplicate of `fd` would be writable.
            self.file = os.open(f"/dev/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._bytes = memoryview(self._map)
        self.arena = secrets.token_bytes(16)

    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        start = place.offset + at
        for piece in data:
            self._bytes[start : start + len(piece)] = piece
            start += len(piece)

    def space(self, place: Place, at: int, size: int) -> memoryview:
        """Memory in which `size` bytes from byte `at` of the place are stored."""
        start = place.offset + at
        return self._bytes[start : start + size]

    def read(self, place: Place, at: int, size: int) -> memoryview:
        return self.space(place, at, size).toreadonly()

    def close(self) -> None:
        # The mapping is released with its last view, which a frame being sent may still hold.
        self._bytes = memoryview(b"")
        os.close(self.file)


def _seal(fd: int) -> None:
    """Forbids new writable mappings and changes of the file's size.

    A process with a read-only descriptor could reopen it through /proc for writing, or truncate it, which would raise
    SIGBUS here.
    """
    with contextlib.suppress(OSError):  # an older kernel
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
