"""Shared access to the memory tier for processes on the same machine, by a file descriptor.

gRPC cannot pass file descriptors, so a service that listens on unix:/path also listens on /path.arena. Any process
that can connect may read the whole memory tier: access is controlled by the directory's permissions, as for gRPC.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from fusionkv.protos.observe import logs

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)

_HEAD = struct.Struct("<16sQ")  # name, size
_TIMEOUT_SECONDS = 2.0
_ACCEPT_AGAIN_SECONDS = 0.1
# Above this size, a copy (5 to 20 GB/s) would block the event loop; below it, a hop to a thread takes longer.
_COPY_INLINE_BYTES = 8 << 20
# Number of leases above which expired ones are dropped. A client that releases leases has one per request.
_MANY_LEASES = 4096


def path_of(address: str) -> Path | None:
    """Path of the socket that shares the arena of a service at `unix:/path`; None for other addresses."""
    return Path(address.removeprefix("unix:") + ".arena") if address.startswith("unix:") else None


class FileServer(ABC):
    """Sends a file descriptor to each client of a unix socket, on the running event loop."""

    def __init__(self, path: Path) -> None:
        """Replaces an existing socket, which is stale. Raises OSError if it cannot be bound."""
        self._path = path
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._socket.listen()
        self._answering: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._answering):
            task.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    async def _accept(self) -> None:
        while True:
            try:
                caller, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            except OSError as error:
                # Transient, such as too many open files.
                _faults.warning("can't share a file", error)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            task = asyncio.create_task(self._answer(caller))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, caller: socket.socket) -> None:
        # A client that is gone, sends nothing, or requests a missing file gets no response.
        with caller, contextlib.suppress(OSError, TimeoutError, struct.error):
            await self.hand_over(caller)

    @abstractmethod
    async def hand_over(self, caller: socket.socket) -> None:
        """Sends the file over a non-blocking socket. May raise OSError, TimeoutError or struct.error."""


class ShmServer(FileServer):
    """Shares a read-only file of `size` bytes."""

    def __init__(self, path: Path, name: bytes, size: int, file: int) -> None:
        """See FileServer."""
        self._head = _HEAD.pack(name, size)
        self._file = file
        super().__init__(path)

    async def hand_over(self, caller: socket.socket) -> None:
        socket.send_fds(caller, [self._head], [self._file])


class ShmView:
    """A client's mapping of a local service's memory tier, and the client's leases.

    Bytes read are valid if the lease was held until the end of the read: leased entries do not move.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._path = path_of(address)
        self._name = b""
        self._bytes: memoryview | None = None
        self._leases: dict[int, float] = {}

    def leased(self, lease: int, until: float) -> None:
        """Records a lease (0: none) until a time of time.monotonic, which is the same in all processes."""
        if lease:
            self._leases[lease] = until
        if len(self._leases) > _MANY_LEASES:
            now = time.monotonic()
            self._leases = {held: end for held, end in self._leases.items() if end > now}

    def released(self, lease: int) -> None:
        self._leases.pop(lease, None)

    async def open(self, name: bytes) -> memoryview | None:
        """Maps the memory tier of this name; None if it is not local or not shared. Unmapped with the last view."""
        if self._path is None or not name:
            return None
        if self._name != name:
            self._name, self._bytes = name, None
            try:
                received, view = await asyncio.to_thread(receive, self._path)
            except OSError as error:
                log.warning("bytes of the cache service at %s are streamed: %s", self._address, error)
            else:
                # With another name, the service was restarted since its response. The next one has the new name.
                self._name, self._bytes = received, view
        return self._bytes if self._name == name else None

    def opened(self, lease: int) -> bool:
        """Whether a memory tier is mapped, and a lease is held."""
        return self._bytes is not None and self.held(lease)

    @property
    def name(self) -> bytes:
        """Name of the mapped memory tier; empty if there is none."""
        return b"" if self._bytes is None else self._name

    async def copied(self, data: memoryview, lease: int, into: memoryview) -> bool:
        """Copies bytes of the memory tier; False if the lease was not held until the end of the copy."""
        if not self.held(lease):
            return False
        if len(data) > _COPY_INLINE_BYTES:
            await asyncio.to_thread(np.copyto, np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
        else:
            into[:] = data
        return self.held(lease)

    def held(self, lease: int) -> bool:
        """Whether a lease is active."""
        return time.monotonic() < self._leases.get(lease, 0.0)


def receive(path: Path) -> tuple[bytes, memoryview]:
    """Maps a service's memory tier read-only; returns its name and bytes. Blocks for milliseconds.

    Raises:
        OSError: No memory tier is shared there.
    """
    with socket.socket(socket.AF_UNIX) as service:
        service.settimeout(_TIMEOUT_SECONDS)
        service.connect(str(path))
        head, files, _, _ = socket.recv_fds(service, _HEAD.size, 1)
    try:
        if len(head) != _HEAD.size or len(files) != 1:
            raise OSError(f"{path} sent {len(head)} bytes and {len(files)} files")
        name, size = _HEAD.unpack(head)
        return name, memoryview(mmap.mmap(files[0], size, prot=mmap.PROT_READ))
    finally:
        for file in files:
            os.close(file)
