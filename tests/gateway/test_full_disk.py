"""The embedded corpora on a disk that is full or read-only: calls say so, nothing is lost, all works again later."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.protos.runtime.errors import NotFound, ResourceExhausted, Unavailable
from tests.gateway.conftest import Reopen
from tests.gateway.test_retrieval import MODEL, put, texts
from tests.small_disk import SmallDisk, mounted


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path, "2m") as made:
        yield made


@pytest.mark.parametrize("read_only", [False, True])
async def test_changes_fail_and_nothing_is_lost(disk: SmallDisk, reopen: Reopen, read_only: bool) -> None:
    folder = disk.outside / "data"
    engine = await reopen(folder)
    await put(engine, "c", "a", "one")
    await put(engine, "c", "b", "two")
    changes: list[Callable[[], Awaitable[Any]]] = [
        lambda: put(engine, "c", "new", "three"),
        lambda: put(engine, "c", "a", "four"),
        lambda: put(engine, "other", "new", "three"),
        lambda: engine.delete("c", "b"),
    ]
    error, why = ResourceExhausted, "No space left on device"
    if read_only:
        error, why = Unavailable, "Read-only file system"
        disk.read_only("data")
        changes.append(lambda: engine.delete("c"))
    else:
        disk.fill()
    for change in changes:
        with pytest.raises(error, match=why):
            await change()
    assert [item.name for item in await engine.documents("c")] == ["a", "b"]
    assert [item.name for item in await engine.corpora()] == ["c"]
    assert sorted(await texts(engine, "c", "one two")) == ["one", "two"]
    if read_only:
        disk.writable("data")
    else:
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
