"""Replies in OpenAI's format: completions, whole or streamed; embeddings; corpora as models; and errors."""

import base64
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from typing import Any

import grpc
import numpy as np

from fusionkv.gateway.client import results
from fusionkv.gateway.client.results import Event, Passage, Sources, Summary, Token, as_dict
from fusionkv.gateway.http.requests import BadRequest, CompletionRequest, EmbeddingRequest
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.observe import telemetry
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import ServiceError

log = logging.getLogger(__name__)
_FINISH = {"end": "stop", "stop_string": "stop", "max_tokens": "length"}
_OWNER = "fusionkv"
_S = grpc.StatusCode
# HTTP status, type and code. FAILED_PRECONDITION is 400: clients retry after 409.
_STATUSES: dict[grpc.StatusCode, tuple[int, str, str | None]] = {
    _S.INVALID_ARGUMENT: (400, "invalid_request_error", None),
    _S.FAILED_PRECONDITION: (400, "invalid_request_error", "failed_precondition"),
    _S.UNAUTHENTICATED: (401, "invalid_request_error", "invalid_api_key"),
    _S.PERMISSION_DENIED: (403, "invalid_request_error", "permission_denied"),
    _S.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    _S.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    _S.UNAVAILABLE: (503, "server_error", "unavailable"),
    _S.DEADLINE_EXCEEDED: (504, "server_error", "deadline_exceeded"),
}
_UNEXPECTED = (500, "server_error", None)


async def whole(completion: CompletionRequest, events: AsyncIterator[Event]) -> dict[str, Any]:
    """A chat.completion; its field `fusionkv` holds the sources and the summary."""
    answer = results.answer([event async for event in events])
    message = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
    choice = {"index": 0, **({"text": answer.text} if completion.text else message), "logprobs": None}
    return {
        **_frame(completion, "chat.completion"),
        "choices": [{**choice, "finish_reason": _finish(answer.summary)}],
        "usage": results.usage(answer.summary),
        _OWNER: {**_listed(answer.sources), "summary": as_dict(answer.summary)},
    }


async def chunks(completion: CompletionRequest, events: AsyncIterator[Event]) -> AsyncIterator[dict[str, Any]]:
    """Streams an answer as chat.completion.chunks.

    The first chunk is sent with the first token, so that errors before it still fail the whole request. The first
    chunk holds the sources, and the last one of the choice holds the summary.
    """
    frame = _frame(completion, "chat.completion.chunk")
    if completion.usage:
        frame["usage"] = None  # until the last chunk
    sources: Sources | None = Sources(())
    summary: Summary | None = None
    # To the end, also behind the summary: a call that is left counts as cancelled.
    async for event in events:
        if isinstance(event, Sources):
            sources = event
            continue
        if sources is not None:
            choice = _delta(completion, role="assistant", content="")
            yield {**frame, "choices": [choice], _OWNER: _listed(sources.passages)}
            sources = None
        if isinstance(event, Token):
            # The text is empty while a character or a stop string is incomplete.
            if event.text:
                yield {**frame, "choices": [_delta(completion, content=event.text)]}
        elif isinstance(event, Summary):
            summary = event
            choice = {**_delta(completion), "finish_reason": _finish(event)}
            yield {**frame, "choices": [choice], _OWNER: {"summary": as_dict(event)}}
            if completion.usage:
                yield {**frame, "choices": [], "usage": results.usage(event)}
    if summary is None:
        raise ServiceError("the answer ended without a summary")


async def passed(
    completion: CompletionRequest, responses: AsyncIterator[pb.GenerateResponse | dict[str, Any]]
) -> AsyncIterator[dict[str, Any]]:
    """vLLM's whole reply, or the chunks of its stream, with the sources and the summary in the field `fusionkv`.

    The last chunk holds the summary, and the usage if it was requested: vLLM counts once all choices have ended.
    """
    ours: dict[str, Any] = {}
    last: dict[str, Any] = {}
    async for response in responses:
        if isinstance(response, pb.GenerateResponse):
            event = results.event(response)
            ours |= _listed(event.passages) if isinstance(event, Sources) else {"summary": as_dict(response.summary)}
            continue
        last = {**response, "model": completion.model}
        if completion.stream and last.get("choices"):
            usage = {"usage": None} if completion.usage else {}
            yield {**last, **usage, **({_OWNER: ours} if ours else {})}
            ours = {}
    if not last:
        raise ServiceError("vLLM ended the answer without a reply")
    if completion.stream and not completion.usage:
        last.pop("usage", None)
    yield {**last, **({"choices": []} if completion.stream else {}), _OWNER: ours}


def model(item: pb.Item) -> dict[str, Any]:
    """A corpus as a model. The time of its creation is unknown."""
    figures = {"documents": item.documents, "chunks": item.chunks, "tokens": item.tokens}
    return {"id": item.name, "object": "model", "created": 0, "owned_by": _OWNER, _OWNER: figures}


def models(items: Iterable[pb.Item]) -> dict[str, Any]:
    return {"object": "list", "data": [model(item) for item in items]}


def embeddings(request: EmbeddingRequest, vectors: np.ndarray, model: str, tokens: int) -> bytes:
    """The reply as JSON with `vectors`, float32 `[text, dim]`.

    Blocks, for 0.4 s with 2,048 vectors of 384 numbers: call it in a thread.
    """
    little = vectors.astype("<f4")
    rows = [base64.b64encode(row.tobytes()).decode() if request.base64 else row.tolist() for row in little]
    body = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return json.dumps(body).encode()


def status(error: Exception) -> int:
    return _known(error)[0]


def record(error: Exception) -> None:
    """Records an error in the current span if it is the gateway's fault, and in the log if it is unexpected."""
    if status(error) >= 500:
        telemetry.record_error(error)
    if not isinstance(error, ServiceError):
        log.error("unexpected error in an HTTP request", exc_info=error)


def error_body(error: Exception) -> dict[str, Any]:
    _, kind, code = _known(error)
    unexpected = f"internal error: {type(error).__name__}"
    message = errors.details(error) if isinstance(error, ServiceError) else unexpected
    return error_of(message, kind, code, error.param if isinstance(error, BadRequest) else None)


def error_of(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def headers(error: Exception) -> dict[str, str]:
    """Headers for the retry delay, if it is known, and for the authentication scheme."""
    headers: dict[str, str] = {}
    if isinstance(error, ServiceError) and error.retry_after is not None:
        # Retry-After is HTTP's, in whole seconds; OpenAI's clients prefer Retry-After-Ms.
        headers["Retry-After"] = str(math.ceil(error.retry_after))
        headers["Retry-After-Ms"] = str(math.ceil(1000 * error.retry_after))
    if _known(error)[0] == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def _known(error: Exception) -> tuple[int, str, str | None]:
    return _STATUSES.get(error.status, _UNEXPECTED) if isinstance(error, ServiceError) else _UNEXPECTED


def _listed(sources: Iterable[Passage]) -> dict[str, Any]:
    return {"sources": [asdict(passage) for passage in sources]}


def _frame(request: CompletionRequest, kind: str) -> dict[str, Any]:
    name, kind = ("cmpl", "text_completion") if request.text else ("chatcmpl", kind)
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": request.model}


def _delta(request: CompletionRequest, **delta: str) -> dict[str, Any]:
    new = {"text": delta.get("content", "")} if request.text else {"delta": delta}
    return {"index": 0, **new, "logprobs": None, "finish_reason": None}


def _finish(summary: Summary) -> str:
    return _FINISH.get(summary.finish_reason, "stop")
