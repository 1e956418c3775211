"""A client on the service's machine copies from its memory, as long as its lease holds, and streams otherwise."""

import asyncio
import errno
import mmap
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service import local
from fusionkv.kvcache_service.local import (
    FileServer,
    LocalTiers,
    arena_path,
    map_arena,
    segments_path,
    share_memory,
    share_segments,
)
from fusionkv.kvcache_service.tiers.base import Place
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from tests.kvcache_service.tools import MIB, nearby, payload
from tests.waiting import until


@pytest.mark.parametrize("size", [1, 3 * MIB + 5, 9 * MIB])
async def test_a_leased_entry_in_memory_is_copied(start: Any, tmp_path: Path, size: int) -> None:
    service, data = await start(memory=16 * MIB, disk=64 * MIB), payload("x", size)
    await service.put("S", data)
    async with nearby(service, tmp_path / "s") as near:
        found = await near.find("S")
        entry = found.hits[0].entry
        assert await near.fetched(entry) == (data, 0)
        assert await near.fetched(entry) == (data, 0)
        assert near.client.view(entry) == data
        assert near.client.is_leased(entry)
        await near.client.release(found.lease)
        assert near.client.view(entry) is None
        assert not near.client.is_leased(entry)
        assert await near.fetched(entry) == (data, size), "without a lease the service sends what is there"


async def test_who_is_handed_the_memory_can_not_change_it(service: Any, tmp_path: Path) -> None:
    await service.put("S", payload("x", MIB))
    async with nearby(service, tmp_path / "s"):
        name, view = await asyncio.to_thread(map_arena, tmp_path / "s.arena")
        assert name == service.store.residents.tiers[0].arena
        assert view.readonly
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / "s.arena"))
            handed = (await asyncio.to_thread(socket.recv_fds, caller, 100, 1))[1][0]
    # A descriptor that is read-only can be opened anew by its name in /proc.
    anew = os.open(f"/proc/self/fd/{service.store.residents.tiers[0].file}", os.O_RDWR)
    for change in (
        lambda: mmap.mmap(handed, 4096),
        lambda: os.pwrite(anew, b"other bytes", 0),
        lambda: mmap.mmap(anew, MIB),
        lambda: os.ftruncate(anew, 0),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(handed)
    os.close(anew)
    await service.put("T", payload("y", MIB))
    assert await service.get("T") == payload("y", MIB)


async def test_what_is_copied_after_its_lease_is_not_used(start: Any, tmp_path: Path) -> None:
    service = await start(memory=1 * MIB, disk=64 * MIB)
    old, new = payload("old", MIB), payload("new", MIB)
    await service.put("S", old)
    async with nearby(service, tmp_path / "s") as near:
        entry = await near.entry("S", lease_ms=50)
        # Its place in memory goes to another entry once the lease is over.
        service.clock.now += 100_000
        await asyncio.sleep(0.06)
        await service.put("T", new)
        assert bytes(entry.shared) == new
        assert await near.fetched(entry) == (old, MIB)


async def test_a_lease_released_during_a_copy_makes_it_void() -> None:
    window = LocalTiers("unix:/nowhere")
    window.add_lease(7, float("inf"))
    data = memoryview(bytes(9 * MIB))
    copying = asyncio.create_task(window.copy_leased(data, 7, memoryview(bytearray(9 * MIB))))
    await asyncio.sleep(0)
    window.drop_lease(7)
    assert not await copying


async def test_nothing_is_copied_once_a_caller_has_left() -> None:
    window = LocalTiers("unix:/nowhere")
    window.add_lease(7, float("inf"))
    data, into = memoryview(b"\1" * (16 * MIB)), bytearray(16 * MIB)
    copying = asyncio.create_task(window.copy_leased(data, 7, memoryview(into)))
    await asyncio.sleep(0)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert into == data


async def test_without_a_doorway_bytes_are_streamed(service: Any, tmp_path: Path, caplog: Any) -> None:
    data = payload("x", 1000)
    await service.put("S", data)
    async with nearby(service, tmp_path / "s", send_file=False) as near:
        for _ in range(3):
            assert await near.fetched(await near.entry("S")) == (data, 1000)
    assert caplog.text.count("are streamed") == 1


async def test_what_was_not_handed_over_is_asked_for_again(service: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(local, "_OPEN_AGAIN_SECONDS", 0.1)
    name = service.store.residents.tiers[0].arena
    window = LocalTiers(f"unix:{tmp_path / 's'}")
    assert await window.open(name) is None
    async with nearby(service, tmp_path / "s"):
        assert await window.open(name) is None, "not at once"
        await asyncio.sleep(0.1)
        assert await window.open(name) is not None


async def test_a_segment_file_that_was_not_handed_over_is_asked_for_again(
    service: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """As when all descriptors were taken: for the rest of its life, the client had all bytes streamed."""
    monkeypatch.setattr(local, "_OPEN_AGAIN_SECONDS", 0.2)
    await service.put("S", b"data")
    address, files = f"unix:{tmp_path / 's'}", service.store.residents.home.segments
    window = LocalTiers(address)
    window._arena_name = bytes(16)

    async def read() -> bytes:
        return await window.read((0, 0), lambda file, at: os.pread(file, 4, at))

    assert await read() == b""
    door = share_segments(segments_path(arena_path(address)), bytes(16), files.open)
    assert await read() == b"", "not at once"
    await asyncio.sleep(0.2)
    assert await read() == b"data"
    door.close()
    window.close()


async def test_a_service_started_anew_hands_over_anew(service: Any, tmp_path: Path) -> None:
    await service.put("S", b"first")
    async with nearby(service, tmp_path / "s") as near:
        window = near.client._local
        old = await near.entry("S")
        assert bytes(old.shared) == b"first"
    # The same client meets another service behind the same name.
    later = MemoryTier(MIB)
    later.write(Place(0, 5), 0, [memoryview(b"later")])
    doorway = share_memory(tmp_path / "s.arena", later.arena, later.capacity_bytes, later.file)
    try:
        assert await window.open(b"n" * 16) is None, "another name was handed over: one start later"
        view = await window.open(later.arena)
        assert bytes(view[:5]) == b"later"
    finally:
        doorway.close()
        later.close()
    assert bytes(old.shared) == b"first", "an old view stays readable"
    assert bytes(view[:5]) == b"later"
    assert await window.open(b"m" * 16) is None, "nobody hands anything over any more"


async def test_a_segment_file_that_comes_too_late_is_closed(service: Any, tmp_path: Path) -> None:
    await service.put("S", payload("x", MIB))
    files, path, asked, answer = (
        service.store.residents.home.segments,
        tmp_path / "s",
        threading.Event(),
        asyncio.Event(),
    )
    window = LocalTiers(f"unix:{path}")
    window._arena_name = bytes(16)

    async def send_file(caller: socket.socket) -> None:
        asked.set()
        await answer.wait()
        opened = files.open(0)
        socket.send_fds(caller, [b"another start..."], [opened])
        os.close(opened)

    def times_open() -> int:
        file = str(service.config.data_dir / "segments/000000.kv")
        return sum(os.path.realpath(link) == file for link in Path("/proc/self/fd").iterdir())

    door, before = FileServer(segments_path(arena_path(f"unix:{path}")), send_file), times_open()
    reading = asyncio.create_task(window.read((0, 0), lambda file, offset: b"read"))
    await until(asked.is_set)
    answer.set()
    assert await reading == b""
    await until(lambda: not door._answering)
    assert times_open() == before
    door.close()


async def test_a_door_opens_again_after_emfile(service: Any, tmp_path: Path, monkeypatch: Any) -> None:
    accept, refused, path = socket.socket.accept, [], tmp_path / "door"

    def short(self: socket.socket) -> Any:
        if not refused and self.getsockname() == str(path):
            refused.append(True)
            raise OSError(errno.EMFILE, "too many open files")
        return accept(self)

    memory = service.store.residents.tiers[0]
    door = share_memory(path, memory.arena, memory.capacity_bytes, memory.file)
    monkeypatch.setattr(socket.socket, "accept", short)
    name, _ = await asyncio.to_thread(map_arena, path)
    assert (name, refused) == (memory.arena, [True])
    door.close()
    assert not path.exists()
