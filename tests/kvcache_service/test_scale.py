"""The scale bench: what it stores is what it says it asks for, and a restart has all of it."""

import asyncio
from pathlib import Path

import pytest

from fusionkv.bench.cache import scale


def test_a_small_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "LOOKUPS", 20)
    monkeypatch.setattr(scale, "ADDED", 100)
    # It asserts itself that every path is found as meant, and that as many entries come back.
    row = asyncio.run(scale.measure(tmp_path, 3000))
    assert row.chunks == 3000
    assert 0 < row.bytes_per_chunk < 10_000
    assert set(row.lookup_us) == {"exact", "alternative", "miss"}
    assert all(0 < median <= high for median, high in row.lookup_us.values())


def test_the_store_that_it_opens_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "ADDED", 100)

    async def check() -> None:
        scale.write_files(tmp_path, 2000)
        store = scale.make_store(tmp_path, 2000)
        await store.open()
        store.check_integrity()
        assert len({entry.record.chunk for entry in store.residents}) == 2 * (scale.GROUP - 1)
        scale.add(store, 2000)
        store.check_integrity()
        assert len(store.residents) == 2100
        await store.close()

    asyncio.run(check())
