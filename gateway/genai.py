"""A request for an answer and the answer's figures in OpenTelemetry's words for generative AI, and in our own.

No text of a question, a chunk or an answer goes into telemetry.
"""

import contextlib
from collections.abc import Iterator, Mapping

from opentelemetry.trace import Span

from fusionkv.gateway.client import results
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.runtime.errors import ServiceError

Attributes = Mapping[str, str | bool | int | float | list[str]]
PROVIDER = "fusionkv"


def asked(order: fusion_pb2.GenerateRequest, model: str) -> Attributes:
    """Of the span `chat <model>`, when it begins."""
    sampling = order.sampling
    known = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
    }
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.output.type": "text",
        # What is 0 was not asked for.
        **{name: value for name, value in known.items() if value},
        "fusionkv.recipe": order.recipe,
        "fusionkv.chunks": len(order.chunks),
    }


def answered(summary: Summary, model: str) -> Attributes:
    """Of the same span, when it ends."""
    made: dict[str, str | bool | int | float | list[str]] = {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [summary.finish_reason],
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.output_tokens": summary.tokens_generated,
        "gen_ai.usage.cache_read.input_tokens": results.cached_tokens(summary),
        "fusionkv.ratio": summary.ratio,
        "fusionkv.ttft": summary.seconds.ttft,
        "fusionkv.tokens.lossless": summary.tokens_lossless,
        "fusionkv.tokens.reused": summary.tokens_reused,
        "fusionkv.tokens.recomputed": summary.tokens_recomputed,
        "fusionkv.tokens.encoded": summary.tokens_encoded,
    }
    if summary.degraded:
        made["fusionkv.degraded"] = summary.degraded_reason
    if summary.ratio_raised:
        made["fusionkv.ratio.raised"] = summary.ratio_raised
    if summary.recipe_replaced:
        made["fusionkv.recipe.replaced"] = summary.recipe_replaced
    return made


def retrieval(corpus: str, top_k: int) -> Attributes:
    """Of the span `gateway.retrieve`, when it begins."""
    return {
        "gen_ai.operation.name": "retrieval",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.data_source.id": corpus,
        "fusionkv.corpus": corpus,
        "fusionkv.top_k": top_k,
    }


def embedding(model: str) -> Attributes:
    """Of the span `gateway.embed`."""
    return {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
    }


@contextlib.contextmanager
def failures(span: Span) -> Iterator[None]:
    """Says on the span which kind of error ended what runs inside."""
    try:
        yield
    except Exception as error:
        kind = error.status.name if isinstance(error, ServiceError) else type(error).__name__
        span.set_attribute("error.type", kind)
        raise
