"""The client's end of the data plane: a few connections, opened as needed."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from fusionkv.kvcache_service.data_plane.messages import (
    PIECE_BYTES,
    TICKET_BYTES,
    HungUp,
    Wire,
    encode,
    prepare,
    shut_down,
    socket_path,
)
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.cancellation import background, to_the_end
from fusionkv.protos.runtime.checksum import Checksum
from fusionkv.protos.runtime.tls import ClientTLS

log = logging.getLogger(__name__)
T = TypeVar("T")

# Connections of a client: calls at the same time. Others wait.
_MAX_CONNECTIONS = 8
_CONNECT_SECONDS = 2.0
# Until a call is made by gRPC while a connection is being opened, which takes 3 ms, or for ever at a closed firewall.
_WAIT_SECONDS = 0.1
# More bytes are received and sent in a thread: a hop takes 0.15 ms, and a MiB 0.3 ms of the event loop.
_INLINE_BYTES = 2 << 20
# Until a data plane that could not be reached is tried again.
_TRY_AGAIN_SECONDS = 30.0
# Idle for longer, a connection may have been forgotten by a firewall.
_MAX_IDLE_SECONDS = 120.0


class Broken(Exception):
    """There is no connection, or it ended before the response. The call may have been executed."""


class Refused(Exception):
    """The service responded with an error."""

    def __init__(self, error: pb.DataError) -> None:
        super().__init__(error.message)
        self.status = error.status


class Connection:
    """A connection on the running event loop, for one call at a time. Methods raise Broken."""

    def __init__(self, connected: socket.socket, threads: Executor) -> None:
        prepare(connected)
        self._wire = Wire(connected)
        self._threads = threads
        self.idle_since = time.monotonic()

    async def call(self, request: pb.DataRequest) -> pb.DataResponse:
        """Sends a request and returns the response; what it announces has to be received or sent.

        Raises Refused if the service responds with an error.
        """
        with _broken():
            await self._wire.send(encode(request))
        return await self.response()

    async def response(self) -> pb.DataResponse:
        """The next response. Raises as `call`."""
        with _broken():
            response = pb.DataResponse.FromString(await self._wire.message())
        if response.WhichOneof("result") == "error":
            raise Refused(response.error)
        return response

    async def receive(self, into: Sequence[memoryview]) -> list[bytes]:
        """Fills buffers with the bytes of an entry each; returns their checksums."""
        if sum(map(len, into)) > _INLINE_BYTES:
            return await self._in_thread(lambda: [*map(self._receive, into)])
        digests = []
        with _broken():
            for buffer in into:
                hasher = Checksum()
                for at in range(0, len(buffer), PIECE_BYTES):
                    piece = buffer[at : at + PIECE_BYTES]
                    await self._wire.fill(piece)
                    hasher.update(piece)
                digests.append(hasher.digest())
        return digests

    async def send(self, data: memoryview) -> None:
        """Sends the bytes of an entry."""
        if len(data) > _INLINE_BYTES:
            await self._in_thread(lambda: self._wire.socket.sendall(data))
            return
        with _broken():
            await self._wire.send(data)

    def end(self) -> None:
        """Ends the connection; a call on it gets Broken."""
        with contextlib.suppress(OSError):
            # Closed afterwards, the connection is reset: the service is not left with bytes that nobody reads.
            self._wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        shut_down(self._wire.socket)

    def close(self) -> None:
        """Closes the connection, which nothing uses."""
        self._wire.close()

    def _receive(self, into: memoryview) -> bytes:
        hasher = Checksum()
        for start in range(0, len(into), PIECE_BYTES):
            piece = into[start : start + PIECE_BYTES]
            rest = piece[self._wire.take(piece) :]
            while rest:
                count = self._wire.socket.recv_into(rest)
                if not count:
                    raise HungUp("the connection was closed")
                rest = rest[count:]
            hasher.update(piece)
        return hasher.digest()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Runs blocking work on the socket. A cancelled caller ends it, and waits until the thread has ended."""
        self._wire.socket.setblocking(True)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            with _broken():
                return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.end()
            with contextlib.suppress(Exception):
                await to_the_end(running)  # it may be writing to the caller's memory
            raise
        finally:
            self._wire.socket.setblocking(False)


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except (OSError, DecodeError, HungUp) as error:
        raise Broken(str(error)) from error


def connect(
    address: str, granted: pb.ConnectResponse, timeout: float, tls: ssl.SSLContext | None = None
) -> socket.socket:
    """Connects to the data plane of a service.

    Args:
        address: the service's, `host:port` or `unix:/path`.
        granted: its response to Connect.
        timeout: seconds for each of its addresses.
        tls: for ports, if they have TLS. The certificate is for the host in `address`, whatever is granted.

    Raises OSError if none can be reached, or none accepts the ticket.
    """
    path = socket_path(address)
    if path is not None:
        return _admitted(socket.AF_UNIX, os.fspath(path), granted.ticket, timeout)
    name = address.rpartition(":")[0].strip("[]")
    host = granted.host or name
    failed = OSError(f"{host} has no address")
    # Several services may share a name: only the one that gave the ticket accepts it.
    for family, _, _, _, at in socket.getaddrinfo(host, granted.port, type=socket.SOCK_STREAM):
        try:
            return _admitted(family, at, granted.ticket, timeout, tls, name)
        except OSError as error:
            failed = error
    raise failed


def _admitted(
    family: int, at: Any, ticket: bytes, timeout: float, tls: ssl.SSLContext | None = None, name: str = ""
) -> socket.socket:
    """Connects to an address and shows the ticket. Raises OSError if it is not accepted."""
    connected = socket.socket(family)
    try:
        connected.settimeout(timeout)
        connected.connect(at)
        if tls is not None:
            connected = tls.wrap_socket(connected, server_hostname=name)
        connected.sendall(ticket)
        with connected.makefile("rb") as answer:
            if answer.read(TICKET_BYTES) != ticket:
                raise OSError("the ticket was not accepted")
    except BaseException:
        connected.close()
        raise
    return connected


class Connections:
    """The connections of a client on an event loop."""

    def __init__(
        self, address: str, grant: Callable[[Deadline], Awaitable[pb.ConnectResponse]], tls: ClientTLS | None = None
    ) -> None:
        """grant: calls Connect. Raises ServiceError."""
        self._address = address
        self._tls = tls
        self._grant = grant
        self._threads = ThreadPoolExecutor(_MAX_CONNECTIONS, "kvcache-data")
        self._places = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._not_before = 0.0
        self._closed = False

    async def run(self, work: Callable[[Connection], Awaitable[T]], deadline: Deadline) -> T:
        """Runs a call. If it does not come to its end, the connection is closed.

        Raises:
            Broken: the call may be repeated by gRPC.
            Refused: as `work` does.
            TimeoutError: the deadline has passed.
        """
        if self._closed or time.monotonic() < self._not_before:
            raise Broken("no data plane")
        async with asyncio.timeout(deadline.timeout()), self._places:
            return await self._run(await self._connection(deadline), work)

    async def _run(self, connection: Connection, work: Callable[[Connection], Awaitable[T]]) -> T:
        self._busy.add(connection)
        usable = False
        try:
            result = await work(connection)
            usable = True
            return result
        except Refused:
            usable = True
            raise
        except Broken:
            self._close_idle()  # the service was restarted
            raise
        finally:
            self._busy.discard(connection)
            if usable and not self._closed:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.end()
                connection.close()

    async def _connection(self, deadline: Deadline) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since < _MAX_IDLE_SECONDS:
                return connection
            connection.close()
        opening = background(self._opening, self._open())
        await asyncio.wait([opening], timeout=min(_WAIT_SECONDS, deadline.remaining()))
        if not opening.done():
            self._not_before = time.monotonic() + _TRY_AGAIN_SECONDS
        if not self._idle:
            raise Broken("the data plane does not answer at once, or the client is closed")
        return self._idle.pop()

    async def _open(self) -> None:
        """Adds an idle connection; if that fails, calls are made by gRPC for a while."""
        deadline = Deadline.after(_CONNECT_SECONDS)
        try:
            granted = await self._grant(deadline)
            tls = self._tls.context() if self._tls is not None else None
            opening = asyncio.get_running_loop().run_in_executor(
                self._threads, connect, self._address, granted, deadline.remaining(), tls
            )
            try:
                connected = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_close_opened)
                raise
        except errors.Unavailable:  # a call by gRPC reports it
            return
        except (errors.ServiceError, OSError) as error:
            log.info("calls to the cache service at %s are made by gRPC: no data plane: %s", self._address, error)
            self._not_before = time.monotonic() + _TRY_AGAIN_SECONDS
            return
        self._not_before = 0.0
        self._idle.append(Connection(connected, self._threads))

    def close(self) -> None:
        """Closes all connections; calls get Broken."""
        self._closed = True
        for opening in self._opening:
            opening.cancel()
        for connection in self._busy:
            connection.end()
        self._close_idle()
        self._threads.shutdown(wait=False)

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _close_opened(opening: "asyncio.Future[socket.socket]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
