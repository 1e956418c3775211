"""Chats that only vLLM can answer: their passages are put into a message, and its replies are passed back."""

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from fusionkv.gateway.auth.admission import AdmittedCall
from fusionkv.gateway.pipeline import Pipeline, answer_attributes, chat_span, record_first_token
from fusionkv.gateway.plan import Passage
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.contract.requests import signed_seed
from fusionkv.protos.fusion.v1.fusion_pb2 import Sampling
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.observe import telemetry
from fusionkv.protos.runtime.errors import ServiceError, Unavailable, error_type

if TYPE_CHECKING:
    from fusionkv.gateway.workers.vllm import VLLMEngine  # its packages are not installed without vLLM

_FINISHED = {"stop": "end", "length": "max_tokens"}
# As for embeddings: an estimate until vLLM has counted.
_BYTES_PER_TOKEN = 4


async def passed(
    engine: "VLLMEngine",
    pipeline: Pipeline,
    call: AdmittedCall,
    request: pb.GenerateRequest,
    fields: Mapping[str, Any],
    stream: bool,
) -> AsyncGenerator[pb.GenerateResponse | dict[str, Any]]:
    """Passes a chat on to vLLM, which computes the prompt: Sources, its reply or the chunks of its stream, a Summary.

    Args:
        request: what FusionKV reads: the passages, the messages without those about tools, and the sampling.
        fields: for vLLM, with all messages.

    Raises as `Pipeline.answer`.
    """
    began, tenant, deadline = time.perf_counter(), call.tenant, call.deadline
    vocabulary, passages = await pipeline.sources(tenant, request, deadline)
    yield pb.GenerateResponse(sources=pb.Sources(passages=[source for _, source in passages]))
    body = _body(fields, request, passages, stream)
    spent = len(json.dumps(body).encode()) // _BYTES_PER_TOKEN
    tenant.meter.spend(spent)
    context = sum(len(chunk.ids) for chunk, _ in passages)
    name = vocabulary.model.name
    summary = Summary(recipe="full_attention", ratio=1.0, context_tokens=context, tokens_recomputed=context)
    summary.model, summary.chunks_retrieved = name, len(passages)
    summary.seconds.retrieve = time.perf_counter() - began
    span, ended = chat_span(name, request.sampling, summary.recipe, len(passages)), False
    try:
        async with contextlib.aclosing(engine.chat(body, tenant.salt, deadline)) as replies:
            while (reply := await _next(span, replies)) is not None:
                if not summary.seconds.ttft:
                    summary.seconds.ttft = time.perf_counter() - began
                    if stream:  # not with a whole reply, of which it is unknown
                        record_first_token(summary.seconds.ttft, summary.recipe)
                _count(summary, reply)
                if stream:  # a chunk has a token at least
                    tenant.meter.spend(len(reply.get("choices") or ()))
                    spent += len(reply.get("choices") or ())
                yield reply
        if not summary.finish_reason:
            raise Unavailable("vLLM ended the answer early")
        ended = True
    except ServiceError as error:
        ended = True
        span.set_attribute("error.type", error_type(error))
        span.set_status(trace.StatusCode.ERROR)
        if not summary.seconds.ttft:
            tenant.meter.give_back(spent)
        raise
    else:
        tenant.meter.give_back(spent)
        tenant.meter.spend(summary.prompt_tokens + summary.tokens_generated)
        summary.seconds.total = time.perf_counter() - began
        summary.trace_id = telemetry.trace_id()
        span.set_attributes(answer_attributes(summary, name))
        yield pb.GenerateResponse(summary=summary)
    finally:
        if not ended:
            span.set_attribute("fusionkv.cancelled", True)
        span.end()


async def _next(span: trace.Span, replies: AsyncGenerator[dict[str, Any]]) -> dict[str, Any] | None:
    """The next reply. The span records no message of an error: vLLM's may quote the chat."""
    with trace.use_span(span, record_exception=False, set_status_on_exception=False):
        return await anext(replies, None)


def _count(summary: Summary, reply: Mapping[str, Any]) -> None:
    """Adds what a reply, or a chunk of a stream, tells of the answer."""
    usage = reply.get("usage") or {}
    summary.prompt_tokens = usage.get("prompt_tokens") or summary.prompt_tokens
    summary.tokens_generated = usage.get("completion_tokens") or summary.tokens_generated
    for choice in reply.get("choices") or ():
        if ended := choice.get("finish_reason"):
            summary.finish_reason = _FINISHED.get(ended, ended)


def _body(
    fields: Mapping[str, Any], request: pb.GenerateRequest, passages: Sequence[Passage], stream: bool
) -> dict[str, Any]:
    """vLLM's request."""
    body = {**_sampling(request.sampling), **fields, "messages": _with_passages(fields["messages"], passages)}
    if request.chat_template_kwargs:
        values = {name: json.loads(value) for name, value in request.chat_template_kwargs.items()}
        body["chat_template_kwargs"] = values
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """As FusionKV's own decoder: greedy, unless the request says otherwise."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0}
    fields |= {"top_k": sampling.top_k, "stop": list(sampling.stop)}
    if sampling.max_tokens:
        fields["max_tokens"] = sampling.max_tokens
    if sampling.HasField("seed"):
        fields["seed"] = signed_seed(sampling.seed)
    return fields


def _with_passages(messages: Sequence[Mapping[str, Any]], passages: Sequence[Passage]) -> list[Mapping[str, Any]]:
    """The messages, with the passages at the beginning of the user's first one, as in FusionKV's prompts."""
    if not passages:
        return list(messages)
    texts = "\n\n".join(chunk.text for chunk, _ in passages)
    first = next(i for i, message in enumerate(messages) if message["role"] == "user")
    content = messages[first]["content"]
    asked = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return [*messages[:first], {**messages[first], "content": f"{texts}\n\n{asked}"}, *messages[first + 1 :]]
