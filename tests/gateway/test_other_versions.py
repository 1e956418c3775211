"""Corpora that a gateway of another version wrote are refused, and stay as they are."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from lancedb import AsyncConnection, connect_async

from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from tests.gateway.conftest import Reopen
from tests.gateway.test_retrieval import put


@asynccontextmanager
async def tables(folder: Path) -> AsyncIterator[AsyncConnection]:
    connection = await connect_async(str(folder / "corpora"))
    yield connection
    connection.close()


async def later_column(folder: Path) -> None:
    async with tables(folder) as connection:
        await (await connection.open_table("corpus-c")).add_columns({"signature": "'signed'"})


async def other_form(folder: Path) -> None:
    async with tables(folder) as connection:
        rows = await (await connection.open_table("corpus-c")).to_arrow()
        metadata = {**rows.schema.metadata, b"fusionkv.form": b"2"}
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


@pytest.mark.parametrize("change", [later_column, other_form, later_lance])
async def test_they_are_refused_and_stay(tmp_path: Path, reopen: Reopen, change: Any) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "one")
    await put(engine, "other", "d", "two")
    await engine.close()
    await change(tmp_path)
    before = everything(tmp_path)
    told = r"corpus 'c' can't be read: .* use the version of FusionKV that wrote it"
    with pytest.raises(OSError, match=told) as refused:
        await EmbeddedRetrieval.open(tmp_path)
    assert "another version" in str(refused.value) or change is later_lance
    assert everything(tmp_path) == before
