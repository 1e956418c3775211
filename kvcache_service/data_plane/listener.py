"""The server of the data plane: listens, and admits callers to connections."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from google.protobuf.message import DecodeError

from fusionkv.kvcache_service.data_plane.answering import Answering
from fusionkv.kvcache_service.data_plane.messages import (
    TICKET_BYTES,
    HungUp,
    Wire,
    accepted,
    prepare,
    shut_down,
    socket_path,
)
from fusionkv.kvcache_service.data_plane.tickets import TICKET_SECONDS, Tickets
from fusionkv.kvcache_service.servicer import KVCacheServicer
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import process, rpc
from fusionkv.protos.runtime.cancellation import background
from fusionkv.protos.runtime.tls import MAX_AGE_SECONDS, ServerTLS

_faults = logs.RateLimitedLog(logging.getLogger(__name__))

# Maximum wait for a caller to read or send the next piece of an entry.
_STALL_SECONDS = 30.0
_MAX_CONNECTIONS = 1024
# Requests above this size are received few at a time: together, connections could otherwise hold 8 GiB.
_SMALL_BYTES, _MAX_LARGE = 64 << 10, 16
_BACKLOG = 128
# Hosts that are every address: of IPv4 and IPv6, and of IPv4.
_EVERY = ("::", "0.0.0.0")
_parse = rpc.bounded(pb.DataRequest)


class DataPlane:
    """Listens beside each address of the service; started and stopped with it (`rpc.Beside`)."""

    def __init__(
        self,
        name: str,
        service: KVCacheServicer,
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
        self._service = service
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
            for address in sorted(self._addresses, key=_narrowness):
                self._bind(address)
        except OSError:
            self._close_listeners()
            raise
        for listener in self._sockets:
            near = listener.family is socket.AF_UNIX
            self._accepting.append(asyncio.create_task(self._accept(listener, near=near)))
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

    def _bind(self, address: str) -> None:
        """Listens beside an address. Further ones get the same port, which is all that a caller is told."""
        if (path := socket_path(address)) is not None:
            # A stale one is replaced: its service's lock on the directory, or on the address, was taken.
            self._sockets.append(process.bind_unix(path))
            return
        host = _host(address)
        family, *_, (ip, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = {listener.getsockname()[0] for listener in self._sockets if listener.family is not socket.AF_UNIX}
        if bound & {ip, _EVERY[0], *(_EVERY[1:] if family is socket.AF_INET else ())}:
            return  # another port of a host that has a listener
        listener = process.bind_port(host, self.port, _BACKLOG)
        self._sockets.append(listener)
        self.port = listener.getsockname()[1]

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
        fault = partial(_faults.warning, "can't accept a connection to the data plane")
        async for caller in accepted(listener, fault):
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
            answering, clock = Answering(wire, self._service, near), asyncio.get_running_loop().time
            newest = clock() + MAX_AGE_SECONDS if isinstance(wire.socket, ssl.SSLSocket) else None
            # Until the listeners are closed.
            while self._sockets:
                self._idle.add(wire.socket)
                try:
                    size = await wire.size(None if newest is None else newest - clock())
                finally:
                    self._idle.discard(wire.socket)
                await answering.answer(await self._request(wire, size))

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


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _narrowness(address: str) -> int:
    """Sorts hosts behind those that include them."""
    host = _host(address)
    return _EVERY.index(host) if host in _EVERY else len(_EVERY)


def _name(listener: socket.socket) -> str:
    at = listener.getsockname()
    return f"unix:{os.fsdecode(at)}" if listener.family is socket.AF_UNIX else f"{at[0]}:{at[1]}"
