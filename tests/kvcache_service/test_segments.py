"""A client on the service's machine reads what is on disk alone from the segment files, verified, under its lease."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient, Entry
from tests.kvcache_service import tools
from tests.waiting import until

pytestmark = pytest.mark.system
MIB = 1 << 20


class Near:
    """A service with 1 MiB of memory, a hot entry that fills it, and a client beside it."""

    def __init__(self, launch: Callable[..., Any], folder: Path, digest: Callable[[str], bytes], *flags: str) -> None:
        self.folder = folder
        self._digest = digest
        listen, place = ("--listen", f"unix:{folder}/s"), ("--data-dir", str(folder / "data"))
        limits = ("--memory-bytes", "1MiB", "--disk-bytes", "64MiB")
        self.service = launch("fusionkv.kvcache_service", *listen, *place, *limits, *flags)
        self.client = CacheClient(f"unix:{folder}/s")

    async def put(self, name: str, data: bytes) -> None:
        """Stores an entry, which memory has no room for."""
        namespace, path = self._digest("namespace"), [self._digest(name)]
        await self.client.put(namespace=namespace, path=path, tokens=1, base=0, data=memoryview(data), timeout=30)

    async def find(self, name: str, lease_ms: int = 60_000) -> Entry:
        path: list[Any] = [(self._digest(name), ())]
        found = await self.client.lookup(self._digest("namespace"), path, lease_ms=lease_ms, timeout=30)
        entry = found.hits[0].entry
        assert entry is not None
        return entry

    async def fetched(self, entry: Entry) -> tuple[bytes, int]:
        """The bytes of an entry, and how many of them were streamed."""
        before = (await self.client.stats()).bytes_fetched
        buffer = bytearray(entry.size)
        await self.client.fetch(entry, memoryview(buffer), timeout=30)
        return bytes(buffer), (await self.client.stats()).bytes_fetched - before


@pytest.fixture
async def near(launch: Any, tmp_path: Path) -> AsyncIterator[Callable[..., Near]]:
    started: list[Near] = []

    def start(*flags: str) -> Near:
        started.append(Near(launch, tmp_path, tools.digest, *flags))
        return started[-1]

    yield start
    for each in started:
        await each.client.close()


@pytest.mark.parametrize("size", [2 * MIB, 5 * MIB + 3])
async def test_what_is_on_disk_is_read_there(near: Any, size: int) -> None:
    there = near()
    data, other = tools.payload("x", size), tools.payload("y", size)
    await there.put("S", data)
    await there.put("T", other)
    for name, expected in (("S", data), ("T", other), ("S", data)):
        entry = await there.find(name)
        assert (entry.tier, entry.shared) == ("disk", None)
        assert await there.fetched(entry) == (expected, 0)


async def test_without_a_lease_it_is_streamed(near: Any) -> None:
    there, data = near(), tools.payload("x", 2 * MIB)
    await there.put("S", data)
    entry = await there.find("S", lease_ms=1)
    await asyncio.sleep(0.01)
    assert await there.fetched(entry) == (data, len(data))


async def test_damaged_bytes_are_not_used(near: Any) -> None:
    """What does not have its checksum comes by stream, and that finds it damaged."""
    there, data = near(), tools.payload("x", 2 * MIB)
    await there.put("S", data)
    entry = await there.find("S")
    (file,) = (there.folder / "data/segments").glob("*.kv")
    with file.open("r+b") as segment:
        segment.seek(entry.extent[1] + MIB + 7)
        segment.write(b"damage")
    with pytest.raises(Exception, match="damaged"):
        await there.fetched(entry)
    assert (await there.client.stats()).checksum_failures == 1


async def test_what_is_hot_rises_while_nobody_waits(near: Any) -> None:
    there, data = near(), tools.payload("x", MIB // 2)
    # Memory has room for two: the third, which is new, takes the first one's place.
    await there.put("S", data)
    await there.put("T", tools.payload("y", MIB // 2))
    await there.put("U", tools.payload("z", MIB // 2))
    assert (await there.find("S", lease_ms=1)).tier == "disk"
    entry = await there.find("S")
    assert await there.fetched(entry) == (data, 0)

    async def risen() -> bool:
        return (await there.find("S")).tier == "memory"

    await until(risen)
    assert await there.fetched(await there.find("S")) == (data, 0)


async def test_encrypted_files_are_not_handed_over(near: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(os.urandom(32).hex() + "\n")
    there, data = near("--disk-keys", str(keys)), tools.payload("x", 2 * MIB)
    await there.put("S", data)
    entry = await there.find("S")
    assert entry.extent is None
    assert await there.fetched(entry) == (data, len(data))
    assert not (there.folder / "s.segments").exists()
