"""The figures of a request, and the worker's OpenTelemetry metrics of requests and of the KV pool."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.prompt import ChunkSource, Prompt
from fusionkv.protos.answer.v1 import answer_pb2
from fusionkv.protos.contract.names import recipe_label
from fusionkv.protos.contract.recipes import Recipe
from fusionkv.protos.observe import telemetry

_MISS = "miss", "none"  # the origin of a chunk that was encoded
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


class Stopwatch:
    """The seconds of a request, by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to the stage `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Where the chunks of a prompt came from.

    Attributes:
        origins: kind and tier of every chunk, by its key.
        hits, hit_tokens: chunks and tokens by (kind, tier).
        missed: chunks that were neither in the pool nor in the cache service.
        encoded_tokens: tokens of missed chunks.
        rejected: entries that no worker had signed.
        bytes_fetched: bytes fetched from the cache service.
    """

    origins: Mapping[bytes, tuple[str, str]] = field(default_factory=dict)
    hits: Mapping[tuple[str, str], int] = field(default_factory=dict)
    hit_tokens: Mapping[tuple[str, str], int] = field(default_factory=dict)
    missed: int = 0
    encoded_tokens: int = 0
    rejected: int = 0
    bytes_fetched: int = 0

    @classmethod
    def of(cls, sources: Iterable[tuple[ChunkSource, bool]], rejected: int, bytes_fetched: int) -> "LoadFigures":
        """Counts the chunks of a prompt. sources: each with whether it was in the pool already."""
        origins: dict[bytes, tuple[str, str]] = {}
        hits, hit_tokens = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for source, present in sources:
            if source.is_system or source.is_primer:
                continue
            origin = _origin(source, present)
            origins.setdefault(source.key, origin)
            hits[origin] += 1
            hit_tokens[origin] += len(source.chunk)
        missed, encoded_tokens = hits.pop(_MISS, 0), hit_tokens.pop(_MISS, 0)
        return cls(origins, hits, hit_tokens, missed, encoded_tokens, rejected, bytes_fetched)


def _origin(source: ChunkSource, present: bool) -> tuple[str, str]:
    """The kind and the tier of a chunk. present: whether it was in the pool already."""
    if source.entry is None and not present:
        return _MISS
    tier = "device" if present or source.entry is None else source.entry.tier
    return "exact" if source.lossless else "alternative", tier


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """The figures of a request up to its first token.

    Attributes:
        ratio: share of context tokens to recompute, as used.
        loaded: of the chunks that were used; none if the cache was not.
        lossless, recomputed: context tokens.
        raised: why the ratio is higher than the requested one; empty if it is not.
        degraded: why the cache was not used; empty if it was.
    """

    prompt: Prompt
    recipe: Recipe
    ratio: float
    loaded: LoadFigures
    lossless: int
    recomputed: int
    raised: str = ""
    degraded: str = ""

    @property
    def reused(self) -> int:
        return self.prompt.context_tokens - self.lossless - self.recomputed


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a request. Seconds and counts are those of answer.v1.Summary.

    Attributes:
        seconds: by stage.
        unused: why another engine did not use the KV that was handed over; empty if it did, or there was none.
    """

    prefill: PrefillFigures
    finish: str
    generated: int
    seconds: Mapping[str, float]
    unused: str = ""

    @property
    def degraded(self) -> str:
        """Why the cache or the handed-over KV was not used; empty if both were."""
        return self.prefill.degraded or self.unused

    def message(self, replaced: str) -> answer_pb2.Summary:
        """The figures as they are sent. replaced: why another recipe than the requested one was used, if so."""
        prefill, loaded = self.prefill, self.prefill.loaded
        return answer_pb2.Summary(
            finish_reason=self.finish,
            seconds=answer_pb2.StageSeconds(**self.seconds),
            hits=[
                answer_pb2.TierHits(kind=kind, tier=tier, chunks=chunks, tokens=loaded.hit_tokens[kind, tier])
                for (kind, tier), chunks in sorted(loaded.hits.items())
            ],
            chunks_missed=loaded.missed,
            prompt_tokens=prefill.prompt.tokens,
            context_tokens=prefill.prompt.context_tokens,
            tokens_lossless=prefill.lossless,
            tokens_reused=prefill.reused,
            tokens_recomputed=prefill.recomputed,
            tokens_encoded=loaded.encoded_tokens,
            tokens_generated=self.generated,
            bytes_fetched=loaded.bytes_fetched,
            degraded=bool(self.degraded),
            degraded_reason=self.degraded,
            recipe=prefill.recipe.name,
            ratio=prefill.ratio,
            ratio_raised=prefill.raised,
            entries_rejected=loaded.rejected,
            recipe_replaced=replaced,
        )


def degraded(recipe: str) -> None:
    """Counts a request that is prefilled in full because the cache failed."""
    _degraded.add(1, {"fusionkv.recipe": recipe_label(recipe)})


def refused(reason: str) -> None:
    """Counts a refused request. reason: `queue` (full) or `deadline` (can't be met)."""
    _refused.add(1, {"fusionkv.reason": reason})


def first_token(figures: PrefillFigures, seconds: Mapping[str, float]) -> None:
    """Records the stages and the context tokens of a request, within its span, which becomes the exemplar."""
    attributes = {"fusionkv.recipe": recipe_label(figures.recipe.name)}
    for stage, duration in seconds.items():
        if stage == "ttft":
            _ttft.record(duration, attributes)
        else:
            _stage.record(duration, {"fusionkv.stage": stage})
    for kind in ("lossless", "reused", "recomputed"):
        _tokens.add(getattr(figures, kind), attributes | {"fusionkv.kind": kind})
    if figures.prompt.context_tokens:
        _recomputed.record(figures.recomputed / figures.prompt.context_tokens, attributes)


def answered(summary: Summary) -> None:
    """Records the mean time between two tokens at the end of an answer."""
    if summary.generated > 1:
        seconds = summary.seconds["decode"] / (summary.generated - 1)
        _per_token.record(seconds, {"fusionkv.recipe": recipe_label(summary.prefill.recipe.name)})


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
    pool_bytes("fusionkv.worker.pool.used", "Bytes in use in the KV pool", lambda: pool.capacity - pool.free.count)
    pool_bytes("fusionkv.worker.pool.capacity", "Bytes of the KV pool", lambda: pool.capacity)
