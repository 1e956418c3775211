"""The OpenAI-compatible HTTP endpoint: completions, models and embeddings, over the same methods as gRPC."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from aiohttp import HttpVersion11, web

from fusionkv.gateway.application import Application
from fusionkv.gateway.auth.access import GATEWAY, Bearer
from fusionkv.gateway.auth.admission import AdmittedCall
from fusionkv.gateway.client import results
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.http import replies, requests
from fusionkv.gateway.http.listener import Handler, Listener, UnreadBody
from fusionkv.gateway.retrieval.base import no_corpus
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument

# Lists and objects, also in texts. Without a limit, 4 MiB of empty ones would take 120 MB while they are parsed.
_MAX_BRACKETS = 1 << 16
# X-Accel-Buffering tells nginx to pass events on at once.
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_STREAM = web.RequestKey("stream", web.StreamResponse)
CallHandler = Callable[[web.Request, AdmittedCall], Awaitable[web.StreamResponse]]


class HTTPServer(Listener):
    """The OpenAI-compatible endpoint. A request is cancelled when its client disconnects."""

    name = "fusionkv-gateway-http"

    def __init__(self, config: GatewayConfig, application: Application, bearer: Bearer | None) -> None:
        super().__init__(config, bearer)
        self._application = application
        # Names of Kubernetes; vLLM's /health fails when its engine can't answer.
        self.get("/livez", _alive)
        for path in ("/readyz", "/health"):
            self.get(path, self._ready)
        self.get("/v1/models", self._admitted("List", self._models))
        self.get("/v1/models/{model}", self._admitted("List", self._model))
        self.post("/v1/chat/completions", self._admitted("Generate", partial(self._complete, False)))
        self.post("/v1/completions", self._admitted("Generate", partial(self._complete, True)))
        self.post("/v1/embeddings", self._admitted("Embed", self._embed, like="Retrieve"))

    def _admitted(self, method: str, handler: CallHandler, *, like: str = "") -> Handler:
        """A handler of admitted calls of `method`, from those who may call the RPC `like`, or `method`."""

        async def admitted(request: web.Request) -> web.StreamResponse:
            try:
                async with self._application.admission.admitted(method) as call:
                    return await handler(request, call)
            except Exception as error:
                # Only now it is counted as the call's, and says no address that the caller may not see.
                stream = request.get(_STREAM)
                if stream is None or not stream.prepared or isinstance(error, ConnectionError):
                    raise
                replies.record(error)
                await stream.write(_event(json.dumps(replies.error_body(error))))
                await stream.write_eof()
                return stream

        return self.guarded(GATEWAY + (like or method), admitted)

    def failed(self, error: Exception) -> web.Response:
        if isinstance(error, web.HTTPException):  # such as for a path that there is not
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            # The base URL may lack its /v1, or the client ask for an API that there is not.
            paths = ", ".join(sorted({resource.canonical for resource in self.app.router.resources()}))
            said = f"no such path; known: {paths}" if isinstance(error, web.HTTPNotFound) else error.reason
            body = replies.error_of(said, "invalid_request_error")
            return web.json_response(body, status=error.status, headers=allowed)
        replies.record(error)
        body = replies.error_body(error)
        status = error.http_status if isinstance(error, UnreadBody) else replies.status(error)
        return web.json_response(body, status=status, headers=replies.headers(error))

    async def _ready(self, request: web.Request) -> web.Response:
        """Reports whether questions would be answered, to probes without a token."""
        if await self._application.ready():
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "not ready"}, status=503)

    async def _complete(self, text: bool, request: web.Request, call: AdmittedCall) -> web.StreamResponse:
        vllm = self._config.decode == "vllm"
        completion = requests.completion(await self._json(request), text, self._config.max_top_k, vllm)
        if completion.passed:
            return await self._pass_on(request, completion, call)
        async with contextlib.aclosing(self._application.generate(call, completion.request)) as responses:
            events = (results.event(response) async for response in responses)
            if completion.stream:
                return await _stream(request, replies.chunks(completion, events))
            return web.json_response(await replies.whole(completion, events))

    async def _pass_on(
        self, request: web.Request, completion: requests.CompletionRequest, call: AdmittedCall
    ) -> web.StreamResponse:
        """The reply of vLLM to a chat that only it can answer."""
        asked = completion.request, completion.passed, completion.stream
        async with contextlib.aclosing(self._application.passed(call, *asked)) as responses:
            chunks = replies.passed(completion, responses)
            if completion.stream:
                return await _stream(request, chunks)
            (whole,) = [chunk async for chunk in chunks]
            return web.json_response(whole)

    async def _embed(self, request: web.Request, call: AdmittedCall) -> web.Response:
        embedding = requests.embeddings(await self._json(request))
        asked = embedding.texts, embedding.model, embedding.dimensions
        try:
            vectors, model, tokens = await self._application.embed(call, *asked)
        except InvalidArgument as error:
            raise requests.BadRequest(str(error), "dimensions") from error
        body = await asyncio.to_thread(replies.embeddings, embedding, vectors, model, tokens)
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _models(self, request: web.Request, call: AdmittedCall) -> web.Response:
        return web.json_response(replies.models(await self._corpora(call)))

    async def _model(self, request: web.Request, call: AdmittedCall) -> web.Response:
        name = request.match_info["model"]
        for item in await self._corpora(call):
            if item.name == name:
                return web.json_response(replies.model(item))
        raise no_corpus(name[:80])

    async def _corpora(self, call: AdmittedCall) -> list[pb.Item]:
        """All corpora, preceded by NO_CORPUS."""
        found = await call.tenant.retrieval.corpora()
        return [pb.Item(name=requests.NO_CORPUS), *(pb.Item(**asdict(item)) for item in found)]

    async def _json(self, request: web.Request) -> Any:
        return parse(await self.body(request))


async def _alive(request: web.Request) -> web.Response:
    """Reports that the gateway takes requests, to probes without a token."""
    return web.json_response({"status": "ok"})


async def _stream(request: web.Request, chunks: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
    """Streams server-sent events. An error after the first event is sent as the last one, by `_admitted`."""
    response = request[_STREAM] = web.StreamResponse(headers=_HEADERS)
    if request.version < HttpVersion11:  # nginx's default; without chunks, only the connection's end ends a stream
        response.force_close()
    async for chunk in chunks:
        if not response.prepared:
            await response.prepare(request)
        await response.write(_event(json.dumps(chunk)))
    await response.write(_event("[DONE]"))
    await response.write_eof()
    return response


def parse(body: bytes) -> Any:
    """Parses JSON; refuses NaN and infinities, which are not JSON, and too many brackets. Raises InvalidArgument."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def finite(number: str) -> float:
        if math.isinf(value := float(number)):
            raise InvalidArgument("the body has a number of more than 1.7e308")
        return value

    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        raise InvalidArgument(f"the body has more than {_MAX_BRACKETS} brackets, [ and {{")
    try:
        # Always UTF-8, as JSON requires, with or without a byte order mark:
        # decoding a charset of the caller's choice may be quadratic (punycode).
        return json.loads(body.decode("utf-8-sig"), parse_float=finite, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("the body is not valid JSON in UTF-8") from error


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
