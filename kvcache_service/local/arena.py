"""The memory tier for processes on the same machine: handed over as a file once, its bytes read where they lie.

gRPC passes no file descriptors, so a service that listens on unix:/path also listens on /path.arena. Whoever connects
there may read all that is in the memory tier: who may is decided by the permissions of the directory, as for gRPC.
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
# Above this a copy (5 to 20 GB/s) would hold up the event loop; below it is not worth the hop to a thread.
_COPY_INLINE_BYTES = 8 << 20
# A caller that releases what it is given holds as many leases as it has requests.
_MANY_LEASES = 4096


def path_of(address: str) -> Path | None:
    """Where the arena of a service at `unix:/path` is handed over; None for other addresses."""
    return Path(address.removeprefix("unix:") + ".arena") if address.startswith("unix:") else None


class FileServer(ABC):
    """Hands a file to whoever connects to a unix socket. Belongs to the running event loop."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the socket can't be bound. One that is there belongs to a process that is gone."""
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
                # No descriptor left, for one: there will be some again.
                _faults.warning("can't hand over a file", error)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            task = asyncio.create_task(self._answer(caller))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, caller: socket.socket) -> None:
        # A caller that is gone, says nothing, or asks for a file that is not there gets nothing.
        with caller, contextlib.suppress(OSError, TimeoutError, struct.error):
            await self.hand_over(caller)

    @abstractmethod
    async def hand_over(self, caller: socket.socket) -> None:
        """Sends a caller, whose socket does not block, its file. On OSError, TimeoutError or struct.error none."""


class ShmServer(FileServer):
    """Hands over a read-only file of `size` bytes."""

    def __init__(self, path: Path, name: bytes, size: int, file: int) -> None:
        """Raises OSError as FileServer does."""
        self._head = _HEAD.pack(name, size)
        self._file = file
        super().__init__(path)

    async def hand_over(self, caller: socket.socket) -> None:
        socket.send_fds(caller, [self._head], [self._file])


class ShmView:
    """A client's view of the memory tier of a service on the same machine, and the leases under which it may be read.

    What is read is right if the lease was held until the reading ended: nothing moves while it is.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._path = path_of(address)
        self._name = b""
        self._bytes: memoryview | None = None
        self._leases: dict[int, float] = {}

    def leased(self, lease: int, until: float) -> None:
        """Notes a lease (0: none) that is held until `until`, as time.monotonic says, which all processes share."""
        if lease:
            self._leases[lease] = until
        if len(self._leases) > _MANY_LEASES:
            now = time.monotonic()
            self._leases = {held: end for held, end in self._leases.items() if end > now}

    def released(self, lease: int) -> None:
        self._leases.pop(lease, None)

    async def open(self, name: bytes) -> memoryview | None:
        """The memory tier of this name; None when it is elsewhere or not handed over. Mapped while views are used."""
        if self._path is None or not name:
            return None
        if self._name != name:
            self._name, self._bytes = name, None
            try:
                handed, view = await asyncio.to_thread(receive, self._path)
            except OSError as error:
                log.warning("bytes of the cache service at %s are streamed: %s", self._address, error)
            else:
                # Another name: the service was started anew since it answered. The next answer says so.
                self._name, self._bytes = handed, view
        return self._bytes if self._name == name else None

    def opened(self, lease: int) -> bool:
        """Whether a memory tier is seen, and a lease is held."""
        return self._bytes is not None and self.held(lease)

    @property
    def name(self) -> bytes:
        """Of the memory tier that is seen; empty when none is."""
        return b"" if self._bytes is None else self._name

    async def copied(self, data: memoryview, lease: int, into: memoryview) -> bool:
        """Copies bytes of the memory tier; False when the lease was not held until the end of that."""
        if not self.held(lease):
            return False
        if len(data) > _COPY_INLINE_BYTES:
            await asyncio.to_thread(np.copyto, np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
        else:
            into[:] = data
        return self.held(lease)

    def held(self, lease: int) -> bool:
        """Whether a lease is held now."""
        return time.monotonic() < self._leases.get(lease, 0.0)


def receive(path: Path) -> tuple[bytes, memoryview]:
    """Maps what a service hands over: its name, and its bytes, read-only. Blocks for milliseconds.

    Raises:
        OSError: nobody hands anything over there.
    """
    with socket.socket(socket.AF_UNIX) as service:
        service.settimeout(_TIMEOUT_SECONDS)
        service.connect(str(path))
        head, files, _, _ = socket.recv_fds(service, _HEAD.size, 1)
    try:
        if len(head) != _HEAD.size or len(files) != 1:
            raise OSError(f"{path} handed over {len(head)} bytes and {len(files)} files")
        name, size = _HEAD.unpack(head)
        return name, memoryview(mmap.mmap(files[0], size, prot=mmap.PROT_READ))
    finally:
        for file in files:
            os.close(file)
