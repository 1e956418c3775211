"""The embedded corpora on a full disk: calls say so, nothing stored is lost, and all works again with room."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionkv.protos.runtime.errors import NotFound, ResourceExhausted
from tests.gateway.conftest import Reopen
from tests.gateway.test_retrieval import MODEL, put, texts
from tests.small_disk import SmallDisk, mounted


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path, "2m") as made:
        yield made


async def test_changes_fail_and_nothing_is_lost(disk: SmallDisk, reopen: Reopen) -> None:
    folder = disk.outside / "data"
    engine = await reopen(folder)
    await put(engine, "c", "a", "one")
    await put(engine, "c", "b", "two")
    disk.fill()
    for change in (
        lambda: put(engine, "c", "new", "three"),
        lambda: put(engine, "c", "a", "four"),
        lambda: put(engine, "other", "new", "three"),
        lambda: engine.delete("c", "b"),
    ):
        with pytest.raises(ResourceExhausted, match="No space left on device"):
            await change()
    assert [item.name for item in await engine.documents("c")] == ["a", "b"]
    assert [item.name for item in await engine.corpora()] == ["c"]
    assert sorted(await texts(engine, "c", "one two")) == ["one", "two"]
    engine = await reopen(folder)  # still full
    assert sorted(await texts(engine, "c", "one two")) == ["one", "two"]
    disk.empty()
    await put(engine, "c", "a", "four")
    await put(engine, "other", "new", "three")
    await engine.delete("c", "b")
    engine = await reopen(folder)
    assert await texts(engine, "c", "one two four") == ["four"]
    assert await texts(engine, "other", "three") == ["three"]


async def test_a_corpus_that_could_not_be_made_can_be_made_later(disk: SmallDisk, reopen: Reopen) -> None:
    """Its table, its indexes and its first rows are files, one after the other: each may be the first too many."""
    folder = disk.outside / "data"
    engine = await reopen(folder)
    refused = 0
    for room in range(0, 80 << 10, 4 << 10):
        disk.fill(room)
        try:
            await put(engine, "c", "a", "one")
        except ResourceExhausted:
            refused += 1
            with contextlib.suppress(NotFound):
                assert await engine.chunks("c", "a", MODEL) == []
            if refused % 2:  # a start, on the full disk
                engine = await reopen(folder)
            disk.empty()
            await put(engine, "c", "a", "one")
        else:
            disk.empty()
        assert await texts(engine, "c", "one") == ["one"]
        await engine.delete("c")
    assert refused > 5
