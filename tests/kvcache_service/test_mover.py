"""What moves to another service arrives as it was, with its heat and the demand for its path, and is never lost."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import HitKind
from fusionkv.kvcache_service.cluster.mover import Mover
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.store.entries import StoredEntry
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


class Watching:
    """Tells a mover what a replica would."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def published(self, record: Record) -> None:
        self._mover.stays(record.key)

    def put_again(self, record: Record) -> None:
        self._mover.stays(record.key)

    def withdrawn(self, record: Record) -> None: ...

    def warmed(self, entry: StoredEntry) -> None: ...


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "at once"])
async def test_two_that_each_think_an_entry_belongs_to_the_other_do_not_lose_it(
    tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Each sees the other alone among the living, as for a moment when Redis is slow and both begin anew."""
    monkeypatch.setattr("fusionkv.kvcache_service.cluster.mover._GRACE_SECONDS", 1.0)
    path = [tools.digest(name) for name in "SA"]
    async with tools.serving(tmp_path / "a") as a, tools.serving(tmp_path / "b") as b:
        movers = [Mover(here.store, lambda there=there: [there.address], None) for here, there in ((a, b), (b, a))]
        for mover, here in zip(movers, (a, b), strict=True):
            mover.own = here.address
            here.store.residents.watcher = Watching(mover)
            assert (await here.put(path, b"kv" * 1000))[1]
            mover.members_changed()
        tasks = [asyncio.create_task(mover.copy()) for mover in movers]
        for number, (mover, here) in enumerate(zip(movers, (a, b), strict=True)):
            tasks.append(asyncio.create_task(mover.move()))
            if not together or number:
                await until(lambda here=here: here.store.counters.get("moves") == 1)
        # Over the time that what was moved stays, and the second in which that is looked at.
        await asyncio.sleep(2.5)
        found = [(await here.find(*path, lease_ms=1)).hits[-1].entry for here in (a, b)]
        assert found[0] is not None, "it was given back"
        assert together or found[1] is None, "it has moved"
        for task in tasks:
            task.cancel()
        for mover in movers:
            await mover.close()


async def test_what_was_moved_of_late_is_not_deleted_there_when_the_service_leaves(
    tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given again, to the same home, and its time here ends in the middle of that."""
    monkeypatch.setattr("fusionkv.kvcache_service.cluster.mover._GRACE_SECONDS", 0.0)
    path = [tools.digest(name) for name in "SA"]
    async with tools.serving(tmp_path / "old") as old, tools.serving(tmp_path / "new") as new:
        key, _ = await old.put(path, b"kv" * 1000)
        mover = Mover(old.store, lambda: [new.address], None)
        mover.own = old.address
        await mover._depart(key, new.address)
        peer = mover._peer(new.address)
        send = peer.send

        async def late(*given: Any) -> Any:
            await mover._forget_moved()
            return await send(*given)

        monkeypatch.setattr(peer, "send", late)
        await mover.hand_over()
        assert (await new.find(*path, lease_ms=1)).hits[-1].entry is not None
        await mover.close()
