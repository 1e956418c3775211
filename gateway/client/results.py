"""What the clients return: plain frozen dataclasses, and the messages of answer.proto as they came."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from fusionkv.protos.answer.v1.answer_pb2 import Explanation, Summary, Token
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb


@dataclass(frozen=True)
class Passage:
    """A chunk of the prompt: one that was retrieved, or one that the caller gives.

    A retrieved one has its document and its position in it, its score (higher is better), and the document's title
    and metadata. A given one may have an id and metadata, which Sources repeat, and a title, which stands above its
    text in the prompt; Sources say its position in the request. tokens: its length, filled by the gateway.
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
        """What people cite it by."""
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
    """One file that was stored: a document, or one for each JSON line. replaced: how many were there before."""

    name: str
    documents: int
    chunks: int
    tokens: int
    replaced: int


@dataclass(frozen=True)
class Progress:
    """How far Precompute or Move is, in chunks; `skipped` of those done were stored already."""

    done: int
    total: int
    skipped: int = 0


@dataclass(frozen=True)
class Deleted:
    documents: int
    chunks: int


@dataclass(frozen=True)
class Item:
    """A corpus, or one document of a corpus; `bytes` are those of its text.

    model, embedder: what a corpus was made with; without an embedder it is searched by words alone.
    """

    name: str
    documents: int
    chunks: int
    tokens: int
    bytes: int
    model: str = ""
    embedder: str = ""


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


def cached_tokens(summary: Summary) -> int:
    """Tokens of chunks that were found in the cache; what missed is encoded, and then lossless or reused as well."""
    return sum(hit.tokens for hit in summary.hits)


def passages(found: "pb.RetrieveResponse | pb.Sources") -> tuple[Passage, ...]:
    return tuple(
        Passage(p.document, p.position, p.text, p.score, p.tokens, p.id, p.title, dict(p.metadata))
        for p in found.passages
    )


def event(response: pb.GenerateResponse) -> Event:
    """One event of Generate."""
    if response.HasField("sources"):
        return Sources(passages(response.sources))
    found: Token | Explanation | Summary = getattr(response, response.WhichOneof("event") or "summary")
    return found


def fields(message: Message) -> dict[str, Any]:
    """A message as JSON has it: every field, messages as objects, repeated ones as lists, numbers as numbers."""

    def plain(value: Any) -> Any:
        return fields(value) if isinstance(value, Message) else value

    return {
        f.name: [plain(v) for v in getattr(message, f.name)] if f.is_repeated else plain(getattr(message, f.name))
        for f in message.DESCRIPTOR.fields
    }


def item(i: pb.Item) -> Item:
    return Item(i.name, i.documents, i.chunks, i.tokens, i.bytes, i.model, i.embedder)


def stats(s: pb.StatsResponse) -> Stats:
    values = {name: getattr(s, name) for name in Stats.__dataclass_fields__ if name != "model_fingerprint"}
    return Stats(model_fingerprint=s.model_fingerprint.hex(), **values)
