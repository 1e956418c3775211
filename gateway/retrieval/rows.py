"""Chunks to Arrow rows and back."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fusionkv.gateway.retrieval.base import Candidate, Chunk, ModelIdentity, packed, unpacked

# All that makes a Chunk, and its vector.
COLUMNS = ["document", "position", "text", "ids", "variant", "neighbours", "vector"]
_FORM = b"1"  # of a table whose metadata does not say
_VARIANT_COLUMNS = ["document", "position", "digest", "variant", "neighbours"]


def schema(model: ModelIdentity, dim: int) -> pa.Schema:
    """The table of a corpus; its metadata says which model it was made with."""
    return pa.schema(
        [
            ("document", pa.string()),
            ("position", pa.uint32()),
            ("text", pa.string()),
            ("ids", pa.list_(pa.uint32())),
            ("tokens", pa.uint32()),
            ("digest", pa.binary()),
            ("variant", pa.binary()),
            ("neighbours", pa.binary()),
            ("vector", pa.list_(pa.float32(), dim)),
        ],
        metadata={"fusionkv.fingerprint": model.fingerprint.hex(), "fusionkv.tokenizer": model.tokenizer.hex()},
    )


def check_form(schema: pa.Schema) -> None:
    """Raises ValueError where a table has what only a later version knows, and what a change would lose."""
    form = (schema.metadata or {}).get(b"fusionkv.form", _FORM)
    columns = sorted({*schema.names} - {*COLUMNS, "tokens", "digest"})
    if form != _FORM or columns:
        what = f"has the columns {', '.join(columns)}" if columns else f"is of form {form!r}"
        raise ValueError(f"a later version of FusionKV wrote it, it {what}")


def identity(schema: pa.Schema) -> ModelIdentity:
    """The model that a table was made with."""
    metadata = schema.metadata or {}
    return ModelIdentity(
        *(bytes.fromhex(metadata[b"fusionkv." + k].decode()) for k in (b"fingerprint", b"tokenizer"))
    )


def full(chunks: Sequence[Chunk], vectors: np.ndarray) -> pa.Table:
    """Whole rows; `vectors` is float32 `[chunk, dim]`."""
    dim = vectors.shape[1]
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
    return pa.table(
        {
            "document": pa.array([c.document for c in chunks], pa.string()),
            "position": pa.array([c.position for c in chunks], pa.uint32()),
            "text": pa.array([c.text for c in chunks], pa.string()),
            "ids": pa.array([c.ids for c in chunks], pa.list_(pa.uint32())),
            "tokens": pa.array([len(c.ids) for c in chunks], pa.uint32()),
            "digest": pa.array([c.digest for c in chunks], pa.binary()),
            "variant": pa.array([c.variant for c in chunks], pa.binary()),
            "neighbours": pa.array([packed(c.neighbours) for c in chunks], pa.binary()),
            "vector": pa.FixedSizeListArray.from_arrays(flat, dim),
        }
    )


def variants(chunks: Sequence[Chunk]) -> pa.Table:
    """Rows of only what names a chunk and what Precompute adds to it."""
    names = {name: [getattr(c, name) for c in chunks] for name in _VARIANT_COLUMNS}
    names["neighbours"] = [packed(c.neighbours) for c in chunks]
    kinds = {"document": pa.string(), "position": pa.uint32()}
    return pa.table({name: pa.array(column, kinds.get(name, pa.binary())) for name, column in names.items()})


def chunks(table: pa.Table) -> list[Chunk]:
    columns = [table[name].to_pylist() for name in COLUMNS[:-1]]
    return [Chunk(d, p, text, tuple(ids), v, unpacked(n)) for d, p, text, ids, v, n in zip(*columns, strict=True)]


def vectors(table: pa.Table) -> np.ndarray:
    """float32 `[row, dim]`."""
    dim = table.schema.field("vector").type.list_size
    if not len(table):
        return np.zeros((0, dim), np.float32)
    return table["vector"].combine_chunks().flatten().to_numpy().reshape(-1, dim)


def candidates(by_words: pa.Table, by_meaning: pa.Table, vector: np.ndarray) -> list[Candidate]:
    """Joins the two lists; the cosine of a chunk that only its words found is computed from its vector."""
    found: dict[tuple[str, int], Candidate] = {}
    for table in (by_words, by_meaning):
        words = table["_score"].to_pylist() if table is by_words else [0.0] * len(table)
        for chunk, score, cosine in zip(chunks(table), words, vectors(table) @ vector, strict=True):
            found.setdefault(chunk.key, Candidate(chunk, score, float(cosine)))
    return list(found.values())
