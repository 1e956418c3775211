"""What both ends of a data plane share: the form of messages, and a socket on an event loop that carries them."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

T = TypeVar("T")

TICKET_BYTES = 32
# Bytes of an entry that are received, and then hashed from the processor's cache.
PIECE_BYTES = 1 << 20
# A message, without the bytes of entries: the largest is a Lookup of 65,535 elements.
MAX_MESSAGE_BYTES = 8 << 20
SIZE = struct.Struct("<I")
# Most messages arrive in one piece.
_AHEAD_BYTES = 16 << 10


class HungUp(Exception):
    """The other end has closed the connection, or sends no messages."""


def encode(message: Message) -> bytes:
    """A message behind its size."""
    data = message.SerializeToString()
    return SIZE.pack(len(data)) + data


def socket_path(address: str) -> Path | None:
    """Path of the unix socket of the data plane of a service at `unix:/path`; None for other addresses."""
    return Path(address.removeprefix("unix:") + ".data") if address.startswith("unix:") else None


def prepare(connected: socket.socket) -> None:
    """Makes a connected socket ready for a `Wire`."""
    connected.setblocking(False)
    if connected.family is not socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def shut_down(connected: socket.socket) -> None:
    """Ends a connection, on which another thread may be sending: with TLS, `shutdown` has it go on in plain text."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class Wire:
    """A connected socket of the running event loop. Methods raise OSError, and HungUp."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._loop = asyncio.get_running_loop()
        self._scratch = memoryview(bytearray(_AHEAD_BYTES))
        self._ahead = self._scratch[:0]  # received, and not taken yet

    async def send(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[await self.attempt(partial(self.socket.send, rest), writes=True) :]

    async def message(self) -> bytes:
        """The next message, without its size."""
        return await self.body(await self.size())

    async def size(self) -> int:
        """The next message's number of bytes."""
        while len(self._ahead) < SIZE.size:
            await self._receive_ahead()
        (size,) = SIZE.unpack_from(self._ahead)
        if size > MAX_MESSAGE_BYTES:
            raise HungUp(f"a message of {size} bytes")
        self._ahead = self._ahead[SIZE.size :]
        return int(size)

    async def body(self, size: int) -> bytes:
        """The bytes of a message of which the size was received."""
        if size <= len(self._ahead):
            data, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
            return data
        rest = bytearray(size)
        await self.fill(memoryview(rest))
        return bytes(rest)

    async def fill(self, into: memoryview) -> None:
        """Receives as many bytes as `into` has."""
        into = into[self.take(into) :]
        while into:
            into = into[await self.receive(into) :]

    def take(self, into: memoryview) -> int:
        """Moves bytes that were received already; returns their number."""
        count = min(len(into), len(self._ahead))
        if count:
            into[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
        return count

    async def receive(self, into: memoryview) -> int:
        """Receives some bytes, at least one; returns their number."""
        count = await self.attempt(partial(self.socket.recv_into, into))
        if not count:
            raise HungUp("the connection was closed")
        return count

    async def attempt(self, operation: Callable[[], T], *, writes: bool = False) -> T:
        """The result of an operation on the socket, which is tried whenever the socket is ready for it.

        writes: whether it waits until it can write, unless TLS says what it waits for.
        """
        while True:
            try:
                return operation()
            except ssl.SSLWantReadError:
                writes = False
            except ssl.SSLWantWriteError:
                writes = True
            except BlockingIOError:
                pass
            await self._ready(writes)

    async def _ready(self, writes: bool) -> None:
        """Waits until the socket can be read, or written."""
        ready, file = self._loop.create_future(), self.socket.fileno()
        add, remove = (
            (self._loop.add_writer, self._loop.remove_writer)
            if writes
            else (self._loop.add_reader, self._loop.remove_reader)
        )
        add(file, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            remove(file)

    @contextlib.contextmanager
    def cancelling(self) -> Iterator[None]:
        """Cancels the current task if the other end hangs up, before it sends anything else."""
        task, file = asyncio.current_task(), self.socket.fileno()
        assert task is not None

        def readable() -> None:
            self._loop.remove_reader(file)
            try:
                # What arrives on the network, which with TLS is not what was sent.
                gone = not socket.socket.recv(self.socket, 1, socket.MSG_PEEK)
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                task.cancel()

        self._loop.add_reader(file, readable)
        try:
            yield
        finally:
            self._loop.remove_reader(file)

    async def _receive_ahead(self) -> None:
        """Receives what there is, to at most the size of the scratch buffer."""
        kept = len(self._ahead)
        self._scratch[:kept] = bytes(self._ahead)
        self._ahead = self._scratch[: kept + await self.receive(self._scratch[kept:])]
