"""What moves to another service arrives as it was: its heat, and the demand for its path that it is kept for."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import HitKind
from fusionkv.kvcache_service.mover import Mover
from tests.waiting import until


@pytest.mark.parametrize("leaves", [False, True], ids=["join", "leave"])
async def test_an_offered_entry_that_is_kept_for_its_own_path_is_kept_where_it_moves(
    tmp_path: Path, tools: Any, leaves: bool
) -> None:
    s, a, b, c = (tools.digest(name) for name in "SABC")
    async with tools.serving(tmp_path / "old") as old, tools.serving(tmp_path / "new") as new:
        assert (await old.put([s, c], b"alone" * 1000, offered=True))[1]
        assert not (await old.put([s, a, b, c], b"behind" * 1000, offered=True))[1]
        for _ in range(2):
            await old.find(s, a, b, c, lease_ms=1)
        assert (await old.put([s, a, b, c], b"behind" * 1000, offered=True))[1]
        mover = Mover(old.store, lambda: [new.address], None)
        mover.own = old.address
        if leaves:
            await mover.hand_over()
        else:
            mover.members_changed()
            moving = asyncio.create_task(mover.move())
            await until(lambda: old.store.counters.get("moves") == 2)
            moving.cancel()
        hit = (await new.find(s, a, b, c, lease_ms=1)).hits[-1]
        assert hit.kind is HitKind.EXACT
        assert await new.fetch(hit.entry) == b"behind" * 1000
        assert (await new.find(s, c, lease_ms=1)).hits[-1].kind is HitKind.EXACT
        await mover.close()
