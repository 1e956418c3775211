"""The figures of a request, and the worker's OpenTelemetry metrics of requests and of the KV pool."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.prompt import ChunkSource, Prompt
from fusionkv.protos.contract.names import recipe_label
from fusionkv.protos.contract.recipes import Recipe
from fusionkv.protos.observe import telemetry

_meter = metrics.get_meter(__name__)
_degraded = _meter.create_counter(
    "fusionkv.worker.degraded", description="Answers prefilled in full because the cache failed"
)
_refused = _meter.create_counter("fusionkv.worker.refused", description="Requests refused on arrival, by reason")
_tokens = _meter.create_counter(
    "fusionkv.worker.tokens", description="Context tokens, by kind: lossless, reused or recomputed"
)
_histogram = partial(_meter.create_histogram, explicit_bucket_boundaries_advisory=telemetry.SECONDS)
_ttft = _histogram("fusionkv.worker.ttft", "s", "Time from arrival to the first token")
_STAGES = "Time in each stage of a request before its first token, by name, including the queue"
_stage = _histogram("fusionkv.worker.stage", "s", _STAGES)
_per_token = _histogram("fusionkv.worker.time_per_token", "s", "Mean time between two tokens of an answer")
_recomputed = _meter.create_histogram(
    "fusionkv.worker.recomputed_share",
    "1",
    "Share of a prompt's context tokens that was recomputed",
    explicit_bucket_boundaries_advisory=telemetry.SHARES,
)


@dataclass(slots=True)
class Stages:
    """Statistics of loading, for the request's summary.

    Attributes:
        hits, hit_tokens: chunks and tokens by (kind, tier). Compressed chunks count with the tokens of their text.
        origins: kind and tier of every chunk, by its key.
        missed: chunks that were neither in the pool nor in the cache service.
        rejected: entries that no worker had signed.
        encoded_tokens: tokens of missed chunks.
        bytes_fetched: bytes fetched from the cache service.
        seconds: by stage.
    """

    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    hit_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    origins: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    missed: int = 0
    rejected: int = 0
    encoded_tokens: int = 0
    bytes_fetched: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, source: ChunkSource, present: bool) -> None:
        """Counts a part. present: whether it is in the pool already."""
        if source.is_system:
            return
        tokens = len(source.chunk)
        if source.entry is None and not present:
            self.encoded_tokens += tokens
            self.missed += 1
            self.origins.setdefault(source.key, ("miss", "none"))
            return
        kind = "exact" if source.lossless else "alternative"
        tier = "device" if present or source.entry is None else source.entry.tier
        self.origins.setdefault(source.key, (kind, tier))
        self.hits[kind, tier] += 1
        self.hit_tokens[kind, tier] += tokens

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to the stage `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def start_over(self) -> None:
        """Resets the counts before another lookup; seconds and bytes stay."""
        self.hits.clear()
        self.hit_tokens.clear()
        self.origins.clear()
        self.missed = self.encoded_tokens = 0


@dataclass(slots=True)
class Summary:
    """The figures of a request. Seconds and counts are those of answer.v1.Summary.

    Attributes:
        degraded: why the cache was not used; empty if it was.
        raised: why the ratio is higher than the requested one; empty if it is not.
        first_logits: float [vocabulary] of the first token, kept for answers that are compared with full attention.
    """

    prompt: Prompt
    recipe: Recipe
    ratio: float
    stages: Stages = field(default_factory=Stages)
    finish: str = ""
    lossless: int = 0
    recomputed: int = 0
    generated: int = 0
    degraded: str = ""
    raised: str = ""
    first_logits: torch.Tensor | None = None

    @property
    def kept(self) -> int:
        """Context tokens kept for decoding; 0 keeps all, as when full attention replaces the recipe."""
        replaced = self.degraded or (self.ratio == 1.0 and self.raised)
        return 0 if replaced else self.recipe.kept(self.prompt.context_tokens)

    @property
    def reused(self) -> int:
        return self.prompt.context_tokens - self.lossless - self.recomputed


def degraded(recipe: str) -> None:
    """Counts a request that is prefilled in full because the cache failed."""
    _degraded.add(1, {"fusionkv.recipe": recipe_label(recipe)})


def refused(reason: str) -> None:
    """Counts a refused request. reason: `queue` (full) or `deadline` (can't be met)."""
    _refused.add(1, {"fusionkv.reason": reason})


def first_token(summary: Summary) -> None:
    """Records the stages and the context tokens of a request, within its span, which becomes the exemplar."""
    attributes = {"fusionkv.recipe": recipe_label(summary.recipe.name)}
    for stage, seconds in summary.stages.seconds.items():
        if stage == "ttft":
            _ttft.record(seconds, attributes)
        else:
            _stage.record(seconds, {"fusionkv.stage": stage})
    for kind in ("lossless", "reused", "recomputed"):
        _tokens.add(getattr(summary, kind), attributes | {"fusionkv.kind": kind})
    if summary.prompt.context_tokens:
        _recomputed.record(summary.recomputed / summary.prompt.context_tokens, attributes)


def answered(summary: Summary) -> None:
    """Records the mean time between two tokens at the end of an answer."""
    if summary.generated > 1:
        seconds = summary.stages.seconds["decode"] / (summary.generated - 1)
        _per_token.record(seconds, {"fusionkv.recipe": recipe_label(summary.recipe.name)})


def observe(requests: Callable[[], tuple[int, int]], pool: KVPool) -> None:
    """Exports the numbers of requests, which `requests` returns (waiting, running), and the bytes of the KV pool."""

    def counted(_: CallbackOptions) -> list[Observation]:
        counts = zip(("waiting", "running"), requests(), strict=True)
        return [Observation(count, {"fusionkv.state": state}) for state, count in counts]

    def pool_bytes(name: str, description: str, slots: Callable[[], int]) -> None:
        def observed(_: CallbackOptions) -> list[Observation]:
            return [Observation(slots() * pool.shape.token_bytes, {"fusionkv.tier": "device"})]

        _meter.create_observable_gauge(name, [observed], "By", description)

    _meter.create_observable_gauge("fusionkv.worker.requests", [counted], description="Requests, by state")
    pool_bytes("fusionkv.worker.pool.used", "Bytes in use in the KV pool", lambda: pool.capacity - pool.free)
    pool_bytes("fusionkv.worker.pool.capacity", "Bytes of the KV pool", lambda: pool.capacity)
