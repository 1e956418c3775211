"""Corpora that a gateway of before wrote: they are listed, and moved. Of a later one: they are refused.

Where a chunk has now how many neighbours it was encoded with, they have a digest of that set.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lancedb import AsyncConnection, connect_async

from fusionkv.gateway.retrieval import milvus_rows
from fusionkv.gateway.retrieval.base import Chunk
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.gateway.retrieval.milvus import MilvusRetrieval
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.gateway.conftest import Reopen
from tests.gateway.test_retrieval import DIM, MODEL, put, texts, vector

ONE = Chunk("d", 0, "one", tuple(b"one"), b"v" * 32)
SET = b"n" * 32


@asynccontextmanager
async def tables(folder: Path) -> AsyncIterator[AsyncConnection]:
    connection = await connect_async(str(folder / "corpora"))
    yield connection
    connection.close()


async def make(folder: Path) -> None:
    """A table with one chunk, whose columns and metadata are written out here."""
    columns = {
        "document": pa.string(), "position": pa.uint32(), "text": pa.string(), "ids": pa.list_(pa.uint32()),
        "tokens": pa.uint32(), "digest": pa.binary(), "variant": pa.binary(), "neighbours": pa.binary(),
        "vector": pa.list_(pa.float32(), DIM),
    }  # fmt: skip
    metadata = {"fusionkv.fingerprint": MODEL.fingerprint.hex(), "fusionkv.tokenizer": MODEL.tokenizer.hex()}
    row = {name: getattr(ONE, name, None) for name in columns}
    row |= {"ids": [*ONE.ids], "tokens": len(ONE.ids), "neighbours": SET, "vector": vector("one")}
    rows = pa.Table.from_pylist([row], schema=pa.schema(columns, metadata=metadata))
    async with tables(folder) as connection:
        await connection.create_table("corpus-c", rows)


async def rewrite(chunks: Sequence[Chunk], vectors: np.ndarray) -> tuple[Sequence[Chunk], np.ndarray]:
    """As the gateway moves them: the same text, with an embedder's vectors."""
    return chunks, np.stack([vector(chunk.text) for chunk in chunks])


async def test_in_a_folder(tmp_path: Path, reopen: Reopen) -> None:
    """Its vectors are the language model's, so that it has to be moved; what it is called and its text stay."""
    await make(tmp_path)
    engine = await reopen(tmp_path)
    (corpus,) = await engine.corpora()
    assert (corpus.name, corpus.chunks, corpus.embedder) == ("c", 1, "the language model")
    with pytest.raises(FailedPrecondition, match=r"embeddings of the language model, .*: run `fusionkv move c`"):
        await put(engine, "c", "d", "two")
    assert [done async for done in engine.move("c", rewrite, MODEL)] == [1]
    # The set counts as none, so no recipe takes its variant and Precompute writes the count beside it.
    assert [chunk for chunk, _ in await engine.chunks("c", "d", MODEL)] == [ONE]
    encoded = replace(ONE, variant=b"w" * 32, neighbours=10)
    await engine.set_variants("c", [encoded])
    assert [chunk for chunk, _ in await engine.chunks("c", "d", MODEL)] == [encoded]
    assert await put(engine, "c", "d", "two")
    assert not await put(engine, "c", "e", "three")
    assert sorted(await texts(engine, "c", "one two three")) == ["three", "two"]


async def test_in_milvus(milvus: str, tmp_path: Path) -> None:
    """It can't be moved there: it is told, and deleted."""
    engine = await MilvusRetrieval.open(milvus, str(tmp_path))
    await put(engine, "c", "d", "one")
    name = engine._collection("c")
    (own,) = await engine._milvus.query(name, milvus_rows.IS_CORPUS)
    assert own["neighbours"] == MODEL.tokenizer.hex()
    await engine._milvus.write(name, [own | {"ids": "", "owner": ""}])
    assert [(i.name, i.embedder) for i in await engine.corpora()] == [("c", "the language model")]
    with pytest.raises(FailedPrecondition, match="embeddings of the language model"):
        await engine.chunks("c", "d", MODEL)
    with pytest.raises(FailedPrecondition, match=r"in Milvus, .*: delete it and ingest it again"):
        _ = [done async for done in engine.move("c", rewrite, MODEL)]
    await engine.delete("c")
    await put(engine, "c", "d", "one")
    await engine.close()


async def later_column(folder: Path) -> None:
    async with tables(folder) as connection:
        await (await connection.open_table("corpus-c")).add_columns({"signature": "'signed'"})


async def later_form(folder: Path) -> None:
    async with tables(folder) as connection:
        rows = await (await connection.open_table("corpus-c")).to_arrow()
        metadata = {**rows.schema.metadata, b"fusionkv.form": b"3"}
        await connection.create_table("corpus-c", rows.replace_schema_metadata(metadata), mode="overwrite")


async def later_lance(folder: Path) -> None:
    """The newest manifest of the table with a flag that a reader has to know, which none of today's does.

    A manifest ends with its protobuf message, the place of that and a footer of 16 bytes.
    """
    newest = min((folder / "corpora" / "corpus-c.lance" / "_versions").glob("*.manifest"))
    data = newest.read_bytes()
    place, version, magic = data[-16:-8], data[-8:-4], data[-4:]
    assert magic == b"LANC"
    at = int.from_bytes(place, "little")
    size = int.from_bytes(data[at : at + 4], "little")
    message = data[at + 4 : at + 4 + size] + b"\x48\x80\x80\x80\x80\x01"  # reader_feature_flags (9) = 1 << 28
    newest.write_bytes(data[:at] + len(message).to_bytes(4, "little") + message + place + version + magic)


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("change", [later_column, later_form, later_lance])
async def test_of_a_later_version_they_are_refused_and_stay(tmp_path: Path, reopen: Reopen, change: Any) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "one")
    await put(engine, "other", "d", "two")
    await engine.close()
    await change(tmp_path)
    before = everything(tmp_path)
    told = r"corpus 'c' can't be read: .* use the version of FusionKV that wrote it"
    with pytest.raises(OSError, match=told) as refused:
        await EmbeddedRetrieval.open(tmp_path)
    assert "later version" in str(refused.value) or change is later_lance
    assert everything(tmp_path) == before
