"""An HTTP server that runs beside the gRPC server: addresses, TLS, limits, drain, one span per request."""

import asyncio
import ipaddress
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import HttpVersion11, web
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from fusionkv.gateway.auth.access import CALLER, Bearer
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.http.connections import MALFORMED, Connections, HTTPConnection
from fusionkv.gateway.http.origins import Origins
from fusionkv.protos.observe import rejected
from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.admission import Arrivals
from fusionkv.protos.runtime.errors import DeadlineExceeded, InvalidArgument, PermissionDenied

tracer = trace.get_tracer(__name__)
# Holds the longest conversation and passages with every character escaped (6 bytes), and other fields.
_MAX_BODY = 4 << 20
# Connections that wait to be accepted, as of the data plane.
_BACKLOG = 128
# As for gRPC connections: limits how long a client stays connected whose certificate is no longer trusted.
_CONNECTION_SECONDS = 3600.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class UnreadBody(InvalidArgument):
    """A request whose body is not read, and the status of HTTP that says why."""

    def __init__(self, http_status: int, message: str) -> None:
        super().__init__(message)
        self.http_status = http_status


class Listener:
    """Serves and drains beside the gRPC server. A request is cancelled when its client disconnects."""

    name = "http"

    def __init__(self, config: GatewayConfig, bearer: Bearer | None = None) -> None:
        self._config = config
        self._bearer = bearer
        self._arrivals = Arrivals(seconds=config.http_body_seconds)
        self.app = web.Application(
            middlewares=[self._trace, self._limit_age, self._handle_errors], client_max_size=_MAX_BODY
        )
        self._origins = Origins(config.http_allowed_origins)
        self._origins.attach(self.app)
        self._runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=config.drain_seconds)
        self._servers: list[asyncio.Server] = []

    def get(self, path: str, handler: Handler) -> None:
        """Adds a handler of GET and HEAD. Call it before `start`."""
        self.app.router.add_get(path, handler, expect_handler=_expected)

    def post(self, path: str, handler: Handler) -> None:
        """Adds a handler of POST. Call it before `start`."""
        self.app.router.add_post(path, handler, expect_handler=_expected)

    def guarded(self, method: str, handler: Handler) -> Handler:
        """Requires a token that may call `method`, if calls require a token, before the body is read."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if self._bearer is None:
                check_site(request, self._origins)
            else:
                CALLER.set(await self._bearer.admit(request.headers.getall("Authorization", []), method))
            return await handler(request)

        return guarded

    def failed(self, error: Exception) -> web.Response:
        """The response for an error, which may be a web.HTTPException."""
        raise NotImplementedError

    async def start(self) -> list[str]:
        """Starts to listen; returns the addresses. Raises OSError."""
        await self._runner.setup()
        web_server = self._runner.server
        assert web_server is not None
        connections = Connections(self._config)
        loop = asyncio.get_running_loop()

        def connection() -> HTTPConnection:
            return HTTPConnection(web_server, connections, self._config)

        tls = self._config.server_tls.context() if self._config.server_tls else None
        # http_head_seconds limits the TLS handshake too.
        seconds = self._config.http_head_seconds if tls else None
        bound = []
        for address in self._config.http_listen:
            if address.startswith("unix:"):
                path = address.removeprefix("unix:")
                with process.private_sockets():
                    self._servers.append(await loop.create_unix_server(connection, path))
                bound.append(address)
                continue
            host, _, port = address.rpartition(":")
            # asyncio's own socket at "::" takes no calls by IPv4.
            listening = process.bind_port(host.strip("[]"), int(port), _BACKLOG)
            server = await loop.create_server(
                connection, sock=listening, backlog=_BACKLOG, ssl=tls, ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )  # fmt: skip
            self._servers.append(server)
            bound.append(f"{host}:{server.sockets[0].getsockname()[1]}")
        return bound

    async def stop(self, seconds: float) -> None:
        """Closes idle connections and waits up to drain_seconds for requests in flight; `seconds` is the same."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    async def body(self, request: web.Request) -> bytes:
        """Reads the body of a request.

        Raises:
            UnreadBody: it is compressed, of another type or larger than 4 MiB, or took too long; then the connection
                closes after the response.
            ResourceExhausted: too many bodies are arriving.
            InvalidArgument: the body is malformed.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnreadBody(415, "compressed bodies are not supported: omit Content-Encoding")
        # A page of another site may send other types without asking the browser, which would ask this server (CORS).
        if request.content_type != "application/json":
            raise UnreadBody(415, "the body must have Content-Type: application/json")
        try:
            async with self._arrivals.place():
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise UnreadBody(413, f"the body has more than {_MAX_BODY} bytes") from None
        except DeadlineExceeded:
            rejected.note("http_body_timeout")
            request.protocol.close()
            raise UnreadBody(408, "the body took too long to arrive") from None
        except MALFORMED as error:
            rejected.note("http_body")
            raise InvalidArgument("the body is malformed: its chunked encoding is invalid") from error

    @web.middleware
    async def _trace(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Records one span per request, as a child of the caller's span."""
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        attributes = {"http.request.method": request.method, "url.path": request.path, "url.scheme": request.scheme}
        with tracer.start_as_current_span(
            f"{request.method} {route}".strip(),
            context=_context(request),
            kind=SpanKind.SERVER,
            attributes={**attributes, **({"http.route": route} if route else {})},
        ) as span:
            response = await handler(request)
            span.set_attribute("http.response.status_code", response.status)
            return response

    @web.middleware
    async def _limit_age(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Closes a connection that has been open for _CONNECTION_SECONDS."""
        response = await handler(request)
        connection = request.protocol
        assert isinstance(connection, HTTPConnection)  # `start` has made it
        if time.monotonic() - connection.opened > _CONNECTION_SECONDS:
            response.force_close()
        return response

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:
            raise
        except Exception as error:
            return self.failed(error)


def _context(request: web.Request) -> Context | None:
    """The context of the caller's span; None without one."""
    try:
        return propagate.extract(request.headers)
    except UnicodeEncodeError:  # it encodes the header `baggage`, which may hold bytes that are no text
        rejected.note("trace_headers")
        return None


def check_site(request: web.Request, allowed: Origins) -> None:
    """Refuses what another site has a browser on this machine send to a server without tokens.

    The name of another site may lead here (DNS rebinding), and its pages then read the responses. So, on a connection
    within the machine, Host must name the machine, and Origin the machine or an allowed origin.

    Raises PermissionDenied if one of the headers does not.
    """
    here = request.transport.get_extra_info("sockname") if request.transport else None
    if not isinstance(here, tuple) or not _is_local(here[0]):
        return
    origins = [origin for origin in request.headers.getall("Origin", []) if not allowed.allows(origin)]
    for site in (*(f"//{host}" for host in request.headers.getall("Host", [])), *origins):
        if not _is_local(_host(site)):
            raise PermissionDenied(
                f"the request is for or from {site.removeprefix('//')[:80]!r}; without tokens, a server on this "
                "machine serves localhost only: set auth_tokens or http_allowed_origins, or have the proxy send "
                "Host: localhost"
            )


def _host(site: str) -> str:
    try:
        return urlsplit(site).hostname or ""
    except ValueError:
        return ""


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


async def _expected(request: web.Request) -> None:
    """Answers `Expect: 100-continue`. aiohttp's handler echoes the header's value, and fails if that is not text."""
    if request.version < HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="the only supported expectation is 100-continue")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # The interim response must not count as a part of the response.
    request.writer.output_size = 0
