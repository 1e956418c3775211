"""HTTP connections that can't be held open: how many there are, and how long each may take for what.

aiohttp has a limit on idle connections alone. Here a head has to arrive in time, and a caller has to read what it is
sent; the time of a body is held where it is read (`Listener.body`). A response takes as long as it takes.
"""

import asyncio
import ipaddress
import logging
from collections import Counter
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.observe import rejected

log = logging.getLogger(__name__)
MALFORMED = (web.RequestPayloadError, HttpProcessingError)
"""What aiohttp raises for a body that it can't parse."""
# The longest token has 8 KiB; browsers and proxies add a few KiB.
_MOST_LINE, _MOST_HEADERS, _MOST_HEAD = 8190, 100, 64 << 10
# A body that nobody wants, behind a refusal: so long it is read over, so that the caller sees the refusal.
_OVER_SECONDS = 2.0
_MOST_REFUSED = 64
# Somebody with an IPv6 network has all of its addresses.
_NETWORK_BITS = 64
_FULL = {
    "http_connections": b"HTTP/1.1 503 Service Unavailable",
    "http_connections_per_address": b"HTTP/1.1 429 Too Many Requests",
}
_REFUSAL = b"\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Connections:
    """The open connections of a listener, counted in all and by address. Those of unix sockets have none."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._open: Counter[str] = Counter()
        self.refused = 0
        """Those over a limit that are still open: they are being told."""

    def enter(self, address: str) -> str:
        """Counts one more, or gives the limit that it is over."""
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


class Connection(web.RequestHandler):
    """One connection. What is wrong with what comes in is counted, and no part of it is logged."""

    def __init__(self, server: web.Server, connections: Connections, config: GatewayConfig) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own way of having none
            keepalive_timeout=config.http_idle_seconds,
            lingering_time=min(_OVER_SECONDS, config.http_body_seconds),
            max_line_size=_MOST_LINE,
            max_field_size=_MOST_LINE,
            max_headers=_MOST_HEADERS,
        )
        self._connections, self._config = connections, config
        self._socket: asyncio.Transport | None = None
        self._address: str | None = None  # None where it was refused
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        address = _address(transport)
        if full := self._connections.enter(address):
            rejected.note(full)
            self._refuse(full)
            return
        self._address = address
        super().connection_made(transport)
        assert self._task_handler is not None
        self._task_handler.add_done_callback(self._ended)
        self._within("http_head_timeout", self._config.http_head_seconds)

    def connection_lost(self, exc: BaseException | None) -> None:
        for name in list(self._timers):
            self._done(name)
        self._socket = None
        if self._address is None:
            self._connections.refused -= 1
        else:
            self._connections.leave(self._address)
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._address is None:
            return
        parsed, idle = self._request_count, self._waiter is not None
        super().data_received(data)
        if self._buffer_paused:
            # 32 requests wait for their turn: no client does that, and aiohttp would take the square of what follows
            # in time, 9.8 s for 512 KB of small requests.
            rejected.note("http_pipelined")
            self._abort()
        elif self._request_count > parsed:
            self._head_bytes = 0
            self._done("http_head_timeout")
        elif idle or "http_head_timeout" in self._timers:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD:
                rejected.note("http_head")
                self._abort()
            elif "http_head_timeout" not in self._timers:
                self._within("http_head_timeout", self._config.http_head_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._within("http_send_timeout", self._config.http_send_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._done("http_send_timeout")

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to a request that could not be parsed, or that no handler took care of; the last one."""
        if isinstance(exc, HttpProcessingError):
            rejected.note("http_head")
        elif exc is not None:
            log.error("unforeseen error in an HTTP request", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another response is sent already")
        response = web.Response(status=status, text="the request is malformed\n" if status == 400 else None)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **named: Any) -> None:
        """What is raised where there is no request to answer: behind a response, a body is read over."""
        error = named.get("exc_info")
        if isinstance(error, MALFORMED):
            rejected.note("http_body")
        else:
            log.error("unforeseen error on an HTTP connection", exc_info=error)

    def _refuse(self, full: str) -> None:
        """Tells the caller. What it has sent is read over, since a socket that is closed before drops the refusal."""
        assert self._socket is not None
        self._connections.refused += 1
        if self._connections.refused > _MOST_REFUSED:
            self._abort()
            return
        self._socket.write(_FULL[full] + _REFUSAL)
        if self._socket.can_write_eof():
            self._socket.write_eof()
        else:
            self._socket.close()
        self._timers[full] = self._loop.call_later(_OVER_SECONDS, self._abort)

    def _ended(self, task: object) -> None:
        """There will be no more requests: what is left to send has to go."""
        if self._socket is not None:
            self._within("http_send_timeout", self._config.http_send_seconds)

    def _within(self, name: str, seconds: float) -> None:
        self._done(name)
        self._timers[name] = self._loop.call_later(seconds, self._late, name)

    def _done(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    def _late(self, name: str) -> None:
        self._timers.pop(name, None)
        rejected.note(name)
        self._abort()

    def _abort(self) -> None:
        if self._socket is not None:
            self._socket.abort()


def _address(transport: asyncio.Transport) -> str:
    """The caller's IP address, of IPv6 its network; empty for a unix socket."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    ip = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.ip_network((ip, _NETWORK_BITS), strict=False))
