"""A client on the service's machine reads what is on disk alone from the segment files, verified, under its lease."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.kvcache_service.tools import MIB, Caller, payload
from tests.system.cache_process import flags
from tests.waiting import until

pytestmark = pytest.mark.system


@pytest.fixture
def near(launch: Any, cache_client: Any, tmp_path: Path) -> Any:
    """`near(*flags)`: a client beside a service with 1 MiB of memory."""

    def start(*more: str) -> Caller:
        address = f"unix:{tmp_path}/s"
        launch(*flags(tmp_path / "data", "--listen", address, *more, memory="1MiB", disk="64MiB"))
        return Caller(cache_client(address))

    return start


@pytest.mark.parametrize("size", [2 * MIB, 5 * MIB + 3])
async def test_what_is_on_disk_is_read_there(near: Any, size: int) -> None:
    there = near()
    for name in "ST":
        await there.put(name, payload(name, size))
    for name in "STS":
        entry = await there.entry(name)
        assert (entry.tier, entry.shared) == ("disk", None)
        assert await there.fetched(entry) == (payload(name, size), 0)


async def test_without_a_lease_it_is_streamed(near: Any) -> None:
    there, data = near(), payload("x", 2 * MIB)
    await there.put("S", data)
    entry = await there.entry("S", lease_ms=1)
    await asyncio.sleep(0.01)
    assert await there.fetched(entry) == (data, len(data))


async def test_damaged_bytes_are_not_used(near: Any, tmp_path: Path) -> None:
    """What does not have its checksum comes by stream, and that finds it damaged."""
    there = near()
    await there.put("S", payload("x", 2 * MIB))
    entry = await there.entry("S")
    (file,) = (tmp_path / "data/segments").glob("*.kv")
    with file.open("r+b") as segment:
        segment.seek(entry.extent[1] + MIB + 7)
        segment.write(b"damage")
    with pytest.raises(Exception, match="damaged"):
        await there.fetched(entry)
    assert (await there.client.stats()).checksum_failures == 1


async def test_what_is_hot_rises_while_nobody_waits(near: Any) -> None:
    there = near()
    # Memory has room for two: the third, which is new, takes the first one's place.
    for name in "STU":
        await there.put(name, payload(name, MIB // 2))
    assert (await there.entry("S", lease_ms=1)).tier == "disk"
    assert await there.fetched(await there.entry("S")) == (payload("S", MIB // 2), 0)

    async def risen() -> bool:
        return (await there.entry("S")).tier == "memory"

    await until(risen)
    assert await there.fetched(await there.entry("S")) == (payload("S", MIB // 2), 0)


async def test_encrypted_files_are_not_handed_over(near: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(os.urandom(32).hex() + "\n")
    there, data = near("--disk-keys", str(tmp_path / "keys")), payload("x", 2 * MIB)
    await there.put("S", data)
    entry = await there.entry("S")
    assert entry.extent is None
    assert await there.fetched(entry) == (data, len(data))
    assert not (tmp_path / "s.segments").exists()
