"""The disk tier's segment files for processes on the same machine: handed over one by one, read where the bytes lie.

As the memory tier (arena.py), and to the same callers: whoever may connect may read all that is on the disk tier.
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

if TYPE_CHECKING:  # it needs lmdb, which a client has not
    from fusionkv.kvcache_service.tiers.base import Tier
    from fusionkv.kvcache_service.tiers.disk import DiskTier

log = logging.getLogger(__name__)

_ASKED = struct.Struct("<I")
_NAME_BYTES = 16
_TIMEOUT_SECONDS = 2.0
# Of a GiB each. A descriptor costs a caller one of the 1024 that a process usually may have.
_MOST_FILES = 128
# Read and hashed in turn: of that much, the second finds the first one's bytes in the processor's cache.
_PIECE_BYTES = 1 << 20


def segments_of(arena: Path) -> Path:
    """Where segment files are handed over by a service that hands its memory over at `arena`."""
    return arena.with_suffix(".segments")


def readable_files(tiers: "Sequence[Tier]") -> "DiskTier | None":
    """The disk tier among these, if its files hold the bytes as they are."""
    return next((tier for tier in tiers if getattr(tier, "readable", False)), None)  # type: ignore[return-value]


class FdServer(FileServer):
    """Hands over the file of the segment whose number a caller says."""

    def __init__(self, path: Path, name: bytes, files: "DiskTier") -> None:
        """Raises OSError as FileServer does."""
        self._name = name
        self._files = files
        super().__init__(path)

    async def hand_over(self, caller: socket.socket) -> None:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            asked = await asyncio.get_running_loop().sock_recv(caller, _ASKED.size)
        file = self._files.open_segment(*_ASKED.unpack(asked))
        try:
            socket.send_fds(caller, [self._name], [file])
        finally:
            os.close(file)


class Segments:
    """A client's view of the segment files of a service on the same machine."""

    def __init__(self, address: str) -> None:
        arena = path_of(address)
        self._path = segments_of(arena) if arena is not None else None
        self._name = b""
        self._refused = False
        self._files: OrderedDict[int, int] = OrderedDict()

    async def read(self, name: bytes, extent: tuple[int, int], reader: Callable[[int, int], bytes]) -> bytes:
        """Lets a thread read at (segment, offset) of the service of this name; the checksum, or nothing.

        reader: as for `CacheClient.read`. The caller holds a lease on what is there, and compares the checksum.
        """
        if self._path is None or not name:
            return b""
        if self._name != name:
            # Started anew: what it says and hands over counts from here on.
            self.close()
            self._name, self._refused = name, False
        if self._refused:
            return b""
        segment, offset = extent
        try:
            file = await self._file(segment)
        except OSError as error:
            log.warning("what is on the disk of the cache service is not read there: %s", error)
            self._refused = True
            return b""
        return b"" if file is None else await asyncio.to_thread(_within, file, reader, offset)

    async def _file(self, segment: int) -> FileIO | None:
        """A segment's file, for the caller to close; None of a service that was started anew."""
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
        while len(self._files) > _MOST_FILES:
            os.close(self._files.popitem(last=False)[1])
        # A second descriptor, since another caller may push the first out while it is used.
        return FileIO(os.dup(self._files[segment]))

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def _receive(path: Path, segment: int) -> tuple[bytes, int]:
    """The name of the service, and a descriptor of a segment's file. Raises OSError when it is not handed over."""
    with socket.socket(socket.AF_UNIX) as service:
        service.settimeout(_TIMEOUT_SECONDS)
        service.connect(str(path))
        service.sendall(_ASKED.pack(segment))
        name, files, _, _ = socket.recv_fds(service, _NAME_BYTES, 1)
    if len(name) != _NAME_BYTES or len(files) != 1:
        for file in files:
            os.close(file)
        raise OSError(f"{path} handed over no file of segment {segment}")
    return name, files[0]


def _within(file: FileIO, reader: Callable[[int, int], bytes], offset: int) -> bytes:
    with file:
        return reader(file.fileno(), offset)


def read_into(into: memoryview, file: int, offset: int) -> bytes:
    """Fills `into` from a file; the checksum of that, or nothing when the file ends before."""
    hasher = Checksum()
    try:
        # By pieces alone the kernel reads ahead in steps that grow: 8 MiB came from a device at 0.62 GB/s, and at 1.0
        # with this (bench/cache/bench.py, "fetch cold").
        os.posix_fadvise(file, offset, len(into), os.POSIX_FADV_WILLNEED)
        for at in range(0, len(into), _PIECE_BYTES):
            piece = into[at : at + _PIECE_BYTES]
            if os.preadv(file, [piece], offset + at) != len(piece):
                return b""
            hasher.update(piece)
    except OSError as error:
        log.warning("the disk tier's bytes can't be read where they lie: %s", error)
        return b""
    return hasher.digest()
