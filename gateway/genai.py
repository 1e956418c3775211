"""OpenTelemetry attributes and metrics of a request and its answer: the GenAI conventions, and FusionKV's own.

Telemetry never contains the text of a question, a chunk or an answer.
"""

import contextlib
from collections.abc import Iterator, Mapping

from opentelemetry import metrics
from opentelemetry.trace import Span

from fusionkv.gateway.client import results
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.observe import telemetry
from fusionkv.protos.runtime.errors import ServiceError

_meter = metrics.get_meter(__name__)
_ttft = _meter.create_histogram(
    "fusionkv.gateway.ttft",
    unit="s",
    description="time from the arrival of a question to its first token",
    explicit_bucket_boundaries_advisory=telemetry.SECONDS,
)
_per_token = _meter.create_histogram(
    "fusionkv.gateway.time_per_token",
    unit="s",
    description="mean time between the tokens of an answer",
    explicit_bucket_boundaries_advisory=telemetry.SECONDS,
)
_chunks = _meter.create_counter("fusionkv.gateway.chunks", description="chunks in prompts, by the source of their KV")
Attributes = Mapping[str, str | bool | int | float | list[str]]
PROVIDER = "fusionkv"


def request_attributes(worker_request: fusion_pb2.GenerateRequest, model: str) -> Attributes:
    """Attributes of the span `chat <model>` at its start."""
    sampling = worker_request.sampling
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
        # 0 means that the request did not set the field.
        **{name: value for name, value in known.items() if value},
        "fusionkv.recipe": worker_request.recipe,
        "fusionkv.chunks": len(worker_request.chunks),
    }


def answer_attributes(summary: Summary, model: str) -> Attributes:
    """Attributes of the span `chat <model>` at its end."""
    attributes: dict[str, str | bool | int | float | list[str]] = {
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
        attributes["fusionkv.degraded"] = summary.degraded_reason
    if summary.ratio_raised:
        attributes["fusionkv.ratio.raised"] = summary.ratio_raised
    if summary.recipe_replaced:
        attributes["fusionkv.recipe.replaced"] = summary.recipe_replaced
    return attributes


def retrieval(corpus: str, top_k: int) -> Attributes:
    """Attributes of the span `gateway.retrieve` at its start."""
    return {
        "gen_ai.operation.name": "retrieval",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.data_source.id": corpus,
        "fusionkv.corpus": corpus,
        "fusionkv.top_k": top_k,
    }


def embedding(model: str) -> Attributes:
    return {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
    }


@contextlib.contextmanager
def failures(span: Span) -> Iterator[None]:
    """Records on the span the type of an error raised inside."""
    try:
        yield
    except Exception as error:
        kind = error.status.name if isinstance(error, ServiceError) else type(error).__name__
        span.set_attribute("error.type", kind)
        raise


def first_token(recipe: str, seconds: float) -> None:
    """Records the time to the first token. Call it within the request's span, which becomes the exemplar."""
    _ttft.record(seconds, {"fusionkv.recipe": recipe})


def answered(summary: Summary, tenant: str) -> None:
    """Records a finished answer. `tenant` is the tenant's label in telemetry."""
    seconds, generated = summary.seconds, summary.tokens_generated
    if generated > 1:
        _per_token.record(seconds.decode / (generated - 1), {"fusionkv.recipe": summary.recipe})
    hits = [(hit.kind, hit.tier, hit.chunks) for hit in summary.hits]
    for kind, tier, chunks in (*hits, ("miss", "none", summary.chunks_missed)):
        if chunks:
            _chunks.add(chunks, {"fusionkv.kind": kind, "fusionkv.tier": tier, "fusionkv.tenant": tenant})
