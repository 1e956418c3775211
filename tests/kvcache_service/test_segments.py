"""A client on the service's machine reads what is on disk alone from the segment files, verified, under its lease."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.kvcache_service.tools import MIB, Caller, disk_keys, nearby, payload
from tests.waiting import until


@pytest.fixture
async def service(start: Any) -> Any:
    return await start(memory=MIB, disk=64 * MIB)


@pytest.fixture
async def near(service: Any, tmp_path: Path) -> AsyncIterator[Caller]:
    """A client beside a service with 1 MiB of memory."""
    async with nearby(service, tmp_path / "s") as caller:
        yield caller


@pytest.mark.parametrize("size", [2 * MIB, 5 * MIB + 3])
async def test_what_is_on_disk_is_read_there(near: Caller, size: int) -> None:
    for name in "ST":
        await near.put(name, payload(name, size))
    for name in "STS":
        entry = await near.entry(name)
        assert (entry.tier, entry.shared) == ("disk", None)
        assert await near.fetched(entry) == (payload(name, size), 0)


async def test_without_a_lease_it_is_streamed(near: Caller) -> None:
    data = payload("x", 2 * MIB)
    await near.put("S", data)
    entry = await near.entry("S", lease_ms=1)
    await asyncio.sleep(0.01)
    assert await near.fetched(entry) == (data, len(data))


async def test_damaged_bytes_are_not_used(service: Any, near: Caller) -> None:
    """What does not have its checksum comes by stream, and that finds it damaged."""
    key, _ = await near.put("S", payload("x", 2 * MIB))
    entry, disk = await near.entry("S"), service.store.residents.home
    disk.write(service.store.entries.get(key).places["disk"], MIB + 7, [memoryview(b"damage")])
    with pytest.raises(Exception, match="damaged"):
        await near.fetched(entry)
    assert (await near.client.stats()).checksum_failures == 1


async def test_what_is_hot_rises_while_nobody_waits(service: Any, near: Caller) -> None:
    # Memory has room for two: the third, which is new, takes the first one's place.
    for name in "STU":
        await near.put(name, payload(name, MIB // 2))
        service.clock.now += 1
    assert (await near.entry("S", lease_ms=1)).tier == "disk"
    assert await near.fetched(await near.entry("S")) == (payload("S", MIB // 2), 0)

    async def risen() -> bool:
        return (await near.entry("S")).tier == "memory"

    await until(risen)
    assert await near.fetched(await near.entry("S")) == (payload("S", MIB // 2), 0)


async def test_encrypted_files_are_not_handed_over(start: Any, tmp_path: Path) -> None:
    service = await start(memory=MIB, disk=64 * MIB, keys=disk_keys(tmp_path / "keys", os.urandom(32)))
    data = payload("x", 2 * MIB)
    async with nearby(service, tmp_path / "s") as near:
        await near.put("S", data)
        entry = await near.entry("S")
        assert entry.extent is None
        assert await near.fetched(entry) == (data, len(data))
        assert not (tmp_path / "s.segments").exists()
