"""The server of the data plane: answers the calls on each connection in turn, and sends bytes from the tiers."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from opentelemetry import propagate, trace

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
from fusionkv.kvcache_service.data_plane.spans import span
from fusionkv.kvcache_service.data_plane.tickets import TICKET_SECONDS, Tickets
from fusionkv.kvcache_service.store.writing import Writer
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.observe import logs, telemetry
from fusionkv.protos.runtime import errors, process, rpc
from fusionkv.protos.runtime.cancellation import background
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.protos.runtime.tls import MAX_AGE_SECONDS, ServerTLS

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)

# Maximum wait for a caller to read or send the next piece of an entry.
_STALL_SECONDS = 30.0
_ACCEPT_AGAIN_SECONDS = 0.1
_MAX_CONNECTIONS = 1024
# Requests above this size are received few at a time: together, connections could otherwise hold 8 GiB.
_SMALL_BYTES, _MAX_LARGE = 64 << 10, 16
_BACKLOG = 128
_parse = rpc.bounded(pb.DataRequest)


class Calls(Protocol):
    """What the data plane calls: the service's implementation of the same calls by gRPC."""

    async def lookup(
        self, request: pb.LookupRequest, *, near: bool, waiting: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> pb.LookupResponse:
        """waiting: entered while others are asked."""
        ...

    async def find(
        self, request: pb.FindRequest, *, near: bool, waiting: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> pb.FindResponse: ...

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse: ...

    def reading(
        self, request: pb.FetchRequest
    ) -> contextlib.AbstractAsyncContextManager[tuple[int, AsyncIterator[memoryview]]]:
        """Number of an entry's bytes, and the bytes in frames."""
        ...

    def reading_all(
        self, request: pb.FetchAllRequest
    ) -> contextlib.AbstractAsyncContextManager[tuple[list[int], AsyncIterator[memoryview]]]:
        """The sizes of entries, and the bytes of all in frames."""
        ...

    def reading_found(
        self, found: pb.FindResponse, sizes: Sequence[int]
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[memoryview]]:
        """The bytes of what was found, in frames; notes in the response which these are."""
        ...

    async def store(self, header: pb.PutHeader, receive: "Receive") -> pb.PutResponse: ...


class Receive(Protocol):
    """Receives the bytes of an entry for which space is reserved. Raises as `Writer.write` does."""

    def __call__(self, writer: Writer) -> Awaitable[None]: ...


class DataPlane:
    """Listens beside each address of the service; started and stopped with it (`rpc.Beside`)."""

    def __init__(
        self,
        name: str,
        calls: Calls,
        addresses: Sequence[str],
        port: int = 0,
        host: str = "",
        tls: ServerTLS | None = None,
    ) -> None:
        """addresses: those of the service. port: for `host:port`; 0 chooses one. tls: of the port.

        host: where callers reach the port; empty: at the host that they called.
        """
        self.name = name
        self.port = port
        self._tls = tls.context() if tls is not None else None
        self._host = host
        self._calls = calls
        self._tickets = Tickets()
        self._addresses = addresses
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: set[socket.socket] = set()
        self._large = asyncio.Semaphore(_MAX_LARGE)

    def admit(self, *, near: bool) -> pb.ConnectResponse:
        """Grants a connection to a caller. near: whether it is at a unix socket."""
        ticket = self._tickets.grant()
        return (
            pb.ConnectResponse(ticket=ticket)
            if near
            else pb.ConnectResponse(ticket=ticket, port=self.port, host=self._host)
        )

    async def start(self) -> list[str]:
        """Listens; returns the addresses. Raises OSError if one can't be bound."""
        try:
            for address in self._addresses:
                self._sockets.append(self._bind(address))
        except OSError:
            self._close_listeners()
            raise
        for listener, address in zip(self._sockets, self._addresses, strict=True):
            self._accepting.append(asyncio.create_task(self._accept(listener, near=address.startswith("unix:"))))
        return [_name(listener) for listener in self._sockets]

    async def stop(self, seconds: float) -> None:
        """Closes idle connections at once, others after their call, or after so many seconds."""
        self._close_listeners()
        for caller in self._idle:
            shut_down(caller)
        if self._connections:
            await asyncio.wait(self._connections, timeout=seconds)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _bind(self, address: str) -> socket.socket:
        if (path := socket_path(address)) is not None:
            return _bind_unix(path)
        listener = process.bind_port(address.rpartition(":")[0].strip("[]"), self.port, _BACKLOG)
        listener.setblocking(False)
        # Further addresses get the same port, which is all that a caller is told.
        self.port = listener.getsockname()[1]
        return listener

    def _close_listeners(self) -> None:
        for accepting in self._accepting:
            accepting.cancel()
        for listener in self._sockets:
            asyncio.get_running_loop().remove_reader(listener)
            if listener.family is socket.AF_UNIX:
                Path(listener.getsockname()).unlink(missing_ok=True)
            listener.close()
        self._sockets.clear()

    async def _accept(self, listener: socket.socket, *, near: bool) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                caller, _ = await loop.sock_accept(listener)
            except OSError as error:  # transient, such as too many open files
                _faults.warning("can't accept a connection to the data plane", error)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            if len(self._connections) < _MAX_CONNECTIONS:
                background(self._connections, self._converse(caller, near))
            else:
                caller.close()

    async def _converse(self, caller: socket.socket, near: bool) -> None:
        """Answers a caller until it hangs up."""
        gone = contextlib.suppress(OSError, DecodeError, ValueError, HungUp)
        with gone, contextlib.closing(Wire(self._secured(caller, near), _STALL_SECONDS)) as wire:
            if not await self._admitted(wire):
                return
            connection, clock = _Connection(wire), asyncio.get_running_loop().time
            newest = clock() + MAX_AGE_SECONDS if isinstance(wire.socket, ssl.SSLSocket) else None
            # Until the listeners are closed.
            while self._sockets:
                self._idle.add(wire.socket)
                try:
                    size = await wire.size(None if newest is None else newest - clock())
                finally:
                    self._idle.discard(wire.socket)
                await self._answer(await self._request(wire, size), connection, near)

    def _secured(self, caller: socket.socket, near: bool) -> socket.socket:
        """An accepted connection, with TLS if its port has it. Closes it on errors."""
        try:
            prepare(caller)
            if self._tls is None or near:
                return caller
            return self._tls.wrap_socket(caller, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            caller.close()
            raise

    async def _request(self, wire: Wire, size: int) -> pb.DataRequest:
        """A request of so many bytes. Raises TimeoutError if it does not arrive in time."""
        if size <= _SMALL_BYTES:
            return _parse(await wire.body(size))
        async with asyncio.timeout(_STALL_SECONDS), self._large:
            return _parse(await wire.body(size))

    async def _admitted(self, wire: Wire) -> bool:
        """Whether a caller shows a ticket, which it gets back."""
        ticket = bytearray(TICKET_BYTES)
        async with asyncio.timeout(TICKET_SECONDS):
            if isinstance(wire.socket, ssl.SSLSocket):
                await wire.ready.attempt(wire.socket.do_handshake, None)
            await wire.fill(memoryview(ticket))
        if not self._tickets.redeem(bytes(ticket)):
            return False
        await wire.send(memoryview(ticket))
        return True

    async def _answer(self, request: pb.DataRequest, connection: "_Connection", near: bool) -> None:
        call = request.WhichOneof("call")
        context = propagate.extract({"traceparent": request.traceparent})
        with span(str(call), trace.SpanKind.SERVER, context):
            try:
                await self._call(request, call, connection, near)
            except (OSError, HungUp):
                raise
            except Exception as error:
                telemetry.record_error(error)
                status, message = grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}"
                if isinstance(error, ServiceError):
                    status, message = error.status, errors.details(error)
                else:
                    log.exception("unexpected error in %s of the data plane", call)
                await connection.fail(pb.DataError(status=status.value[0], message=message))

    async def _call(self, request: pb.DataRequest, call: str | None, connection: "_Connection", near: bool) -> None:
        match call:
            case "lookup":
                hits = await self._calls.lookup(request.lookup, near=near, waiting=connection.wire.ready.cancelling)
                await self._answer_leased(hits.lease, connection, lookup=hits)
            case "find":
                stored = await self._calls.find(request.find, near=near, waiting=connection.wire.ready.cancelling)
                if request.find.sizes:
                    with connection.wire.ready.cancelling():
                        async with self._calls.reading_found(stored, request.find.sizes) as frames:
                            await connection.send_entries(frames, find=stored)
                else:
                    await self._answer_leased(stored.lease, connection, find=stored)
            case "release":
                await connection.answer(release=self._calls.release(request.release))
            case "fetch":
                # A caller that is gone may leave a full window, into which nothing can be sent.
                with connection.wire.ready.cancelling():
                    async with self._calls.reading(request.fetch) as (size, frames):
                        await connection.send_entries(frames, bytes=size)
            case "fetch_all":
                with connection.wire.ready.cancelling():
                    async with self._calls.reading_all(request.fetch_all) as (sizes, frames):
                        await connection.send_entries(frames, sizes=pb.Sizes(bytes=sizes))
            case "put":
                await connection.answer(put=await self._calls.store(request.put, connection.receive_entry))
            case None:
                raise HungUp

    async def _answer_leased(self, lease: int, connection: "_Connection", **result: Any) -> None:
        """Sends a response; releases the lease if the caller hung up, who never learns of it."""
        try:
            await connection.answer(**result)
        except BaseException:
            self._calls.release(pb.ReleaseRequest(lease=lease))
            raise


class _Connection:
    """One end of a connection.

    sending: whether bytes were announced that are not sent yet.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.sending = False

    async def receive_entry(self, writer: Writer) -> None:
        """Has the caller send an entry's bytes, and receives them where they are stored.

        If they can't be, receives and drops the rest. Raises TimeoutError if the caller sends nothing for 30 s.
        """
        await self.answer(reserved=True)
        left = writer.size
        try:
            while left:
                space = writer.space(min(PIECE_BYTES, left))
                await self._fill(space)
                left -= len(space)
                await writer.filled(space)
        except ServiceError:
            writer.abort()
            scratch = memoryview(bytearray(min(left, PIECE_BYTES)))
            while left:
                await self._fill(scratch[:left])
                left -= min(left, len(scratch))
            raise

    async def send_entries(self, frames: AsyncIterator[memoryview], **announced: Any) -> None:
        """Answers with what is announced, and sends the bytes of entries."""
        async for frame in frames:
            # Not before: the first one may fail with a status.
            if not self.sending:
                await self.answer(**announced)
                self.sending = True
            await self.wire.send(frame)
        if not self.sending:
            await self.answer(**announced)
        self.sending = False

    async def answer(self, **result: Any) -> None:
        """Raises TimeoutError if the caller reads nothing for 30 s, as does `send_entries`."""
        await self.wire.send(encode(pb.DataResponse(**result)))

    async def fail(self, error: pb.DataError) -> None:
        """Reports an error. Raises HungUp, upon which the connection is closed, if bytes were announced."""
        if self.sending:
            raise HungUp
        await self.answer(error=error)

    async def _fill(self, into: memoryview) -> None:
        into = into[self.wire.take(into) :]
        while into:
            into = into[await self.wire.receive(into) :]


def _bind_unix(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # stale: its service's lock on the directory, or on the address, was taken
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        with process.private_sockets():
            listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _name(listener: socket.socket) -> str:
    at = listener.getsockname()
    return f"unix:{os.fsdecode(at)}" if listener.family is socket.AF_UNIX else f"{at[0]}:{at[1]}"
