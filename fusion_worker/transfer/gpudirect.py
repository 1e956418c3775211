"""GPUDirect Storage: the disk tier's bytes read by kvikio straight into device memory, and verified there.

For a cache service on the worker's machine, which hands its segment files over. Without a GPU, its driver or kvikio
the bytes come through host memory, as from everywhere else.
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

from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kernels.checksum import piece_digests
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.checksum import PIECE_BYTES, of_pieces

log = logging.getLogger(__name__)
# Of a GiB each, as many as a client keeps (kvcache_service/local/segments.py); kvikio opens each twice.
_MOST_FILES = 128


class DirectReader:
    """Fetches entries into buffers of a pool's device. Its threads read; all else is for the event loop's."""

    def __init__(self, storage: Storage, open_file: Callable[[str], Any]) -> None:
        """open_file: kvikio.CuFile, or what else has its `read(buffer, size, file_offset)`."""
        self._storage = storage
        self._open = open_file
        self._files: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._works = True

    @classmethod
    def find(cls, storage: Storage) -> "DirectReader | None":
        """A reader for the device of a pool; None where there is no GPU, no driver or no kvikio."""
        if storage.device.type != "cuda":
            return None
        try:
            # kvikio can be imported without the driver; every read would fail then.
            ctypes.CDLL("libcuda.so.1")
            import kvikio
        except (ImportError, OSError) as error:
            log.info("the disk tier is read through host memory: %s", error)
            return None
        return cls(storage, kvikio.CuFile)

    async def fetch(self, cache: CacheClient, entry: Entry, timeout: float) -> torch.Tensor | None:
        """A leased entry's bytes, verified, uint8 on the device; None if they have to be fetched another way.

        Raises:
            DeadlineExceeded: `timeout` seconds were not enough for the disk.
        """
        if not self._works or not cache.on_disk(entry):
            return None
        buffer = await asyncio.to_thread(self._storage.buffer, entry.size)
        return buffer if await cache.read(entry, partial(self._read, buffer), timeout=timeout) else None

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            self._files.clear()

    def _read(self, into: torch.Tensor, file: int, offset: int) -> bytes:
        """Fills a buffer from a file; the checksum of that, or nothing if it can't be.

        Entries begin at multiples of 4096 and end anywhere: kvikio brings what is not whole pages over the host.
        """
        try:
            if self._file(file).read(into, into.numel(), offset) != into.numel():
                return b""
        except (OSError, RuntimeError) as error:
            self._works = False
            log.warning("the disk tier is read through host memory from now on: %s", error)
            return b""
        with self._storage.beside():
            return _checksum(into)

    def _file(self, file: int) -> Any:
        """What kvikio knows the file of a descriptor by: registering one takes longer than reading a chunk."""
        # While it is open here, no other file has its number.
        state = os.fstat(file)
        name = (state.st_dev, state.st_ino)
        with self._lock:
            if name not in self._files:
                self._files[name] = self._open(f"/proc/self/fd/{file}")
            self._files.move_to_end(name)
            # Closed by the last read that uses it.
            while len(self._files) > _MOST_FILES:
                self._files.popitem(last=False)
            return self._files[name]


def _checksum(data: torch.Tensor) -> bytes:
    whole = data.numel() // PIECE_BYTES * PIECE_BYTES
    digests = piece_digests(data[:whole], PIECE_BYTES)
    if whole < data.numel():
        digests.append(xxhash.xxh3_64_digest(data[whole:].cpu().numpy().data))
    return of_pieces(digests)
