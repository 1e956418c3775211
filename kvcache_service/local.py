"""Shared access to entries for processes on the same machine: the memory tier, and the disk tier's segment files.

gRPC cannot pass file descriptors, so a service that listens on unix:/path also listens on /path.arena and
/path.segments. Any process that can connect may read both tiers: access is controlled by the directory's permissions,
as for gRPC.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from io import FileIO
from pathlib import Path

import numpy as np

from fusionkv.kvcache_service.data_plane.messages import accepted
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.cancellation import background, to_the_end
from fusionkv.protos.runtime.checksum import Checksum

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)

_NAME_BYTES = 16
_HEAD = struct.Struct(f"<{_NAME_BYTES}sQ")  # name, size
_SEGMENT = struct.Struct("<I")
_TIMEOUT_SECONDS = 2.0
# Interval in which a client requests a memory tier or a segment file again that it did not get.
_OPEN_AGAIN_SECONDS = 60.0
# Above this size, a copy (5 to 20 GB/s) would block the event loop; below it, a hop to a thread takes longer.
_COPY_INLINE_BYTES = 8 << 20
# Number of leases above which expired ones are dropped. A client that releases leases has one per request.
_MANY_LEASES = 4096
# Maximum number of open segment files, of 1 GiB each. A process may usually open 1024 files.
_MAX_FILES = 128
# Pieces are read and then hashed from the processor's cache.
_PIECE_BYTES = 1 << 20


def arena_path(address: str) -> Path | None:
    """Path of the socket that shares the arena of a service at `unix:/path`; None for other addresses."""
    return Path(address.removeprefix("unix:") + ".arena") if address.startswith("unix:") else None


def segments_path(arena: Path) -> Path:
    """Path of the socket that shares segment files, given that of the arena."""
    return arena.with_suffix(".segments")


class FileServer:
    """Sends a file descriptor to each client of a unix socket, on the running event loop."""

    def __init__(self, path: Path, send_file: Callable[[socket.socket], Awaitable[None]]) -> None:
        """Replaces an existing socket, which is stale. Raises OSError if it cannot be bound.

        send_file: Sends the file over a non-blocking socket. May raise OSError, TimeoutError or struct.error.
        """
        self._path = path
        self._send_file = send_file
        self._socket = process.bind_unix(path)
        self._answering: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._answering):
            task.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    async def _accept(self) -> None:
        async for caller in accepted(self._socket, partial(_faults.warning, "can't share a file")):
            background(self._answering, self._answer(caller))

    async def _answer(self, caller: socket.socket) -> None:
        # A client that is gone, sends nothing, or requests a missing file gets no response.
        with caller, contextlib.suppress(OSError, TimeoutError, struct.error):
            await self._send_file(caller)


def share_memory(path: Path, name: bytes, size: int, file: int) -> FileServer:
    """Shares a read-only file of `size` bytes. Raises OSError as FileServer does."""

    async def send_file(caller: socket.socket) -> None:
        socket.send_fds(caller, [_HEAD.pack(name, size)], [file])

    return FileServer(path, send_file)


def share_segments(path: Path, name: bytes, open_segment: Callable[[int], int]) -> FileServer:
    """Shares the file of the segment whose number a client sends. Raises OSError as FileServer does."""

    async def send_file(caller: socket.socket) -> None:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            request = await asyncio.get_running_loop().sock_recv(caller, _SEGMENT.size)
        file = open_segment(*_SEGMENT.unpack(request))
        try:
            socket.send_fds(caller, [name], [file])
        finally:
            os.close(file)

    return FileServer(path, send_file)


class LocalTiers:
    """A client's mapping of a local service's memory tier, its open segment files, and the client's leases.

    Bytes read are valid if the lease was held until the end of the read: leased entries do not move.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._path = arena_path(address)
        self._arena_name = b""
        self._arena: memoryview | None = None
        self._open_again = 0.0
        self._leases: dict[int, float] = {}
        self._files: OrderedDict[int, int] = OrderedDict()
        self._files_lock = threading.Lock()
        self._read_again = 0.0

    def add_lease(self, lease: int, until: float) -> None:
        """Records a lease (0: none) until a time of time.monotonic, which is the same in all processes."""
        if lease:
            self._leases[lease] = until
        if len(self._leases) > _MANY_LEASES:
            now = time.monotonic()
            self._leases = {held: end for held, end in self._leases.items() if end > now}

    def drop_lease(self, lease: int) -> None:
        self._leases.pop(lease, None)

    async def open(self, name: bytes) -> memoryview | None:
        """Maps the memory tier of this name; None if it is not local or not shared. Unmapped with the last view."""
        if self._path is None or not name:
            return None
        new = self._arena_name != name
        if new or (self._arena is None and time.monotonic() >= self._open_again):
            try:
                received, view = await asyncio.to_thread(map_arena, self._path)
            except OSError as error:
                self._arena_name, self._arena = name, None
                self._open_again = time.monotonic() + _OPEN_AGAIN_SECONDS
                if new:
                    log.warning("bytes of the cache service at %s are streamed: %s", self._address, error)
            else:
                # Segment files of an earlier start of the service are not used any more.
                self.close()
                # With another name, the service was restarted since its response. The next one has the new name.
                self._arena_name, self._arena, self._read_again = received, view, 0.0
        return self._arena if self._arena_name == name else None

    @property
    def near(self) -> bool:
        """Whether the service is at a unix socket, and may share its memory."""
        return self._path is not None

    @property
    def mapped(self) -> bool:
        """Whether a memory tier is mapped."""
        return self._arena is not None

    async def copy_leased(self, data: memoryview, lease: int, into: memoryview) -> bool:
        """Copies bytes of the memory tier; False if the lease was not held until the end of the copy.

        A cancelled caller waits for the end of the copy, which writes to its memory.
        """
        if not self.is_leased(lease):
            return False
        if len(data) > _COPY_INLINE_BYTES:
            target, source = np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8)
            await to_the_end(asyncio.to_thread(np.copyto, target, source))
        else:
            into[:] = data
        return self.is_leased(lease)

    def is_leased(self, lease: int) -> bool:
        return time.monotonic() < self._leases.get(lease, 0.0)

    async def read(self, extent: tuple[int, int], reader: Callable[[int, int], bytes]) -> bytes:
        """Runs a reader, as for `CacheClient.read`, in a thread at an extent.

        Returns the checksum of the bytes read, which the caller compares; empty if they cannot be read. The caller
        checks afterwards that the lease is still held (`is_leased`).
        """
        return await asyncio.to_thread(self._read, *extent, reader)

    def _read(self, segment: int, offset: int, reader: Callable[[int, int], bytes]) -> bytes:
        try:
            file = self._file(segment)
        except OSError as error:
            self._read_again = time.monotonic() + _OPEN_AGAIN_SECONDS
            log.warning("for %g s, no segment files of the cache service are read: %s", _OPEN_AGAIN_SECONDS, error)
            return b""
        if file is None:
            return b""
        with file:
            return reader(file.fileno(), offset)

    def _file(self, segment: int) -> FileIO | None:
        """Segment file, to be closed by the caller; None after a restart, or a failure a short time ago."""
        assert self._path is not None
        with self._files_lock:
            if time.monotonic() < self._read_again:
                return None
            if segment not in self._files:
                path, request = segments_path(self._path), _SEGMENT.pack(segment)
                name, file = _receive_file(path, request, _NAME_BYTES)
                if name != self._arena_name:
                    os.close(file)
                    return None
                self._files[segment] = file
            self._files.move_to_end(segment)
            while len(self._files) > _MAX_FILES:
                os.close(self._files.popitem(last=False)[1])
            # A duplicate, since another thread may close the original.
            return FileIO(os.dup(self._files[segment]))

    def close(self) -> None:
        with self._files_lock:
            self._arena_name = b""
            while self._files:
                os.close(self._files.popitem()[1])


def map_arena(path: Path) -> tuple[bytes, memoryview]:
    """Maps a memory tier read-only, in milliseconds; returns name and bytes. Raises OSError if there is none."""
    head, file = _receive_file(path, b"", _HEAD.size)
    try:
        name, size = _HEAD.unpack(head)
        return name, memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ))
    finally:
        os.close(file)


def _receive_file(path: Path, request: bytes, head_bytes: int) -> tuple[bytes, int]:
    """Head and file descriptor that a FileServer responds with. Raises OSError if it shares no such file."""
    with socket.socket(socket.AF_UNIX) as service:
        service.settimeout(_TIMEOUT_SECONDS)
        service.connect(str(path))
        if request:  # even an empty one fails once the service has closed its end
            service.sendall(request)
        head, files, _, _ = socket.recv_fds(service, head_bytes, 1)
    if len(head) != head_bytes or len(files) != 1:
        for file in files:
            os.close(file)
        raise OSError(f"{path} sent {len(head)} bytes and {len(files)} files")
    return head, files[0]


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
