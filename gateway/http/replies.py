"""Converts answers to OpenAI's chat or text completions, whole or streamed; and corpora to models."""

import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from typing import Any

from fusionkv.gateway.client import results
from fusionkv.gateway.client.results import Event, Passage, Sources, Summary, Token, cached_tokens, fields
from fusionkv.gateway.http.chat import Chat
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import ServiceError

_FINISH = {"end": "stop", "stop_string": "stop", "max_tokens": "length"}
_OWNER = "fusionkv"


async def whole(chat: Chat, events: AsyncIterator[Event]) -> dict[str, Any]:
    """A chat.completion; its field `fusionkv` holds the sources and the summary."""
    answer = results.answer([event async for event in events])
    message = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
    choice = {"index": 0, **({"text": answer.text} if chat.text else message), "logprobs": None}
    return {
        **_frame(chat, "chat.completion"),
        "choices": [{**choice, "finish_reason": _finish(answer.summary)}],
        "usage": _usage(answer.summary),
        _OWNER: {**_listed(answer.sources), "summary": fields(answer.summary)},
    }


async def chunks(chat: Chat, events: AsyncIterator[Event]) -> AsyncIterator[dict[str, Any]]:
    """Streams an answer as chat.completion.chunks.

    The first chunk is sent with the first token, so that errors before it still fail the whole request. The first
    chunk holds the sources, and the last one of the choice holds the summary.
    """
    frame = _frame(chat, "chat.completion.chunk")
    sources: Sources | None = Sources(())
    summary: Summary | None = None
    # To the end, also behind the summary: a call that is left counts as cancelled.
    async for event in events:
        if isinstance(event, Sources):
            sources = event
            continue
        if sources is not None:
            choice = _delta(chat, role="assistant", content="")
            yield {**frame, "choices": [choice], _OWNER: _listed(sources.passages)}
            sources = None
        if isinstance(event, Token):
            # The text is empty while a character or a stop string is incomplete.
            if event.text:
                yield {**frame, "choices": [_delta(chat, content=event.text)]}
        elif isinstance(event, Summary):
            summary = event
            choice = {**_delta(chat), "finish_reason": _finish(event)}
            yield {**frame, "choices": [choice], _OWNER: {"summary": fields(event)}}
            if chat.usage:
                yield {**frame, "choices": [], "usage": _usage(event)}
    if summary is None:
        raise ServiceError("the answer ended without a summary")


def model(item: pb.Item) -> dict[str, Any]:
    """A corpus as a model. The time of its creation is unknown."""
    own = {"documents": item.documents, "chunks": item.chunks, "tokens": item.tokens}
    return {"id": item.name, "object": "model", "created": 0, "owned_by": _OWNER, _OWNER: own}


def models(items: Iterable[pb.Item]) -> dict[str, Any]:
    return {"object": "list", "data": [model(item) for item in items]}


def _listed(sources: Iterable[Passage]) -> dict[str, Any]:
    return {"sources": [asdict(passage) for passage in sources]}


def _frame(chat: Chat, kind: str) -> dict[str, Any]:
    name, kind = ("cmpl", "text_completion") if chat.text else ("chatcmpl", kind)
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": chat.model}


def _delta(chat: Chat, **delta: str) -> dict[str, Any]:
    new = {"text": delta.get("content", "")} if chat.text else {"delta": delta}
    return {"index": 0, **new, "logprobs": None, "finish_reason": None}


def _finish(summary: Summary) -> str:
    return _FINISH.get(summary.finish_reason, "stop")


def _usage(summary: Summary) -> dict[str, Any]:
    prompt, answer = summary.prompt_tokens, summary.tokens_generated
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(summary)},
    }
