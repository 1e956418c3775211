"""A client on the service's machine copies from its memory, as long as its lease holds, and streams otherwise."""

import asyncio
import dataclasses
import errno
import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.kvcache_service.local import LocalTiers, path_of, receive, share_memory, share_segments
from fusionkv.kvcache_service.servicer import KVCacheServicer, handler
from fusionkv.kvcache_service.tiers.base import Place
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from tests.kvcache_service import tools

MIB = 1 << 20


@dataclasses.dataclass
class Near:
    """A service and a client on one machine."""

    service: Any
    client: CacheClient
    namespace: bytes

    async def fetched(self, entry: Any) -> tuple[bytes, int]:
        """The bytes of an entry, and how many of them the service streamed."""
        before = self.service.store.counters.get("bytes.fetched")
        buffer = bytearray(entry.size)
        await self.client.fetch(entry, memoryview(buffer), timeout=30)
        return bytes(buffer), self.service.store.counters.get("bytes.fetched") - before

    async def find(self, *path: bytes, **more: Any) -> Any:
        return await self.client.lookup(self.namespace, [(part, []) for part in path], **{"timeout": 10.0, **more})


@asynccontextmanager
async def nearby(service: Any, socket_path: Path, *, hand_over: bool = True) -> AsyncIterator[Near]:
    """Serves an open service on a unix socket too, with its memory handed over beside it."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(KVCacheServicer(service.store, service.config)),))
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    memory = service.store.residents.tiers[0]
    path = path_of(f"unix:{socket_path}")
    assert path is not None
    doorway = share_memory(path, memory.arena, memory.capacity_bytes, memory.file) if hand_over else None
    client = CacheClient(f"unix:{socket_path}")
    try:
        yield Near(service, client, tools.digest("namespace"))
    finally:
        await client.close()
        if doorway is not None:
            doorway.close()
        await server.stop(1)


@pytest.mark.parametrize("size", [1, 3 * MIB + 5, 9 * MIB])
async def test_a_leased_entry_in_memory_is_copied(start: Any, tmp_path: Path, size: int) -> None:
    service = await start(memory=16 * MIB, disk=64 * MIB)
    data, s = tools.payload("x", size), tools.digest("S")
    await service.put([s], data)
    async with nearby(service, tmp_path / "s") as near:
        found = await near.find(s)
        entry = found.hits[0].entry
        assert await near.fetched(entry) == (data, 0)
        assert await near.fetched(entry) == (data, 0)
        assert near.client.seen(entry) == data
        assert near.client.held(entry)
        await near.client.release(found.lease)
        assert near.client.seen(entry) is None
        assert not near.client.held(entry)
        assert await near.fetched(entry) == (data, size), "without a lease the service sends what is there"


async def test_who_is_handed_the_memory_can_not_change_it(start: Any, tmp_path: Path) -> None:
    """A descriptor that is read-only can be opened anew by its name in /proc."""
    service = await start()
    await service.put([tools.digest("S")], tools.payload("x", MIB))
    memory = service.store.residents.tiers[0]
    file = os.open(f"/proc/self/fd/{memory.file}", os.O_RDWR)
    for change in (
        lambda: os.pwrite(file, b"other bytes", 0),
        lambda: mmap.mmap(file, MIB),
        lambda: os.ftruncate(file, 0),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(file)
    await service.put([tools.digest("T")], tools.payload("y", MIB))
    assert await service.fetch((await service.find(tools.digest("T"))).hits[0].entry) == tools.payload("y", MIB)


async def test_what_is_copied_after_the_lease_may_be_another_entry_s_and_is_not_used(
    start: Any, tmp_path: Path
) -> None:
    service = await start(memory=1 * MIB, disk=64 * MIB)
    s, old, new = tools.digest("S"), tools.payload("old", MIB), tools.payload("new", MIB)
    await service.put([s], old)
    async with nearby(service, tmp_path / "s") as near:
        entry = (await near.find(s, lease_ms=50)).hits[0].entry
        # Its place in memory goes to another entry once the lease is over.
        service.clock.now += 100_000
        await asyncio.sleep(0.06)
        await service.put([tools.digest("T")], new)
        assert bytes(entry.shared) == new
        assert await near.fetched(entry) == (old, MIB)


async def test_a_lease_released_during_a_copy_makes_it_void() -> None:
    window = LocalTiers("unix:/nowhere")
    window.leased(7, float("inf"))
    data = memoryview(bytes(9 * MIB))
    copying = asyncio.create_task(window.copied(data, 7, memoryview(bytearray(9 * MIB))))
    await asyncio.sleep(0)
    window.released(7)
    assert not await copying


async def test_what_is_on_disk_or_elsewhere_is_streamed(start: Any, tmp_path: Path) -> None:
    service = await start(memory=1 * MIB, disk=64 * MIB)
    s, data = tools.digest("S"), tools.payload("x", 2 * MIB)
    await service.put([s], data)
    async with nearby(service, tmp_path / "s") as near:
        entry = (await near.find(s)).hits[0].entry
        assert (entry.tier, entry.shared) == ("disk", None)
        assert await near.fetched(entry) == (data, 2 * MIB)
    await service.put([tools.digest("T")], b"small")
    assert (await service.find(tools.digest("T"))).hits[0].entry.shared is None, "over TCP"


async def test_what_is_on_disk_rises_and_is_copied_then(start: Any, tmp_path: Path) -> None:
    service = await start(memory=1 * MIB, disk=64 * MIB)
    s, t = tools.digest("S"), tools.digest("T")
    first, second = tools.payload("first", MIB), tools.payload("second", MIB)
    await service.put([s], first)
    service.clock.now += 1000
    await service.put([t], second)
    async with nearby(service, tmp_path / "s") as near:
        entry = (await near.find(s)).hits[0].entry
        assert (entry.tier, entry.shared) == ("disk", None)
        assert await near.fetched(entry) == (first, 0)
        assert service.store.counters.get("promotions", "memory") == 1
        other = (await near.find(t)).hits[0].entry
        assert await near.fetched(other) == (second, MIB), "no room: the first is leased"


async def test_without_a_doorway_bytes_are_streamed(start: Any, tmp_path: Path, caplog: Any) -> None:
    service = await start()
    s, data = tools.digest("S"), tools.payload("x", 1000)
    await service.put([s], data)
    async with nearby(service, tmp_path / "s", hand_over=False) as near:
        for _ in range(3):
            assert await near.fetched((await near.find(s)).hits[0].entry) == (data, 1000)
    assert caplog.text.count("are streamed") == 1


async def test_a_service_started_anew_hands_over_anew(start: Any, tmp_path: Path) -> None:
    s = tools.digest("S")
    first = await start()
    await first.put([s], b"first")
    async with nearby(first, tmp_path / "s") as near:
        window = near.client._local
        old = (await near.find(s)).hits[0].entry
        assert bytes(old.shared) == b"first"
    # The same client meets another service behind the same name.
    later = MemoryTier(MIB)
    later.write(Place(0, 5), 0, [memoryview(b"later")])
    doorway = share_memory(tmp_path / "s.arena", later.arena, later.capacity_bytes, later.file)
    try:
        assert await window.open(b"n" * 16) is None, "another name was handed over: one start later"
        view = await window.open(later.arena)
        assert view is not None
        assert bytes(view[:5]) == b"later"
    finally:
        doorway.close()
        later.close()
    assert bytes(old.shared) == b"first", "an old view stays readable"
    assert bytes(view[:5]) == b"later"
    assert await window.open(b"m" * 16) is None, "nobody hands anything over any more"


async def test_nobody_can_write_through_what_is_handed_over(start: Any, tmp_path: Path) -> None:
    service = await start()
    async with nearby(service, tmp_path / "s"):
        name, view = await asyncio.to_thread(receive, tmp_path / "s.arena")
        assert name == service.store.residents.tiers[0].arena
        assert view.readonly

        def take() -> None:
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(tmp_path / "s.arena"))
                file = socket.recv_fds(caller, 100, 1)[1][0]
            try:
                with pytest.raises(PermissionError):
                    mmap.mmap(file, 4096)
            finally:
                os.close(file)

        await asyncio.to_thread(take)


@pytest.mark.parametrize("door", ["memory", "files"])
async def test_a_door_opens_again_after_a_shortage_of_descriptors(
    door: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await start(memory=1 * MIB, disk=64 * MIB)
    accept, refused = socket.socket.accept, []

    def short(self: socket.socket) -> Any:
        if not refused:
            refused.append(door)
            raise OSError(errno.EMFILE, "too many open files")
        return accept(self)

    path = tmp_path / "door"
    tier: Any = next(tier for tier in service.store.residents.tiers if (tier.name == "memory") == (door == "memory"))
    if door == "memory":
        opened: Any = share_memory(path, tier.arena, tier.capacity_bytes, tier.file)
    else:
        await service.put([tools.digest("S")], tools.payload("x", 2 * MIB))
        opened = share_segments(path, b"n" * 16, tier.open_segment)
    monkeypatch.setattr(socket.socket, "accept", short)
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(struct.pack("<I", 0))
    async with asyncio.timeout(60):
        assert len(await reader.read(100)) >= 16
    assert refused
    writer.close()
    opened.close()
