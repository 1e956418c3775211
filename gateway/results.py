"""What the clients return, as plain frozen dataclasses."""

from dataclasses import dataclass

from fusionkv.protos.gateway.v1 import gateway_pb2 as pb


@dataclass(frozen=True)
class Passage:
    """A chunk that was retrieved, with its score (higher is better) and its length in tokens."""

    document: str
    position: int
    text: str
    score: float
    tokens: int


@dataclass(frozen=True)
class Sources:
    """The passages in the order of the prompt; the first event of an answer."""

    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class ExplainedChunk:
    """How the KV of a chunk's tokens came about; fields as in protos/fusion/v1/fusion.proto."""

    texts: tuple[str, ...]
    kind: str
    tier: str
    lossless: bool
    recomputed: frozenset[int]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Explanation:
    """The chunks in the order of the sources, and what stands before and behind them, without kind, tier and scores;
    comes behind the sources, when it was asked for.
    """

    chunks: tuple[ExplainedChunk, ...]
    system: ExplainedChunk
    question: ExplainedChunk


@dataclass(frozen=True)
class Token:
    """One token; its text may be empty while a character or a stop string is still open."""

    id: int
    text: str


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage; ttft runs from the arrival at the gateway to the first token."""

    retrieve: float
    plan: float
    queue: float
    lookup: float
    load: float
    encode: float
    select: float
    prefill: float
    ttft: float
    decode: float
    total: float


@dataclass(frozen=True)
class TierHits:
    """Chunks found in the cache; kind is "exact" or "alternative", tier "device", "memory", "disk" or "remote"."""

    kind: str
    tier: str
    chunks: int
    tokens: int


@dataclass(frozen=True)
class Summary:
    """How an answer came about; the last event of an answer. Field meanings: protos/gateway/v1/gateway.proto."""

    finish_reason: str
    seconds: StageSeconds
    hits: tuple[TierHits, ...]
    chunks_retrieved: int
    chunks_missed: int
    prompt_tokens: int
    context_tokens: int
    tokens_lossless: int
    tokens_reused: int
    tokens_recomputed: int
    tokens_encoded: int
    tokens_generated: int
    bytes_fetched: int
    degraded: bool
    degraded_reason: str
    recipe: str
    ratio: float
    trace_id: str
    ratio_raised: str
    entries_rejected: int


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    sources: tuple[Passage, ...]
    summary: Summary


@dataclass(frozen=True)
class Ingested:
    """One document that was stored."""

    name: str
    chunks: int
    tokens: int
    replaced: bool


@dataclass(frozen=True)
class Progress:
    """How far Precompute is, in chunks; `skipped` of those done were stored already."""

    done: int
    total: int
    skipped: int


@dataclass(frozen=True)
class Deleted:
    documents: int
    chunks: int


@dataclass(frozen=True)
class Item:
    """A corpus, or one document of a corpus; `bytes` are those of its text."""

    name: str
    documents: int
    chunks: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Stats:
    """What a gateway reports of itself; `model` and `worker` are empty when no worker answers."""

    model: str
    model_fingerprint: str
    worker: str
    version: str
    requests: int
    requests_failed: int
    requests_degraded: int
    documents: int
    chunks: int
    uptime_seconds: float


Event = Sources | Explanation | Token | Summary


def cached_tokens(summary: Summary | pb.Summary) -> int:
    """Tokens of chunks that were found in the cache; what missed is encoded, and then lossless or reused as well."""
    return sum(hit.tokens for hit in summary.hits)


def passages(found: "pb.RetrieveResponse | pb.Sources") -> tuple[Passage, ...]:
    return tuple(Passage(p.document, p.position, p.text, p.score, p.tokens) for p in found.passages)


def event(response: pb.GenerateResponse) -> Event:
    """One event of Generate."""
    if response.HasField("token"):
        return Token(response.token.id, response.token.text)
    if response.HasField("sources"):
        return Sources(passages(response.sources))
    if response.HasField("explanation"):
        told = response.explanation
        return Explanation(tuple(map(_explained, told.chunks)), _explained(told.system), _explained(told.question))
    s = response.summary
    plain = {name: getattr(s, name) for name in Summary.__dataclass_fields__ if name not in ("seconds", "hits")}
    seconds = StageSeconds(**{name: getattr(s.seconds, name) for name in StageSeconds.__dataclass_fields__})
    hits = tuple(TierHits(h.kind, h.tier, h.chunks, h.tokens) for h in s.hits)
    return Summary(seconds=seconds, hits=hits, **plain)


def _explained(c: pb.ExplainedChunk) -> ExplainedChunk:
    return ExplainedChunk(tuple(c.texts), c.kind, c.tier, c.lossless, frozenset(c.recomputed), tuple(c.scores))


def stats(s: pb.StatsResponse) -> Stats:
    values = {name: getattr(s, name) for name in Stats.__dataclass_fields__ if name != "model_fingerprint"}
    return Stats(model_fingerprint=s.model_fingerprint.hex(), **values)
