"""Rows of a corpus's collection in Milvus: one for the corpus, one per document and one per chunk."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from pymilvus import DataType, Function, FunctionType, MilvusClient
from pymilvus.milvus_client import IndexParams
from pymilvus.orm.schema import CollectionSchema

from fusionkv.gateway.retrieval.base import Query, TextChunk
from fusionkv.gateway.tokens import ModelIdentity
from fusionkv.protos.runtime.errors import InvalidArgument

FORMAT = 2  # of the rows, in the collections' names: collections of another format are not read
_CORPUS, _DOCUMENT = -2, -1
_CORPUS_KEY = "corpus"
# Conditions for the three kinds of rows.
IS_CORPUS, IS_DOCUMENT, IS_CHUNK = f'key == "{_CORPUS_KEY}"', f"position == {_DOCUMENT}", "position >= 0"
# Maximum size of a VARCHAR field in Milvus.
_MAX_BYTES = 65_535
# No stemming, for any language.
_ANALYZER = {"tokenizer": "standard", "filter": ["lowercase"]}
_TEXTS = {"key": 64, "owner": 64, "document": _MAX_BYTES, "revision": 64, "ids": _MAX_BYTES, "digest": 64}
_TEXTS |= {"variant": 64, "title": _MAX_BYTES, "source": _MAX_BYTES}
_NUMBERS = ("position", "neighbours", "tokens", "bytes", "chunks", "since")
# All fields except the sparse vector, which Milvus computes.
COLUMNS = [*_TEXTS, *_NUMBERS, "text", "metadata", "vector"]
# Fields of a corpus's own row: its name, and the models that it was built with, as JSON.
OWN = ["document", "ids"]
# Width of the placeholder vectors that Milvus requires in rows without an embedder; they are never searched.
FILLER = 2
# Function words, which are removed from questions. In a small corpus, "of" is rare enough to weigh as much as a
# title, and a page with three of them ranked above the relevant page.
_SMALL = (
    "a an and are as at be but by do does for from had has have how in is it its of on or that the their there these "
    "this those to was were what when where which who whom whose why with"
)
_FUNCTION_WORDS = frozenset(_SMALL.split())
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})

Row = dict[str, Any]


class Version(NamedTuple):
    """The current version of a document.

    Attributes:
        revision: revision of its chunks; older revisions sort before it.
        since: time of the revision in seconds.
    """

    revision: str
    since: int
    chunks: int


def schema(dim: int) -> CollectionSchema:
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    for name, size in _TEXTS.items():
        schema.add_field(name, DataType.VARCHAR, max_length=size, is_primary=name == "key")
    for name in _NUMBERS:
        schema.add_field(name, DataType.INT64)
    schema.add_field("metadata", DataType.JSON)
    schema.add_field("text", DataType.VARCHAR, max_length=_MAX_BYTES, enable_analyzer=True, analyzer_params=_ANALYZER)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    schema.add_field("words", DataType.SPARSE_FLOAT_VECTOR)
    schema.add_function(Function("bm25", FunctionType.BM25, input_field_names=["text"], output_field_names=["words"]))
    return schema


def indexes() -> IndexParams:
    params = MilvusClient.prepare_index_params()
    params.add_index("vector", index_type="AUTOINDEX", metric_type="IP")
    params.add_index("words", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25")
    params.add_index("owner", index_type="INVERTED")
    params.add_index("position", index_type="INVERTED")
    return params


def owner(document: str) -> str:
    """The key of a document's row, also stored as the `owner` of its chunks."""
    return hashlib.blake2b(document.encode(), digest_size=24).hexdigest()


def new_revision() -> str:
    """A unique revision that sorts after earlier ones, as far as clocks agree."""
    return f"{time.time_ns():020d}{np.random.default_rng().integers(1 << 32):08x}"


def hour_old() -> str:
    """A revision that sorts after all revisions that are more than an hour old."""
    return f"{time.time_ns() - 3_600_000_000_000:020d}"


def of_corpus(corpus: str, model: ModelIdentity, dim: int) -> Row:
    made_with = json.dumps([model.fingerprint.hex(), model.tokenizer.hex(), model.embedder, model.name])
    return _row(dim, _CORPUS_KEY, _CORPUS) | {"document": corpus, "ids": made_with}


def of_document(document: str, revision: str, chunks: Sequence[TextChunk], dim: int) -> Row:
    sizes = {"chunks": len(chunks), "tokens": sum(len(c.ids) for c in chunks), "since": int(time.time())}
    sizes["bytes"] = sum(len(c.text.encode()) for c in chunks)
    names = {"document": document, "revision": revision, "source": chunks[0].source if chunks else ""}
    return _row(dim, owner(document), _DOCUMENT) | names | sizes


def of_chunk(chunk: TextChunk, revision: str, vector: np.ndarray) -> Row:
    """The row of a chunk. Raises InvalidArgument if it is too large for Milvus."""
    ids = base64.b64encode(np.array(chunk.ids, "<u4").tobytes()).decode()
    if max(len(ids), len(chunk.text.encode())) > _MAX_BYTES:
        raise InvalidArgument(
            f"chunk {chunk.position} of {chunk.document!r} is larger than a field of Milvus (65,535 bytes, or 12,287 "
            "tokens): lower chunk_tokens"
        )
    return _row(0, chunk_key(chunk, revision), chunk.position) | {
        "owner": owner(chunk.document),
        "document": chunk.document,
        "revision": revision,
        "text": chunk.text,
        "ids": ids,
        "digest": chunk.digest.hex(),
        "variant": chunk.variant.hex(),
        "neighbours": chunk.neighbours,
        "title": chunk.title,
        "source": chunk.source,
        "metadata": dict(chunk.metadata),
        "vector": vector if vector.size else [1.0] + [0.0] * (FILLER - 1),
    }


def chunk_key(chunk: TextChunk, revision: str) -> str:
    return hashlib.blake2b(
        f"{owner(chunk.document)} {revision} {chunk.position}".encode(), digest_size=24
    ).hexdigest()


def chunk(row: Row) -> TextChunk:
    ids = tuple(np.frombuffer(base64.b64decode(row["ids"]), "<u4").tolist())
    metadata = json.loads(row["metadata"]) if isinstance(row["metadata"], str) else row["metadata"]
    pairs = tuple(sorted((metadata or {}).items()))
    values = row["document"], row["position"], row["text"], ids, bytes.fromhex(row["variant"]), row["neighbours"]
    return TextChunk(*values, row["title"], row["source"], pairs)


def vector(row: Row) -> np.ndarray:
    return np.asarray(row["vector"], np.float32)


def condition(query: Query) -> str:
    """The condition for the chunks among which a query searches."""
    pairs = (f"metadata[{_quoted(key)}] == {_quoted(value)}" for key, value in query.where.items())
    conditions = [IS_CHUNK, *pairs]
    if query.without:
        conditions.append(f"digest not in {json.dumps(sorted(digest.hex() for digest in query.without))}")
    return " and ".join(conditions)


def _quoted(text: str) -> str:
    """A text in a condition. Not as in JSON: Milvus reads other control characters as they are, and no escapes."""
    return '"' + text.translate(_ESCAPES) + '"'


def identity(row: Row) -> ModelIdentity:
    """The models that a corpus was built with, from its own row."""
    fingerprint, tokenizer, *more = json.loads(row["ids"])
    return ModelIdentity(bytes.fromhex(fingerprint), bytes.fromhex(tokenizer), *more)


def _row(dim: int, key: str, position: int) -> Row:
    row: Row = dict.fromkeys(_TEXTS, "") | dict.fromkeys(_NUMBERS, 0)
    return row | {"key": key, "position": position, "text": "", "metadata": {}, "vector": [0.0] * dim}


def without_function_words(question: str) -> str:
    """The question without its function words, or unchanged if it has no other words."""
    words = [w for w in question.split() if w.strip(".,:;!?\"'()").lower() not in _FUNCTION_WORDS]
    return " ".join(words) or question
