"""Metrics of answers."""

from opentelemetry import metrics

from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.observe import telemetry

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
