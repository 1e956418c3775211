"""Corpora that a gateway of before wrote: they are read, and changed in place.

Where a chunk has now how many neighbours it was encoded with, they have a digest of that set.
"""

from pathlib import Path

import pyarrow as pa
from lancedb import connect_async

from fusionkv.gateway.retrieval import milvus_rows
from fusionkv.gateway.retrieval.base import Chunk, Retrieval
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.gateway.retrieval.milvus import MilvusRetrieval
from tests.gateway.test_retrieval import DIM, MODEL, put, texts, vector

ONE = Chunk("d", 0, "one", tuple(b"one"), b"v" * 32)
SET = b"n" * 32


async def make(folder: Path) -> None:
    """A table with one chunk, whose columns and metadata are written out here."""
    kinds = {"document": pa.string(), "position": pa.uint32(), "text": pa.string(), "ids": pa.list_(pa.uint32())}
    kinds |= {"tokens": pa.uint32()} | dict.fromkeys(("digest", "variant", "neighbours"), pa.binary())
    kinds |= {"vector": pa.list_(pa.float32(), DIM)}
    metadata = {"fusionkv.fingerprint": MODEL.fingerprint.hex(), "fusionkv.tokenizer": MODEL.tokenizer.hex()}
    row = [
        ONE.document,
        ONE.position,
        ONE.text,
        [*ONE.ids],
        len(ONE.ids),
        ONE.digest,
        ONE.variant,
        SET,
        vector("one"),
    ]
    schema = pa.schema([*kinds.items()], metadata=metadata)
    rows = pa.Table.from_pylist([dict(zip(kinds, row, strict=True))], schema=schema)
    connection = await connect_async(str(folder / "corpora"))
    await connection.create_table("corpus-c", rows)
    connection.close()


async def check(engine: Retrieval) -> None:
    """The set counts as none, so no recipe takes its variant and Precompute writes the count beside it."""
    assert [chunk for chunk, _ in await engine.chunks("c", "d", MODEL)] == [ONE]
    encoded = Chunk(ONE.document, ONE.position, ONE.text, ONE.ids, b"w" * 32, 10)
    await engine.set_variants("c", [encoded])
    assert [chunk for chunk, _ in await engine.chunks("c", "d", MODEL)] == [encoded]
    assert await put(engine, "c", "d", "two")
    assert not await put(engine, "c", "e", "three")
    assert sorted(await texts(engine, "c", "one two three")) == ["three", "two"]


async def test_in_a_folder(tmp_path: Path) -> None:
    await make(tmp_path)
    engine = await EmbeddedRetrieval.open(tmp_path)
    await check(engine)
    await engine.close()


async def test_in_milvus(milvus: str, tmp_path: Path) -> None:
    texts_of_a_row = {"key", "owner", "document", "revision", "ids", "digest", "variant", "neighbours", "text"}
    assert set(milvus_rows.COLUMNS) == texts_of_a_row | {"position", "tokens", "bytes", "chunks", "since", "vector"}
    engine = await MilvusRetrieval.open(milvus, str(tmp_path))
    await put(engine, "c", "d", "one")
    name = engine._collection("c")
    (own,) = await engine._milvus.query(name, milvus_rows.IS_CORPUS)
    assert own["neighbours"] == MODEL.tokenizer.hex()
    (row,) = await engine._milvus.query(name, milvus_rows.IS_CHUNK)
    await engine._milvus.write(name, [row | {"variant": ONE.variant.hex(), "neighbours": SET.hex()}])
    await check(engine)
    await engine.close()
