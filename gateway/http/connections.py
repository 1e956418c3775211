"""HTTP connections with limits on their number and on the time of each phase, against slow or idle clients.

aiohttp limits idle connections only. This module also limits the time for a head to arrive and for a response to be
read; `Listener.body` limits the time of a body. The time until a response starts is not limited here.
"""

import asyncio
import ipaddress
import logging
import time
from collections import Counter
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.observe import rejected

log = logging.getLogger(__name__)
MALFORMED = (web.RequestPayloadError, HttpProcessingError)
"""Errors of aiohttp for a body that it can't parse."""
# Tokens have up to 8 KiB; browsers and proxies add a few KiB.
_MAX_LINE, _MAX_HEADERS, _MAX_HEAD = 8190, 100, 64 << 10
# Time for which the body of a refused request is read and dropped, so that the client receives the refusal.
_DISCARD_SECONDS = 2.0
# An IPv6 client usually controls all addresses of its /64 network.
_NETWORK_BITS = 64


class Connections:
    """The open connections of a listener, counted in total and by address. Unix sockets have no address."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._open: Counter[str] = Counter()

    def enter(self, address: str) -> str:
        """Counts a new connection; returns the name of the limit that it exceeds, or an empty string."""
        if self._open.total() >= self._config.http_connections:
            return "http_connections"
        if address and self._open[address] >= self._config.http_connections_per_address:
            return "http_connections_per_address"
        self._open[address] += 1
        return ""

    def leave(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class HTTPConnection(web.RequestHandler):
    """One connection. Malformed input is counted, but never logged."""

    def __init__(self, server: web.Server, connections: Connections, config: GatewayConfig) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None disables it, despite its type
            auto_decompress=False,  # also of bodies that are refused and dropped: 4 KB may hold 4 MB
            keepalive_timeout=config.http_idle_seconds,
            lingering_time=min(_DISCARD_SECONDS, config.http_body_seconds),
            max_line_size=_MAX_LINE,
            max_field_size=_MAX_LINE,
            max_headers=_MAX_HEADERS,
        )
        self._connections, self._config = connections, config
        self.opened = time.monotonic()
        self._socket: asyncio.Transport | None = None
        self._address: str | None = None  # None if the connection was refused
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        address = _address(transport)
        if full := self._connections.enter(address):
            rejected.note(full)
            transport.abort()
            return
        self._address = address
        super().connection_made(transport)
        assert self._task_handler is not None
        # There will be no more requests: the time for sending what remains is limited.
        self._task_handler.add_done_callback(
            lambda _: self._limit("http_send_timeout", self._config.http_send_seconds)
        )
        self._limit("http_head_timeout", self._config.http_head_seconds)

    def connection_lost(self, exc: BaseException | None) -> None:
        for name in [*self._timers]:
            self._stop(name)
        self._socket = None
        if self._address is not None:
            self._connections.leave(self._address)
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._address is None:
            return
        parsed, idle = self._request_count, self._waiter is not None
        super().data_received(data)
        if self._buffer_paused:
            # 32 pipelined requests are waiting: no client does that, and aiohttp's time is quadratic in what
            # follows, 9.8 s for 512 KB of small requests.
            rejected.note("http_pipelined")
            self._abort()
        elif self._request_count > parsed:
            self._head_bytes = 0
            self._stop("http_head_timeout")
        elif idle or "http_head_timeout" in self._timers:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD:
                rejected.note("http_head")
                self._abort()
            elif "http_head_timeout" not in self._timers:
                self._limit("http_head_timeout", self._config.http_head_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit("http_send_timeout", self._config.http_send_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("http_send_timeout")

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The last response, to a request that could not be parsed or that no handler answered."""
        if isinstance(exc, HttpProcessingError):
            rejected.note("http_head")
        elif exc is not None and not isinstance(exc, ConnectionError):  # which is the end of one whose client left
            log.error("unexpected error in an HTTP request", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("part of another response has already been sent")
        response = web.Response(status=status, text="the request is malformed\n" if status == 400 else None)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Handles errors outside of a request, such as in a body that is discarded after the response."""
        error = kwargs.get("exc_info")
        if isinstance(error, MALFORMED):
            rejected.note("http_body")
        else:
            log.error("unexpected error on an HTTP connection", exc_info=error)

    def _limit(self, name: str, seconds: float) -> None:
        """Limits the time of a phase of the connection: when it is over, it is counted by name, and all ends."""
        self._stop(name)
        if self._socket is not None:
            self._timers[name] = asyncio.get_running_loop().call_later(seconds, self._expired, name)

    def _stop(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def _expired(self, name: str) -> None:
        del self._timers[name]
        rejected.note(name)
        self._abort()

    def _abort(self) -> None:
        if self._socket is not None:
            self._socket.abort()


def _address(transport: asyncio.Transport) -> str:
    """The client's IPv4 address or IPv6 network; empty for a unix socket."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    ip = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.ip_network((ip, _NETWORK_BITS), strict=False))
