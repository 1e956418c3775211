"""What a Lookup finds on disk rises before it is fetched; not for who reads the files by himself, or has let go."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.kvcache_service.servicer import KVCacheServicer, handler
from fusionkv.kvcache_service.store import reading
from tests.kvcache_service import tools
from tests.waiting import until

MIB = 1 << 20


class Slow:
    """Holds up reads of the disk tier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, service: Any) -> None:
        self.gate, self.read = asyncio.Event(), service.store.in_thread
        self.waiting = 0
        monkeypatch.setattr(service.store, "in_thread", self.in_thread)

    async def in_thread(self, function: Any, *args: Any) -> Any:
        if function.__name__ == "copy":
            self.waiting += 1
            await self.gate.wait()
        return await self.read(function, *args)


async def stored(service: Any, *names: str) -> list[bytes]:
    """Entries of 900 kB on disk alone, and others that fill the memory."""
    digests = [tools.digest(name) for name in names]
    for name, digest in zip(names, digests, strict=True):
        await service.put([digest], tools.payload(name, 900_000))
    service.clock.now += 10  # these are hotter than those before, and colder than what is found later
    for i in range(service.config.memory_bytes // 901_120):
        await service.put([tools.digest(f"other {i}")], bytes(900_000))
    service.clock.now += 1000
    return digests


def in_memory(service: Any) -> set[bytes]:
    return {entry.record.chunk for entry in service.store.residents if "memory" in entry.places}


async def test_what_a_lookup_finds_on_disk_rises_before_it_is_fetched(start: Any) -> None:
    service = await start(memory=2 * MIB, disk=32 * MIB)
    a, b, c = await stored(service, *"abc")
    found = await service.find(a, b)
    assert [hit.entry.tier if hit.entry else None for hit in found.hits] == ["disk", None]
    await until(lambda: a in in_memory(service))
    assert service.store.counters.get("promotions", "memory") == 1
    assert await service.fetch(found.hits[0].entry) == tools.payload("a", 900_000)
    assert service.store.counters.get("promotions", "memory") == 1, "it was there"
    await service.find(b)
    await until(lambda: in_memory(service) == {a, b})
    await service.find(c)
    await service.settled()
    assert in_memory(service) == {a, b}, "as hot, and leased"


async def test_a_lookup_waits_for_nothing_and_too_much_is_not_begun(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await start(memory=8 * MIB, disk=32 * MIB)
    digests = await stored(service, *"abcdef")
    slow = Slow(monkeypatch, service)
    found = [await service.find(digest) for digest in digests]
    assert all(there.hits[0].entry.tier == "disk" for there in found)
    assert slow.waiting == len(service.store.prefetching) == reading._MAX_LOOKUPS
    fetching = asyncio.create_task(service.fetch(found[0].hits[0].entry))
    slow.gate.set()
    assert await fetching == tools.payload("a", 900_000)
    await service.settled()
    assert in_memory(service) > set(digests[: reading._MAX_LOOKUPS])
    assert not in_memory(service) & set(digests[reading._MAX_LOOKUPS :])
    assert service.store.counters.get("promotions", "memory") == reading._MAX_LOOKUPS, "read once, by both"


async def test_for_who_has_let_go_nothing_more_rises(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = await start(memory=8 * MIB, disk=32 * MIB)
    s, a = tools.digest("s"), tools.digest("a")
    await service.put([s], tools.payload("s", 900_000))
    await service.put([s, a], tools.payload("a", 900_000))
    await stored(service)
    slow = Slow(monkeypatch, service)
    found = await service.find(s, a)
    await until(lambda: slow.waiting == 1)
    await service.client.release(found.lease)
    slow.gate.set()
    await service.settled()
    assert s in in_memory(service)
    assert a not in in_memory(service)


async def test_who_reads_the_files_by_himself_gets_nothing_taken_up(start: Any, tmp_path: Path) -> None:
    service = await start(memory=2 * MIB, disk=32 * MIB)
    (a,) = await stored(service, "a")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(KVCacheServicer(service.store, service.config)),))
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    client = CacheClient(f"unix:{tmp_path}/socket")
    entry = (await client.lookup(tools.digest("namespace"), [(a, ())], timeout=30)).hits[0].entry
    assert entry is not None
    assert entry.extent is not None
    assert not service.store.prefetching
    await client.close()
    await server.stop(0)


async def test_a_store_that_closes_waits_for_one_read_and_begins_no_other(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tools.serving(tmp_path / "more", memory=8 * MIB, disk=32 * MIB) as service:
        s, a = tools.digest("s"), tools.digest("a")
        await service.put([s], tools.payload("s", 900_000))
        await service.put([s, a], tools.payload("a", 900_000))
        await stored(service)
        slow = Slow(monkeypatch, service)
        await service.find(s, a)
        await until(lambda: slow.waiting == 1)
        for task in service.store.prefetching:
            task.cancel()
        await until(lambda: not service.store.prefetching)
        assert service.store.loading
        slow.gate.set()
        await service.settled()
        assert s in in_memory(service)
        assert a not in in_memory(service)
