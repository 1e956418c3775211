"""Shared access to the disk tier's segment files for processes on the same machine, by file descriptors.

As for the memory tier (arena.py), any process that can connect may read the whole disk tier.
"""

import asyncio
import logging
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from fusionkv.kvcache_service.local.arena import FileServer, path_of
from fusionkv.protos.runtime.checksum import Checksum

if TYPE_CHECKING:  # needs lmdb, which clients do not install
    from fusionkv.kvcache_service.tiers.base import Tier
    from fusionkv.kvcache_service.tiers.disk import DiskTier

log = logging.getLogger(__name__)

_REQUEST = struct.Struct("<I")
_NAME_BYTES = 16
_TIMEOUT_SECONDS = 2.0
# Maximum number of open segment files, of 1 GiB each. A process may usually open 1024 files.
_MAX_FILES = 128
# Pieces are read and then hashed from the processor's cache.
_PIECE_BYTES = 1 << 20


def segments_of(arena: Path) -> Path:
    """Path of the socket that shares segment files, given that of the arena."""
    return arena.with_suffix(".segments")


def readable_files(tiers: "Sequence[Tier]") -> "DiskTier | None":
    """The disk tier, if there is one and its files are not encrypted."""
    return next((tier for tier in tiers if getattr(tier, "readable", False)), None)  # type: ignore[return-value]


class FdServer(FileServer):
    """Shares the segment file whose number a client sends."""

    def __init__(self, path: Path, name: bytes, files: "DiskTier") -> None:
        """See FileServer."""
        self._name = name
        self._files = files
        super().__init__(path)

    async def hand_over(self, caller: socket.socket) -> None:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            request = await asyncio.get_running_loop().sock_recv(caller, _REQUEST.size)
        file = self._files.open_segment(*_REQUEST.unpack(request))
        try:
            socket.send_fds(caller, [self._name], [file])
        finally:
            os.close(file)


class Segments:
    """A client's access to the segment files of a local service."""

    def __init__(self, address: str) -> None:
        arena = path_of(address)
        self._path = segments_of(arena) if arena is not None else None
        self._name = b""
        self._refused = False
        self._files: OrderedDict[int, int] = OrderedDict()

    async def read(self, name: bytes, extent: tuple[int, int], reader: Callable[[int, int], bytes]) -> bytes:
        """Runs a reader in a thread at (segment, offset). The caller must hold a lease on the entry.

        Args:
            name: Name of the service's memory tier, which changes with a restart.
            reader: As for `CacheClient.read`.

        Returns:
            Checksum of the bytes read, which the caller compares; empty if they cannot be read.
        """
        if self._path is None or not name:
            return b""
        if self._name != name:
            # The service was restarted: its old files are closed.
            self.close()
            self._name, self._refused = name, False
        if self._refused:
            return b""
        segment, offset = extent
        try:
            file = await self._file(segment)
        except OSError as error:
            log.warning("segment files of the cache service are not read locally: %s", error)
            self._refused = True
            return b""
        return b"" if file is None else await asyncio.to_thread(_within, file, reader, offset)

    async def _file(self, segment: int) -> FileIO | None:
        """Segment file, to be closed by the caller; None if the service was restarted."""
        assert self._path is not None
        if segment not in self._files:
            name, file = await asyncio.to_thread(_receive, self._path, segment)
            if name != self._name or segment in self._files:
                os.close(file)
            else:
                self._files[segment] = file
        if segment not in self._files:
            return None
        self._files.move_to_end(segment)
        while len(self._files) > _MAX_FILES:
            os.close(self._files.popitem(last=False)[1])
        # A duplicate, since a concurrent call may evict and close the original.
        return FileIO(os.dup(self._files[segment]))

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def _receive(path: Path, segment: int) -> tuple[bytes, int]:
    """Receives name and segment file descriptor of the service. Raises OSError if it is not shared."""
    with socket.socket(socket.AF_UNIX) as service:
        service.settimeout(_TIMEOUT_SECONDS)
        service.connect(str(path))
        service.sendall(_REQUEST.pack(segment))
        name, files, _, _ = socket.recv_fds(service, _NAME_BYTES, 1)
    if len(name) != _NAME_BYTES or len(files) != 1:
        for file in files:
            os.close(file)
        raise OSError(f"{path} sent no file of segment {segment}")
    return name, files[0]


def _within(file: FileIO, reader: Callable[[int, int], bytes], offset: int) -> bytes:
    with file:
        return reader(file.fileno(), offset)


def read_into(into: memoryview, file: int, offset: int) -> bytes:
    """Fills `into` from a file; returns the checksum, or empty bytes on failure."""
    hasher = Checksum()
    try:
        # Without this, read-ahead grows only step by step: 8 MiB from a device took 0.62 GB/s, against 1.0 with it
        # (bench/cache/bench.py, "fetch cold").
        os.posix_fadvise(file, offset, len(into), os.POSIX_FADV_WILLNEED)
        for at in range(0, len(into), _PIECE_BYTES):
            piece = into[at : at + _PIECE_BYTES]
            if os.preadv(file, [piece], offset + at) != len(piece):
                return b""
            hasher.update(piece)
    except OSError as error:
        log.warning("can't read a segment file: %s", error)
        return b""
    return hasher.digest()
