"""GPUDirect Storage: reads the disk tier with kvikio straight into device memory, and verifies the bytes there.

For a cache service on the same machine, which passes its segment files to the worker. Without a GPU, its driver or
kvikio, bytes are read through host memory.
"""

import asyncio
import ctypes
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import xxhash

from fusionkv.fusion_worker.transfer.copies import RankCopies
from fusionkv.kernels.checksum import piece_digests
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.checksum import PIECE_BYTES, of_pieces

log = logging.getLogger(__name__)
# As many files, of 1 GiB each, as a client keeps open (kvcache_service/local.py); kvikio opens each twice.
_MAX_FILES = 128


class DirectReader:
    """Fetches entries into buffers on a pool's device. Call its methods in the event loop's thread."""

    def __init__(self, copies: RankCopies, open_file: Callable[[str], Any]) -> None:
        """open_file: kvikio.CuFile, or a function whose result has the same `read(buffer, size, file_offset)`."""
        self._copies = copies
        self._open = open_file
        self._files: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._works = True

    @classmethod
    def find(cls, copies: RankCopies) -> "DirectReader | None":
        """A reader for a pool's device; None without a GPU, its driver or kvikio."""
        if copies.device.type != "cuda":
            return None
        try:
            # kvikio imports without the driver, but then every read fails.
            ctypes.CDLL("libcuda.so.1")
            import kvikio  # pyright: ignore[reportMissingImports]
        except (ImportError, OSError) as error:
            log.info("GPUDirect Storage is not available; the disk tier is read through host memory: %s", error)
            return None
        return cls(copies, kvikio.CuFile)

    async def fetch(self, cache: CacheClient, entry: Entry, timeout: float) -> torch.Tensor | None:
        """Reads a leased entry's bytes and verifies them: uint8 [entry.size] on the device.

        None if the entry can't be read this way. Raises DeadlineExceeded if the disk took longer than `timeout`
        seconds.
        """
        if not self._works or not cache.on_disk(entry):
            return None
        buffer = await asyncio.to_thread(self._copies.buffer, entry.size)
        return buffer if await cache.read(entry, partial(self._read, buffer), timeout=timeout) else None

    def close(self) -> None:
        with self._lock:
            self._files.clear()

    def _read(self, into: torch.Tensor, file: int, offset: int) -> bytes:
        """Fills a buffer from a file and returns its checksum; empty if reading failed.

        Entries begin at multiples of 4096 bytes and end anywhere: kvikio copies a partial last page through the host.
        """
        try:
            if self._file(file).read(into, into.numel(), offset) != into.numel():
                return b""
        except (OSError, RuntimeError) as error:
            self._works = False
            log.warning("GPUDirect Storage failed; the disk tier is read through host memory from now on: %s", error)
            return b""
        with self._copies.beside():
            return _checksum(into)

    def _file(self, file: int) -> Any:
        """kvikio's handle of an open file, cached: registering a file takes longer than reading a chunk."""
        # While the file is open here, no other file gets its inode.
        state = os.fstat(file)
        name = (state.st_dev, state.st_ino)
        with self._lock:
            if name not in self._files:
                self._files[name] = self._open(f"/proc/self/fd/{file}")
            self._files.move_to_end(name)
            # A handle is closed after the last read that uses it.
            while len(self._files) > _MAX_FILES:
                self._files.popitem(last=False)
            return self._files[name]


def _checksum(data: torch.Tensor) -> bytes:
    whole = data.numel() // PIECE_BYTES * PIECE_BYTES
    digests = piece_digests(data[:whole], PIECE_BYTES)
    if whole < data.numel():
        digests.append(xxhash.xxh3_64_digest(data[whole:].cpu().numpy().data))
    return of_pieces(digests)
