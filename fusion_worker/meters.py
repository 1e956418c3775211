"""What a worker measures of its requests."""

import weakref
from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.summary import Summary
from fusionkv.protos.observe import telemetry

_meter = metrics.get_meter(__name__)
_degraded = _meter.create_counter(
    "fusionkv.worker.degraded", description="Answers by plain prefill: the cache failed"
)
_refused = _meter.create_counter("fusionkv.worker.refused", description="Requests refused at once, by reason")
_tokens = _meter.create_counter("fusionkv.worker.tokens", description="Context tokens, by what was done with them")
_ttft = _meter.create_histogram(
    "fusionkv.worker.ttft",
    unit="s",
    description="Arrival to first token",
    explicit_bucket_boundaries_advisory=telemetry.SECONDS,
)
_stage = _meter.create_histogram(
    "fusionkv.worker.stage",
    unit="s",
    description="Stages of a request up to its first token, by name; queue is one",
    explicit_bucket_boundaries_advisory=telemetry.SECONDS,
)
_per_token = _meter.create_histogram(
    "fusionkv.worker.time_per_token",
    unit="s",
    description="From one token of an answer to the next, the mean of an answer",
    explicit_bucket_boundaries_advisory=telemetry.SECONDS,
)
_recomputed = _meter.create_histogram(
    "fusionkv.worker.recomputed_share",
    unit="1",
    description="Share of a prompt's context tokens that was recomputed",
    explicit_bucket_boundaries_advisory=telemetry.SHARES,
)


def degraded(recipe: str) -> None:
    """A request that goes on without the cache."""
    _degraded.add(1, {"fusionkv.recipe": recipe})


def refused(reason: str) -> None:
    """A request that finds the queue full, or too long for its deadline."""
    _refused.add(1, {"fusionkv.reason": reason})


def first_token(summary: Summary) -> None:
    """Within the request's span, which the figures then lead to."""
    attributes = {"fusionkv.recipe": summary.recipe.name}
    for stage, seconds in summary.stages.seconds.items():
        if stage == "ttft":
            _ttft.record(seconds, attributes)
        else:
            _stage.record(seconds, {"fusionkv.stage": stage})


def context(summary: Summary) -> None:
    """What became of the context's tokens; known when the answer has ended, since doubt may have more recomputed."""
    attributes = {"fusionkv.recipe": summary.recipe.name}
    for kind in ("lossless", "reused", "recomputed"):
        _tokens.add(getattr(summary, kind), attributes | {"fusionkv.kind": kind})
    if summary.prompt.context_tokens:
        _recomputed.record(summary.recomputed / summary.prompt.context_tokens, attributes)


def answered(summary: Summary) -> None:
    """An answer's end."""
    if summary.generated > 1:
        seconds = summary.stages.seconds["decode"] / (summary.generated - 1)
        _per_token.record(seconds, {"fusionkv.recipe": summary.recipe.name})


def observe(requests: Callable[[], tuple[int, int]], pool: KVPool) -> None:
    """Exports how many requests wait and run, from (waiting, running), and the bytes of the KV pool.

    requests: a method. Neither its object nor the pool is kept alive: exporters never let go of what they ask.
    """
    counting, kept = weakref.WeakMethod(requests), weakref.ref(pool)

    def counted(_: CallbackOptions) -> Iterable[Observation]:
        if (count := counting()) is None:
            return []
        waiting, running = count()
        return [
            Observation(waiting, {"fusionkv.state": "waiting"}),
            Observation(running, {"fusionkv.state": "running"}),
        ]

    def tokens(count: Callable[[KVPool], int]) -> Iterable[Observation]:
        if (pool := kept()) is None:
            return []
        return [Observation(count(pool) * pool.shape.token_bytes, {"fusionkv.tier": "device"})]

    def used(_: CallbackOptions) -> Iterable[Observation]:
        return tokens(lambda pool: pool.capacity - pool.free)

    def capacity(_: CallbackOptions) -> Iterable[Observation]:
        return tokens(lambda pool: pool.capacity)

    _meter.create_observable_gauge("fusionkv.worker.requests", [counted], description="Requests, by state")
    _meter.create_observable_gauge("fusionkv.worker.pool.used", [used], "By", "Bytes taken in the KV pool")
    _meter.create_observable_gauge("fusionkv.worker.pool.capacity", [capacity], "By", "Bytes of the KV pool")
