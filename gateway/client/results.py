"""Results of the clients: frozen dataclasses, and unchanged messages of answer.proto."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from fusionkv.protos.answer.v1.answer_pb2 import Explanation, Summary, Token
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import ServiceError


@dataclass(frozen=True)
class Passage:
    """A chunk of the prompt, retrieved or given in the request.

    Attributes:
        document: the document of a retrieved chunk.
        position: position in that document; in Sources, that of a given passage without a document in the request.
        score: score of a retrieved chunk; higher is better.
        tokens: length, set by the gateway.
        id: id of a given passage, repeated in Sources.
        title: the document's title, or the title that stands above a given passage's text in the prompt.
        metadata: the document's metadata, or a given passage's, repeated in Sources.
    """

    document: str = ""
    position: int = 0
    text: str = ""
    score: float = 0.0
    tokens: int = 0
    id: str = ""
    title: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A readable name, for citations."""
        if self.document:
            return f"{self.document}#{self.position}"
        return self.title or self.id or f"passage {self.position + 1}"


@dataclass(frozen=True)
class Sources:
    """The passages in the order of the prompt; the first event of an answer."""

    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    sources: tuple[Passage, ...]
    summary: Summary


@dataclass(frozen=True)
class Ingested:
    """One stored file: a document, or one per JSON line.

    Attributes:
        replaced: number of the documents that existed before.
        without_text: names of JSON lines' documents that have no text and were not stored.
    """

    name: str
    documents: int
    chunks: int
    tokens: int
    replaced: int
    without_text: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """Progress of Precompute or Move, in chunks; `skipped` of the `done` chunks were already stored."""

    done: int
    total: int
    skipped: int = 0


@dataclass(frozen=True)
class Deleted:
    """Numbers of the documents and chunks that a call deleted."""

    documents: int
    chunks: int


@dataclass(frozen=True)
class Item:
    """A corpus, or one document of a corpus.

    Attributes:
        bytes: bytes of text.
        model: model that a corpus was built for.
        embedder: embedder that a corpus was built with; without one, it is searched by BM25 only.
        source: where a document came from.
    """

    name: str
    documents: int
    chunks: int
    tokens: int
    bytes: int
    model: str = ""
    embedder: str = ""
    source: str = ""


@dataclass(frozen=True)
class Model:
    """The model that answers.

    Attributes:
        max_tokens: limit of a prompt and its answer together.
        max_new_tokens: limit of an answer whose request sets none.
    """

    name: str
    fingerprint: str
    max_tokens: int
    max_new_tokens: int


@dataclass(frozen=True)
class Stats:
    """Statistics of a gateway and of `tenants` together; `model` and `worker` are empty without a worker."""

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
    tenants: int


Event = Sources | Explanation | Token | Summary


def cached_tokens(summary: Summary) -> int:
    """Tokens of chunks found in the cache. Missed chunks are encoded, and then also count as lossless or reused."""
    return sum(hit.tokens for hit in summary.hits)


def usage(summary: Summary) -> dict[str, Any]:
    """The tokens of an answer, as in OpenAI's API."""
    prompt, answer = summary.prompt_tokens, summary.tokens_generated
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(summary)},
    }


def passages(response: "pb.RetrieveResponse | pb.Sources") -> tuple[Passage, ...]:
    return tuple(
        Passage(p.document, p.position, p.text, p.score, p.tokens, p.id, p.title, dict(p.metadata))
        for p in response.passages
    )


def event(response: pb.GenerateResponse) -> Event:
    """Converts one event of Generate."""
    if response.HasField("sources"):
        return Sources(passages(response.sources))
    return getattr(response, response.WhichOneof("event") or "summary")


def answer(events: Iterable[Event]) -> Answer:
    """Collects the events of an answer. Raises ServiceError if there is no summary."""
    text, sources, summary = "", Sources(()), None
    for event in events:
        if isinstance(event, Token):
            text += event.text
        elif isinstance(event, Sources):
            sources = event
        elif isinstance(event, Summary):
            summary = event
    if summary is None:
        raise ServiceError("the answer ended without a summary")
    return Answer(text, sources.passages, summary)


def as_dict(message: Message) -> dict[str, Any]:
    """A message as a JSON-compatible dictionary with every field; nested messages are dictionaries too."""

    def plain(value: Any) -> Any:
        return as_dict(value) if isinstance(value, Message) else value

    return {
        f.name: [plain(v) for v in getattr(message, f.name)] if f.is_repeated else plain(getattr(message, f.name))
        for f in message.DESCRIPTOR.fields
    }


def ingested(name: str, r: pb.IngestResponse) -> Ingested:
    return Ingested(name, r.documents, r.chunks, r.tokens, r.replaced, tuple(r.without_text))


def progress(p: "pb.PrecomputeResponse | pb.MoveResponse") -> Progress:
    return Progress(p.done, p.total, getattr(p, "skipped", 0))


def item(i: pb.Item) -> Item:
    return Item(i.name, i.documents, i.chunks, i.tokens, i.bytes, i.model, i.embedder, i.source)


def model(m: pb.GetModelResponse) -> Model:
    return Model(m.name, m.fingerprint.hex(), m.max_tokens, m.max_new_tokens)


def stats(s: pb.StatsResponse) -> Stats:
    values = {name: getattr(s, name) for name in Stats.__dataclass_fields__ if name != "model_fingerprint"}
    return Stats(model_fingerprint=s.model_fingerprint.hex(), **values)
