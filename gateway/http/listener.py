"""An HTTP server beside the gateway's gRPC server: addresses, TLS, limits, drain, a span for each request."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from weakref import WeakKeyDictionary

from aiohttp import HttpVersion11, web
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.http.connections import MALFORMED, Connection, Connections
from fusionkv.protos.observe import rejected
from fusionkv.protos.runtime.errors import InvalidArgument

tracer = trace.get_tracer(__name__)
# The longest conversation and passages, with every character escaped (6 bytes), and room around them.
_MOST_BODY = 4 << 20
# As gRPC's connections: a caller whose certificate is trusted no more is gone by then.
_CONNECTION_SECONDS = 3600.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Call:
    """HTTP requests bring no deadline: the configured one holds."""

    def time_remaining(self) -> None:
        return None


class Listener:
    """Serves and drains beside the gRPC server. A caller that disconnects cancels its request."""

    name = "http"

    def __init__(self, addresses: Sequence[str], config: GatewayConfig) -> None:
        self._addresses = addresses
        self._config = config
        self._seen: WeakKeyDictionary[asyncio.Transport, float] = WeakKeyDictionary()
        self.app = web.Application(
            middlewares=[self._traced, self._ageing, self._failing], client_max_size=_MOST_BODY
        )
        self._runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=config.drain_seconds)
        self._servers: list[asyncio.Server] = []

    def get(self, path: str, handler: Handler) -> None:
        """Answers GET and HEAD there. Before `start`."""
        self.app.router.add_get(path, handler, expect_handler=_expected)

    def post(self, path: str, handler: Handler) -> None:
        """Answers POST there. Before `start`."""
        self.app.router.add_post(path, handler, expect_handler=_expected)

    def failed(self, error: Exception) -> web.Response:
        """What a caller is told of an error; web.HTTPException among them."""
        raise NotImplementedError

    async def start(self) -> list[str]:
        """Listens; returns the addresses. Raises OSError."""
        await self._runner.setup()
        served = self._runner.server
        assert served is not None
        connections = Connections(self._config)
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(served, connections, self._config)

        tls = self._config.server_tls.context() if self._config.server_tls else None
        # A handshake is in time, or else there is no connection.
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
        """Closes idle connections and waits for requests in flight."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    async def body(self, request: web.Request) -> bytes:
        """The body of a request.

        Raises:
            web.HTTPRequestTimeout: it took too long; the connection ends with the response.
            web.HTTPRequestEntityTooLarge: it is larger than 4 MiB.
            InvalidArgument: it is malformed.
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
            raise InvalidArgument("the body is malformed: its chunks or its compression can't be read") from error

    @web.middleware
    async def _traced(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """One span a request, which goes on with the caller's trace."""
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
    async def _ageing(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Closes a connection that has been open for long."""
        response = await handler(request)
        if request.transport is not None:
            opened = self._seen.setdefault(request.transport, time.monotonic())
            if time.monotonic() - opened > _CONNECTION_SECONDS:
                response.force_close()
        return response

    @web.middleware
    async def _failing(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors to what this server's callers read."""
        try:
            return await handler(request)
        except ConnectionError:
            raise
        except Exception as error:
            return self.failed(error)


async def _expected(request: web.Request) -> None:
    """As aiohttp's own, which quotes what it was sent and fails where that is no text."""
    if request.version < HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: 100-continue is all that can be expected")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # It is no part of the response.
    request.writer.output_size = 0
