"""What both ends of a data plane share: the form of messages, and a socket on an event loop that carries them."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

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
_ACCEPT_AGAIN_SECONDS = 0.1


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


async def accepted(listener: socket.socket, fault: Callable[[OSError], None]) -> AsyncIterator[socket.socket]:
    """Connections to a socket, for ever. fault: told of transient errors, such as too many open files."""
    while True:
        try:
            caller, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as error:
            fault(error)
            await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
        else:
            yield caller


def shut_down(connected: socket.socket) -> None:
    """Ends a connection, on which another thread may be sending: with TLS, `shutdown` has it go on in plain text."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class Readiness:
    """Waits until a connected socket can be read or written, for one call at a time.

    The running event loop watches it from the first wait on until `unwatch`: to begin and to end this takes as long
    as the rest of a wait.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._watched = False
        self._receiving: Callable[[], None] | None = None  # what waits until the socket can be read
        self._cancelled: asyncio.Task[Any] | None = None  # if the other end hangs up

    async def attempt(self, operation: Callable[[], T], seconds: float | None, *, writes: bool = False) -> T:
        """The result of an operation on the socket, which is tried whenever the socket is ready for it.

        Between these tries, which go on from where the last one stopped, the caller is not resumed: a MiB arrives in
        dozens of pieces.

        seconds: maximum wait, after which it raises TimeoutError.
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
            done: asyncio.Future[tuple[T] | None] = self._loop.create_future()
            timer = None if seconds is None else self._loop.call_later(seconds, _expire, done)
            again = partial(_try_again, operation, writes, done)
            try:
                if writes:
                    self._loop.add_writer(self._socket, again)
                else:
                    self._receiving = again
                    self._watch()
                if (result := await done) is not None:
                    return result[0]
            finally:
                self._receiving = None
                if writes:
                    self._loop.remove_writer(self._socket)
                if timer is not None:
                    timer.cancel()

    @contextlib.contextmanager
    def cancelling(self) -> Iterator[None]:
        """Cancels the current task if the other end hangs up, before it sends anything else."""
        self._cancelled = asyncio.current_task()
        self._watch()
        try:
            yield
        finally:
            self._cancelled = None

    def _watch(self) -> None:
        if not self._watched:
            self._loop.add_reader(self._socket, self._readable)
            self._watched = True

    def unwatch(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._socket)
            self._watched = False

    def _readable(self) -> None:
        if self._receiving is not None:
            self._receiving()
            return
        self.unwatch()  # until it is waited for, what there is would call this again and again
        if self._cancelled is not None and self._hung_up():
            self._cancelled.cancel()

    def _hung_up(self) -> bool:
        try:
            # What arrives on the network, which with TLS is not what was sent.
            return not socket.socket.recv(self._socket, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Wire:
    """A connected socket of the running event loop, for one call at a time. Methods raise OSError, and HungUp."""

    def __init__(self, connected: socket.socket, seconds: float | None = None) -> None:
        """seconds: maximum wait for a piece that is received or sent, after which methods raise TimeoutError."""
        self.socket, self.ready = connected, Readiness(connected)
        self._seconds = seconds
        self._scratch = memoryview(bytearray(_AHEAD_BYTES))
        self._ahead = self._scratch[:0]  # received, and not taken yet

    def close(self) -> None:
        """Closes the socket, which nothing uses."""
        self.ready.unwatch()
        self.socket.close()

    async def send(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)

        def send() -> None:
            nonlocal rest
            while rest:
                rest = rest[self.socket.send(rest) :]

        await self.ready.attempt(send, self._seconds, writes=True)

    async def message(self) -> bytes:
        """The next message, without its size."""
        return await self.body(await self.size())

    async def size(self, seconds: float | None = None) -> int:
        """The next message's number of bytes. seconds: maximum wait for it."""
        while len(self._ahead) < SIZE.size:
            kept = len(self._ahead)
            self._scratch[:kept] = bytes(self._ahead)
            self._ahead = self._scratch[:kept]
            receive = partial(self._received, self._scratch[kept:])
            self._ahead = self._scratch[: kept + await self.ready.attempt(receive, seconds)]
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
        rest = into[self.take(into) :]

        def receive() -> None:
            nonlocal rest
            while rest:
                rest = rest[self._received(rest) :]

        await self.ready.attempt(receive, self._seconds)

    def take(self, into: memoryview) -> int:
        """Moves bytes that were received already; returns their number."""
        count = min(len(into), len(self._ahead))
        if count:
            into[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
        return count

    def _received(self, into: memoryview) -> int:
        count = self.socket.recv_into(into)
        if not count:
            raise HungUp("the connection was closed")
        return count


def _expire(done: "asyncio.Future[Any]") -> None:
    if not done.done():
        done.set_exception(TimeoutError())


def _try_again(operation: Callable[[], T], writes: bool, done: "asyncio.Future[tuple[T] | None]") -> None:
    """Tries an operation for whoever waits for its result; None if TLS now waits for the other direction."""
    if done.done():  # also if the caller was cancelled, whose memory must not change any more
        return
    try:
        done.set_result((operation(),))
    except BlockingIOError:
        pass
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
        if isinstance(error, ssl.SSLWantWriteError) is not writes:
            done.set_result(None)
    except Exception as error:
        done.set_exception(error)
