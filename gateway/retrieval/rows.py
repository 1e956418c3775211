"""Converts chunks to Arrow rows and back."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from fusionkv.gateway.retrieval.base import Candidate, Chunk
from fusionkv.gateway.tokens import ModelIdentity

# The columns of a Chunk.
COLUMNS = ["document", "position", "text", "ids", "variant", "neighbours", "title", "source", "metadata"]
VECTOR = "vector"
_FORMAT = "3"
_SCHEMA = pa.schema(
    {
        "document": pa.string(),
        "position": pa.uint32(),
        "text": pa.string(),
        "ids": pa.list_(pa.uint32()),
        "tokens": pa.uint32(),
        "digest": pa.binary(),
        "variant": pa.binary(),
        "neighbours": pa.uint32(),
        "title": pa.string(),
        "source": pa.string(),
        "metadata": pa.list_(pa.string()),
    }
)


def schema(model: ModelIdentity, dim: int) -> pa.Schema:
    """The schema of a corpus's table, with the models as metadata; without an embedder, it has no vector column."""
    columns = _SCHEMA.append(pa.field(VECTOR, pa.list_(pa.float32(), dim))) if dim else _SCHEMA
    made_with = {
        "fusionkv.form": _FORMAT,
        "fusionkv.fingerprint": model.fingerprint.hex(),
        "fusionkv.tokenizer": model.tokenizer.hex(),
        "fusionkv.embedder": model.embedder,
        "fusionkv.model": model.name,
    }
    return columns.with_metadata(made_with)


def check_format(schema: pa.Schema) -> None:
    """Raises ValueError if another version wrote a table, whose data a change might lose."""
    form = (schema.metadata or {}).get(b"fusionkv.form", b"").decode()
    columns = sorted({*schema.names} - {*_SCHEMA.names, VECTOR})
    if form != _FORMAT or columns:
        difference = f"has the columns {', '.join(columns)}" if columns else f"has format {form!r}"
        raise ValueError(f"another version of FusionKV wrote it: it {difference}")


def identity(schema: pa.Schema) -> ModelIdentity:
    """The models that a corpus was built with. Raises KeyError if the table's metadata lack one."""
    names = ("fingerprint", "tokenizer", "embedder", "model")
    fingerprint, tokenizer, *more = (schema.metadata[f"fusionkv.{name}".encode()].decode() for name in names)
    return ModelIdentity(bytes.fromhex(fingerprint), bytes.fromhex(tokenizer), *more)


def has_all(where: Mapping[str, str]) -> str:
    conditions = ", ".join(quoted(f"{key}={value}") for key, value in where.items())
    return f"array_has_all(metadata, make_array({conditions}))"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def full(chunks: Sequence[Chunk], vectors: np.ndarray) -> pa.Table:
    """Complete rows; `vectors` is float32 `[chunk, dim]`."""
    values = [
        vars(chunk)
        | {"tokens": len(chunk.ids), "digest": chunk.digest}
        | {"metadata": ["=".join(pair) for pair in chunk.metadata]}
        for chunk in chunks
    ]
    table = pa.Table.from_pylist(values, schema=_SCHEMA)
    if dim := vectors.shape[1]:
        flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
        table = table.append_column(VECTOR, pa.FixedSizeListArray.from_arrays(flat, dim))
    return table


def variants(chunks: Sequence[Chunk]) -> pa.Table:
    """Rows with only a chunk's key columns and the columns that Precompute sets."""
    return full(chunks, np.zeros((len(chunks), 0))).select(
        ["document", "position", "digest", "variant", "neighbours"]
    )


def chunks(table: pa.Table) -> list[Chunk]:
    return [
        Chunk(**row | {"ids": tuple(row["ids"]), "metadata": _pairs(row["metadata"])})
        for row in table.select(COLUMNS).to_pylist()
    ]


def _pairs(metadata: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, _, value in (pair.partition("=") for pair in metadata))


def vectors(table: pa.Table) -> np.ndarray:
    """Vectors, float32 `[row, dim]`; of width 0 if the table has none."""
    if VECTOR not in table.column_names:
        return np.zeros((len(table), 0), np.float32)
    dim = table.schema.field(VECTOR).type.list_size
    if not len(table):
        return np.zeros((0, dim), np.float32)
    return table[VECTOR].combine_chunks().flatten().to_numpy().reshape(-1, dim)


def candidates(by_words: pa.Table, by_meaning: pa.Table | None, vector: np.ndarray | None) -> list[Candidate]:
    """Merges the two lists; computes the cosine of chunks found only by BM25 from their vectors."""
    merged: dict[tuple[str, int], Candidate] = {}
    for table in (by_words, *([by_meaning] if by_meaning is not None else [])):
        words = table["_score"].to_pylist() if table is by_words else [0.0] * len(table)
        cosines = vectors(table) @ vector if vector is not None else np.zeros(len(table))
        for chunk, score, cosine in zip(chunks(table), words, cosines, strict=True):
            merged.setdefault(chunk.key, Candidate(chunk, score, float(cosine)))
    return list(merged.values())
