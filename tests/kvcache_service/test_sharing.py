"""What a service does with its remote tier, over an engine that is a dictionary and fails as it is told."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import HitKind
from fusionkv.kvcache_service.remote.tier import Engine
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.protos.runtime.errors import NotFound, ResourceExhausted, Unavailable
from tests.kvcache_service import tools
from tests.waiting import until

MIB = 1 << 20


@dataclass
class Dictionary(Engine):
    values: dict[str, bytes] = field(default_factory=dict)
    away: bool = False
    full: bool = False
    calls: list[str] = field(default_factory=list)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        self._called("get")
        return [self.values.get(name) for name in names]

    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        self._called("put")
        if self.full:
            raise OSError("full")
        self.values.update(values)

    def touch(self, names: Sequence[str]) -> list[bool]:
        self._called("touch")
        return [name in self.values for name in names]

    def remove(self, names: Sequence[str]) -> None:
        self._called("remove")
        for name in names:
            self.values.pop(name, None)

    def remove_all(self, prefix: str) -> None:
        self._called("remove_all")
        self.values = {name: value for name, value in self.values.items() if not name.startswith(prefix)}

    def close(self) -> None:
        pass

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.away:
            raise Unreachable("away")

    @property
    def blocks(self) -> list[str]:
        return [name for name in self.values if "{" not in name]


@pytest.fixture
def engine() -> Dictionary:
    return Dictionary()


@pytest.fixture
async def serve(engine: Dictionary, tmp_path: Path) -> AsyncIterator[Any]:
    """`await serve(memory=, disk=)` starts one more service over the engine."""
    async with AsyncExitStack() as stack:
        count = 0

        async def one(**more: Any) -> Any:
            nonlocal count
            count += 1
            return await stack.enter_async_context(tools.serving(tmp_path / f"{count}", engine=engine, **more))

        yield one


async def shared(service: Any) -> None:
    await until(lambda: not service.sharing.waiting)


async def test_what_is_found_exactly_here_asks_nobody(serve: Any, engine: Dictionary) -> None:
    service, path = await serve(), [tools.digest(name) for name in "SAB"]
    for n in (1, 2, 3):
        await service.put(path[:n], b"data")
    await shared(service)
    asked = engine.calls.count("get")
    assert {hit.kind for hit in (await service.find(*path)).hits} == {HitKind.EXACT}
    assert engine.calls.count("get") == asked
    await service.find(*path, tools.digest("C"), tools.digest("D"))
    assert engine.calls.count("get") == asked + 1


async def test_it_is_copied_by_being_looked_up(serve: Any) -> None:
    a, b, s = await serve(), await serve(), tools.digest("S")
    data = tools.payload("x", 3 * MIB + 5)
    await a.put([s], data)
    await shared(a)
    found = await b.find(s)
    assert (found.hits[0].entry.tier, found.lease, found.hits[0].entry.lease) == ("remote", 0, 0)
    await until(lambda: len(b.store.residents) == 1)
    assert (await b.find(s)).hits[0].entry.tier == "memory"
    stats = await b.client.stats()
    assert (stats.remote.read, stats.remote.written, stats.remote.waiting) == (1, 0, 0)
    assert (await a.client.stats()).remote.written == 1


async def test_many_fetch_what_is_copied_once(serve: Any, engine: Dictionary) -> None:
    a, b, s = await serve(), await serve(), tools.digest("S")
    data = tools.payload("x", 2 * MIB)
    await a.put([s], data)
    await shared(a)
    entry = (await b.find(s)).hits[0].entry
    assert await asyncio.gather(*(b.fetch(entry) for _ in range(20))) == [data] * 20
    assert (await b.client.stats()).remote.read == 1


async def test_one_that_was_only_offered_is_kept_where_it_is_copied(serve: Any) -> None:
    """Its path was asked for once, and another entry of the chunk is here: a Put would be superfluous."""
    a, b = await serve(), await serve()
    s, x, y = (tools.digest(name) for name in "SXY")
    await a.put([s, x, y], b"long", offered=True)
    await b.put([s, y], b"short", offered=True)
    await shared(a)
    hit = (await b.find(s, x, y)).hits[2]
    assert hit.kind is HitKind.EXACT
    assert await b.fetch(hit.entry) == b"long"
    assert (await b.find(s, x, y)).hits[2].kind is HitKind.EXACT


@pytest.mark.parametrize("how", ["changed", "short", "long", "gone", "another's"])
async def test_damage_there_is_a_miss_and_is_deleted(serve: Any, engine: Dictionary, how: str) -> None:
    a, b, s = await serve(), await serve(), tools.digest("S")
    data = tools.payload("x", 2 * MIB)
    await a.put([s], data)
    await shared(a)
    first, second = engine.blocks
    if how == "gone":
        del engine.values[second]
    else:
        value, other = engine.values[second], engine.values[first]
        wrong = {"changed": value[:-1] + b"!", "short": value[:-1], "long": value + b"x", "another's": other}
        engine.values[second] = wrong[how]
    entry = (await b.find(s)).hits[0].entry
    with pytest.raises(NotFound):
        await b.fetch(entry)
    assert (await b.find(s)).hits[0].kind is HitKind.MISS
    assert engine.values == {}
    assert (await b.client.stats()).checksum_failures == (how in ("changed", "another's"))
    # Who has it whole writes it anew once it is used there.
    await a.find(s)

    async def healed() -> bool:
        await a.find(s)
        return bool(engine.blocks)

    await until(healed)
    await shared(a)
    assert await b.fetch((await b.find(s)).hits[0].entry) == data


async def test_without_room_here_it_is_refused_and_nothing_is_held(serve: Any) -> None:
    a, b = await serve(), await serve(memory=MIB, disk=2 * MIB)
    s, t = tools.digest("S"), tools.digest("T")
    await a.put([s], tools.payload("x", 3 * MIB // 2))
    await b.put([t], tools.payload("y", 3 * MIB // 2))
    await shared(a)
    lease = (await b.find(t)).lease
    entry = (await b.find(s)).hits[0].entry
    with pytest.raises(ResourceExhausted):
        await b.fetch(entry)
    await b.client.release(lease)
    assert await b.fetch((await b.find(s)).hits[0].entry) == tools.payload("x", 3 * MIB // 2)


async def test_while_it_is_away_nobody_asks_and_nothing_is_lost(serve: Any, engine: Dictionary) -> None:
    a, b, s = await serve(), await serve(), tools.digest("S")
    await a.put([s], b"before")
    await shared(a)
    entry = (await b.find(s)).hits[0].entry
    await until(lambda: len(b.store.residents) == 1)
    engine.away = True
    assert (await b.find(tools.digest("T"))).hits[0].kind is HitKind.MISS
    asked = engine.calls.count("get")
    for _ in range(20):
        assert (await b.find(tools.digest("T"))).hits[0].kind is HitKind.MISS
    assert engine.calls.count("get") == asked
    assert await b.fetch(entry) == b"before"
    await a.put([tools.digest("U")], b"meanwhile")
    await until(lambda: not a.sharing.reachable)
    assert (await a.client.stats()).remote.waiting == 1
    with pytest.raises(Unavailable, match="remote tier"):
        await a.client.delete(namespace=tools.digest("other"))
    engine.away = False
    await until(lambda: a.sharing.reachable and b.sharing.reachable)
    await shared(a)
    assert await b.fetch((await b.find(tools.digest("U"))).hits[0].entry) == b"meanwhile"


async def test_it_goes_away_between_lookup_and_fetch(serve: Any, engine: Dictionary) -> None:
    a, b, s = await serve(), await serve(), tools.digest("S")
    await a.put([s], tools.payload("x", MIB))
    await shared(a)
    b.sharing._pulls.update((bytes([n]), asyncio.get_running_loop().create_future()) for n in range(4))  # all at work
    entry = (await b.find(s)).hits[0].entry
    b.sharing._pulls.clear()
    engine.away = True
    with pytest.raises(NotFound):
        await b.fetch(entry)
    assert (await b.find(s)).hits[0].kind is HitKind.MISS
    engine.away = False


async def test_one_that_is_full_keeps_nothing_back(serve: Any, engine: Dictionary) -> None:
    service, s = await serve(), tools.digest("S")
    engine.full = True
    await service.put([s], b"data")
    await shared(service)
    assert service.sharing.reachable
    assert engine.values == {}
    engine.full = False

    async def written() -> bool:
        await service.find(s)
        return bool(engine.blocks)

    await until(written)


async def test_a_deletion_reaches_what_is_being_written(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    for round in range(20):
        key, _ = await service.put([tools.digest(f"{round}")], tools.payload(round, 2 * MIB))
        for _ in range(round):
            await asyncio.sleep(0)
        await service.client.delete([key])
        await shared(service)
        await until(lambda: not service.store.tasks)
        assert engine.values == {}, round


async def test_a_deletion_reaches_what_is_being_copied(serve: Any, engine: Dictionary) -> None:
    a, b = await serve(), await serve()
    for round in range(20):
        s = tools.digest(f"{round}")
        key, _ = await a.put([s], tools.payload(round, 2 * MIB))
        await shared(a)
        entry = (await b.find(s)).hits[0].entry
        for _ in range(round):
            await asyncio.sleep(0)
        await b.client.delete([entry.key])
        assert (await b.find(s)).hits[0].kind is HitKind.MISS, round
        await a.client.delete([key])
        assert engine.values == {}, round


async def test_a_deletion_here_alone_leaves_it_there(serve: Any, engine: Dictionary) -> None:
    service, s = await serve(), tools.digest("S")
    key, _ = await service.put([s], b"data")
    await shared(service)
    assert await service.client.delete([key], here=True) == 1
    assert await service.fetch((await service.find(s)).hits[0].entry) == b"data"
    await service.client.delete([key])
    assert engine.values == {}


async def test_at_its_end_a_service_writes_back_all(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    for n in range(20):
        await service.put([tools.digest(f"{n}")], tools.payload(n, 300_000))
    await service.sharing.flush(30)
    assert len(engine.blocks) == 20
    engine.away = True
    await service.put([tools.digest("more")], b"data")
    await service.sharing.flush(0.05)
    engine.away = False
