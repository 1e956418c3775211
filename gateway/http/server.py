"""The OpenAI-compatible HTTP endpoint: chat completions and models, in front of the same RPCs as gRPC's."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import HttpVersion11, web
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

from fusionkv.gateway import access, results
from fusionkv.gateway.bearer import Bearer
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.http import chat, failures, replies
from fusionkv.gateway.results import Event
from fusionkv.gateway.servicer import SERVICE, GatewayServicer
from fusionkv.protos import telemetry
from fusionkv.protos.errors import InvalidArgument, NotFound, ServiceError
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb

log = logging.getLogger(__name__)
tracer = trace.get_tracer(__name__)
# The longest question with every character escaped, and room around it.
_MOST_BODY = 1 << 20
_PAGE = 1000
# As gRPC's connections: a caller whose certificate is trusted no more is gone by then.
_CONNECTION_SECONDS = 3600.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Call:
    """HTTP requests bring no deadline: the configured one holds."""

    def time_remaining(self) -> None:
        return None


class HTTPServer:
    """Serves and drains beside the gRPC server. A caller that disconnects cancels its request."""

    name = "fusionkv-gateway-http"

    def __init__(self, config: GatewayConfig, servicer: GatewayServicer, bearer: Bearer | None) -> None:
        self._config = config
        self._servicer = servicer
        self._bearer = bearer
        self._seen: WeakKeyDictionary[asyncio.Transport, float] = WeakKeyDictionary()
        app = web.Application(middlewares=[self._traced, self._failing], client_max_size=_MOST_BODY)
        router, expect = app.router, _expected
        router.add_post("/v1/chat/completions", self._guarded("Generate", self._complete), expect_handler=expect)
        router.add_get("/v1/models", self._guarded("List", self._models), expect_handler=expect)
        router.add_get("/v1/models/{model}", self._guarded("List", self._model), expect_handler=expect)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=config.drain_seconds
        )

    async def start(self) -> list[str]:
        """Listens; returns the addresses. Raises OSError."""
        await self._runner.setup()
        tls = self._config.server_tls.context() if self._config.server_tls else None
        bound = []
        for address in self._config.http_listen:
            if address.startswith("unix:"):
                await web.UnixSite(self._runner, address.removeprefix("unix:")).start()
                bound.append(address)
                continue
            host, _, port = address.rpartition(":")
            await web.TCPSite(self._runner, host.strip("[]"), int(port), ssl_context=tls).start()
            bound.append(f"{host}:{self._runner.addresses[-1][1]}")
        return bound

    async def stop(self, seconds: float) -> None:
        """Closes idle connections and waits for requests in flight."""
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        wanted = chat.read(await self._json(request))
        async with contextlib.aclosing(self._servicer.Generate(wanted.request, _Call())) as responses:
            events = (results.event(response) async for response in responses)
            if wanted.stream:
                return await self._stream(request, wanted, events)
            return web.json_response(await replies.whole(wanted, events))

    async def _stream(
        self, request: web.Request, wanted: chat.Chat, events: AsyncIterator[Event]
    ) -> web.StreamResponse:
        """Server-sent events. Once the first is out, an error is one of them, and the last."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async for chunk in replies.chunks(wanted, events):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(_event(json.dumps(chunk)))
        except Exception as error:
            if not response.prepared or isinstance(error, ConnectionError):
                raise
            _record(error)
            await response.write(_event(json.dumps(failures.body(error))))
        else:
            await response.write(_event("[DONE]"))
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(replies.models(await self._corpora()))

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        for item in await self._corpora():
            if item.name == name:
                return web.json_response(replies.model(item))
        raise NotFound(f"no corpus {name[:80]!r}")

    async def _corpora(self) -> list[pb.Item]:
        items: list[pb.Item] = []
        token = ""
        while True:
            page = await self._servicer.List(pb.ListRequest(page_size=_PAGE, page_token=token), _Call())
            items.extend(page.items)
            token = page.next_page_token
            if not token:
                return items

    async def _json(self, request: web.Request) -> Any:
        try:
            async with asyncio.timeout(self._config.request_seconds):
                return await request.json(loads=_strict)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument("the body is no JSON in UTF-8") from error

    def _guarded(self, method: str, handler: Handler) -> Handler:
        """Asks for a token that may call the RPC, before anything of the body is read."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if self._bearer is not None:
                given = request.headers.getall("Authorization", [])
                access.enter(await self._bearer.admit(given, f"/{SERVICE.full_name}/{method}"))
            return await handler(request)

        return guarded

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
    async def _failing(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors to JSON."""
        try:
            response = await handler(request)
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            said = failures.of(error.reason, "invalid_request_error")
            response = web.json_response(said, status=error.status, headers=allowed)
        except ConnectionError:
            raise
        except Exception as error:
            _record(error)
            code = failures.status(error)
            response = web.json_response(failures.body(error), status=code, headers=failures.headers(error))
        if self._is_old(request):
            response.force_close()
        return response

    def _is_old(self, request: web.Request) -> bool:
        """Whether the request came on a connection that has been open for long."""
        if request.transport is None:
            return False
        return time.monotonic() - self._seen.setdefault(request.transport, time.monotonic()) > _CONNECTION_SECONDS


async def _expected(request: web.Request) -> None:
    """As aiohttp's own, which quotes what it was sent and fails where that is no text."""
    if request.version < HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: 100-continue is all that can be expected")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # It is no part of the response.
    request.writer.output_size = 0


def _record(error: Exception) -> None:
    if failures.status(error) >= 500:
        telemetry.record_error(error)
    if not isinstance(error, ServiceError):
        log.error("unforeseen error in an HTTP request", exc_info=error)


def _strict(text: str) -> Any:
    """JSON without NaN and infinities, which are none."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
