"""What a gateway measures of its answers."""

from opentelemetry import metrics

from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.observe import telemetry

_meter = metrics.get_meter(__name__)
_ttft = _meter.create_histogram(
    "fusionkv.gateway.ttft",
    unit="s",
    description="arrival of a question to its first token",
    explicit_bucket_boundaries_advisory=telemetry.SECONDS,
)
_per_token = _meter.create_histogram(
    "fusionkv.gateway.time_per_token",
    unit="s",
    description="from one token of an answer to the next, the mean of an answer",
    explicit_bucket_boundaries_advisory=telemetry.SECONDS,
)
_chunks = _meter.create_counter(
    "fusionkv.gateway.chunks", description="chunks of prompts, by where their KV came from"
)


def first_token(recipe: str, seconds: float) -> None:
    """Within the request's span, which the figure then leads to."""
    _ttft.record(seconds, {"fusionkv.recipe": recipe})


def answered(summary: Summary, tenant: str) -> None:
    """An answer's end. tenant: as telemetry calls it."""
    seconds, generated = summary.seconds, summary.tokens_generated
    if generated > 1:
        _per_token.record(seconds.decode / (generated - 1), {"fusionkv.recipe": summary.recipe})
    found = [(hit.kind, hit.tier, hit.chunks) for hit in summary.hits]
    for kind, tier, chunks in (*found, ("miss", "none", summary.chunks_missed)):
        if chunks:
            _chunks.add(chunks, {"fusionkv.kind": kind, "fusionkv.tier": tier, "fusionkv.tenant": tenant})
