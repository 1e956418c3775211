"""What a Lookup finds on disk rises before it is fetched; what a caller reads itself rises later."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.store import reading
from tests.kvcache_service.tools import MIB, Service, digest, nearby, payload, serving
from tests.waiting import until

SIZE = 900_000


class Slow:
    """Holds up reads of the disk tier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
        self.gate, self.read = asyncio.Event(), service.store.reader._in_thread
        self.waiting = 0
        monkeypatch.setattr(service.store.reader, "_in_thread", self.in_thread)

    async def in_thread(self, function: Any, *args: Any) -> Any:
        if function.__name__ == "copy":
            self.waiting += 1
            await self.gate.wait()
        return await self.read(function, *args)


async def stored(service: Service, *paths: str) -> list[bytes]:
    """Entries on disk alone, and others that fill the memory."""
    for path in paths:
        await service.put(path, payload(path[-1], SIZE))
    service.clock.now += 10  # these are hotter than those before, and colder than what is found later
    for i in range(service.config.memory_bytes // 901_120):
        await service.put([f"other {i}"], bytes(SIZE))
    service.clock.now += 1000
    return [digest(path[-1]) for path in paths]


async def test_what_a_lookup_finds_on_disk_rises_before_it_is_fetched(start: Any) -> None:
    service = await start(memory=2 * MIB, disk=32 * MIB)
    a, b, _ = await stored(service, *"abc")
    found = await service.find(*"ab")
    assert [hit.entry.tier if hit.entry else None for hit in found.hits] == ["disk", None]
    await until(lambda: a in service.chunks("memory"))
    assert service.count("promotions") == 1
    assert await service.fetch(found.hits[0].entry) == payload("a", SIZE)
    assert service.count("promotions") == 1, "it was there"
    await service.find("b")
    await until(lambda: service.chunks("memory") == {a, b})
    await service.find("c")
    await service.settled()
    assert service.chunks("memory") == {a, b}, "as hot, and leased"


async def test_a_lookup_waits_for_nothing_and_too_much_is_not_begun(start: Any, monkeypatch: Any) -> None:
    service, most = await start(memory=8 * MIB, disk=32 * MIB), reading._MAX_LOOKUPS
    digests = await stored(service, *"abcdef")
    slow = Slow(monkeypatch, service)
    entries = [await service.entry(digest) for digest in digests]
    assert {entry.tier for entry in entries} == {"disk"}
    assert slow.waiting == len(service.store.reader.prefetching) == most
    fetching = asyncio.create_task(service.fetch(entries[0]))
    await until(lambda: service.store.entries.get(entries[0].key).pins == 3)  # the third is that fetch
    slow.gate.set()
    assert await fetching == payload("a", SIZE)
    await service.settled()
    assert service.chunks("memory") > set(digests[:most])
    assert not service.chunks("memory") & set(digests[most:])
    assert slow.waiting == service.count("promotions") == most, "read once, by both"


@pytest.mark.parametrize("how", ["its lease is released", "the store closes"])
async def test_one_read_ends_and_no_other_is_begun(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, memory=8 * MIB, disk=32 * MIB) as service:
        s, a = await stored(service, "s", "sa")
        slow = Slow(monkeypatch, service)
        found = await service.find("s", "a")
        await until(lambda: slow.waiting == 1)
        if how == "the store closes":
            for task in service.store.reader.prefetching:
                task.cancel()
            await until(lambda: not service.store.reader.prefetching)
            assert service.store.reader.reads
        else:
            await service.client.release(found.lease)
        slow.gate.set()
        await service.settled()
        assert s in service.chunks("memory")
        assert a not in service.chunks("memory")


async def test_what_a_caller_reads_in_the_files_rises_later(start: Any, tmp_path: Path) -> None:
    service = await start(memory=2 * MIB, disk=32 * MIB)
    (a,) = await stored(service, "a")
    async with nearby(service, tmp_path / "socket", send_file=False) as near:
        asked = time.monotonic()
        found = await near.find("a")
        assert found.hits[0].entry.extent is not None
        await near.client.release(found.lease)
        await until(lambda: a in service.chunks("memory"))
        assert time.monotonic() - asked >= reading._LATER_SECONDS, "the caller's own reads come first"


async def test_what_rises_later_takes_no_place_of_other_lookups(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(reading, "_LATER_SECONDS", 3600)
    service = await start(memory=2 * MIB, disk=32 * MIB)
    (a,) = await stored(service, "a")
    async with nearby(service, tmp_path / "socket", send_file=False) as near:
        for _ in range(reading._MAX_LOOKUPS):
            await near.find("a")
        await service.find("a")
        await until(lambda: a in service.chunks("memory"))
    for task in service.store.reader.prefetching:
        task.cancel()
