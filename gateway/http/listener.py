"""An HTTP server that runs beside the gRPC server: addresses, TLS, limits, drain, one span per request."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import HttpVersion11, web
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

from fusionkv.gateway.auth.access import CALLER, Bearer
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.http.connections import MALFORMED, Connection, Connections
from fusionkv.protos.observe import rejected
from fusionkv.protos.runtime.errors import InvalidArgument

tracer = trace.get_tracer(__name__)
# Holds the longest conversation and passages with every character escaped (6 bytes), and other fields.
_MAX_BODY = 4 << 20
# As for gRPC connections: limits how long a client stays connected whose certificate is no longer trusted.
_CONNECTION_SECONDS = 3600.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Listener:
    """Serves and drains beside the gRPC server. A request is cancelled when its client disconnects."""

    name = "http"

    def __init__(self, addresses: Sequence[str], config: GatewayConfig, bearer: Bearer | None = None) -> None:
        self._addresses = addresses
        self._config = config
        self._bearer = bearer
        self.app = web.Application(
            middlewares=[self._trace, self._limit_age, self._handle_errors], client_max_size=_MAX_BODY
        )
        self._runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=config.drain_seconds)
        self._servers: list[asyncio.Server] = []

    def get(self, path: str, handler: Handler) -> None:
        """Adds a handler of GET and HEAD. Call it before `start`."""
        self.app.router.add_get(path, handler, expect_handler=_expected)

    def post(self, path: str, handler: Handler) -> None:
        """Adds a handler of POST. Call it before `start`."""
        self.app.router.add_post(path, handler, expect_handler=_expected)

    def guarded(self, method: str, handler: Handler, token: Callable[[str], str] = str) -> Handler:
        """Requires a token that may call `method`, before the body is read, if calls require a token.

        `token` converts the value of the header Authorization.
        """

        async def guarded(request: web.Request) -> web.StreamResponse:
            if self._bearer is not None:
                given = [token(value) for value in request.headers.getall("Authorization", [])]
                CALLER.set(await self._bearer.admit(given, method))
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

        def connection() -> Connection:
            return Connection(web_server, connections, self._config)

        tls = self._config.server_tls.context() if self._config.server_tls else None
        # http_head_seconds limits the TLS handshake too.
        seconds = self._config.http_head_seconds if tls else None
        bound = []
        for address in self._addresses:
            if address.startswith("unix:"):
                path = address.removeprefix("unix:")
                self._servers.append(await loop.create_unix_server(connection, path))
                bound.append(address)
                continue
            host, _, port = address.rpartition(":")
            server = await loop.create_server(
                connection, host.strip("[]"), int(port), ssl=tls, ssl_handshake_timeout=seconds,
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
            web.HTTPRequestTimeout: the body took too long; the connection closes after the response.
            web.HTTPRequestEntityTooLarge: the body is larger than 4 MiB.
            InvalidArgument: the body is malformed.
        """
        try:
            async with asyncio.timeout(self._config.http_body_seconds):
                return await request.read()
        except TimeoutError:
            rejected.note("http_body_timeout")
            request.protocol.close()
            raise web.HTTPRequestTimeout from None
        except MALFORMED as error:
            rejected.note("http_body")
            raise InvalidArgument("the body is malformed: its chunked encoding or compression is invalid") from error

    @web.middleware
    async def _trace(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Records one span per request, as a child of the caller's span."""
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        attributes = {"http.request.method": request.method, "url.path": request.path, "url.scheme": request.scheme}
        with tracer.start_as_current_span(
            f"{request.method} {route}".strip(),
            context=propagate.extract(request.headers),
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
        assert isinstance(connection, Connection)  # `start` has made it
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


async def _expected(request: web.Request) -> None:
    """Answers `Expect: 100-continue`. aiohttp's handler echoes the header's value, and fails if that is not text."""
    if request.version < HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="the only supported expectation is 100-continue")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # The interim response must not count as a part of the response.
    request.writer.output_size = 0
