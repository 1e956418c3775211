"""Redis below memory and disk: real services over a real Redis."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.kvcache_service.config import Config
from fusionkv.protos.runtime.errors import DataLoss, ResourceExhausted, Unavailable
from tests.system.redis_process import RedisServer
from tests.waiting import until

pytestmark = pytest.mark.system
MIB = 1 << 20


class Caller:
    """A service, and a client that finds and fetches from it."""

    def __init__(self, service: Any, tools: Any) -> None:
        self.service = service
        self.client = CacheClient(service.address)
        self._digest = tools.digest

    async def put(self, name: str, data: bytes) -> None:
        namespace, path = self._digest("namespace"), [self._digest(name)]
        await self.client.put(namespace=namespace, path=path, tokens=1, base=0, data=memoryview(data), timeout=60)

    async def find(self, name: str) -> Entry | None:
        path: list[Any] = [(self._digest(name), ())]
        found = await self.client.lookup(self._digest("namespace"), path, lease_ms=1, timeout=30)
        return found.hits[0].entry

    async def fetched(self, name: str) -> bytes:
        entry = await self.find(name)
        assert entry is not None
        buffer = bytearray(entry.size)
        await self.client.fetch(entry, memoryview(buffer), timeout=60)
        return bytes(buffer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    yield made
    made.kill9()


@pytest.fixture
async def start(launch: Any, server: RedisServer, tools: Any, tmp_path: Path) -> AsyncIterator[Callable[..., Caller]]:
    """`start(*flags)`: a service with 1 MiB of memory and no disk, over an empty Redis at first."""
    server.client().flushall()
    callers: list[Caller] = []

    def make(*flags: str) -> Caller:
        place = ("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / f"data{len(callers)}"))
        tiers = ("--memory-bytes", "1MiB", "--disk-bytes", "0", "--remote-url", server.url, "--remote-name", "own")
        # A busy machine is no silent Redis.
        flags = ("--remote-timeout", "30", *flags)
        callers.append(Caller(launch("fusionkv.kvcache_service", *place, *tiers, *flags), tools))
        return callers[-1]

    yield make
    for caller in callers:
        await caller.client.close()


async def test_entries_outlive_the_machine(start: Any, tools: Any) -> None:
    """A service that was killed, started anew with other disks: what it had is found and right."""
    large, small = tools.payload("large", 3 * MIB + 17), tools.payload("small", 1000)
    first = start("--disk-bytes", "8MiB")
    await first.put("L", large)
    await first.put("S", small)
    entry = await first.find("L")
    assert entry is not None
    assert entry.tier == "disk"
    assert await first.fetched("L") == large
    first.service.kill9()
    second = start("--disk-bytes", "8MiB")
    for name, data in (("L", large), ("S", small)):
        entry = await second.find(name)
        assert entry is not None
        assert entry.tier == "remote"
        assert await second.fetched(name) == data
    risen = [await second.find(name) for name in "LS"]
    assert [entry.tier for entry in risen if entry is not None] == ["disk", "memory"]
    assert await second.fetched("L") == large
    assert second.service.stop() == 0


async def test_it_is_bounded_and_expires(start: Any, server: RedisServer, tools: Any) -> None:
    caller = start("--remote-bytes", "4MiB", "--remote-ttl-seconds", "500")
    for number in range(10):
        await caller.put(f"E{number}", tools.payload(number, 3 * MIB // 2))
    found = [await caller.find(f"E{number}") for number in range(10)]
    assert sum(entry is not None for entry in found) == 2
    assert await caller.fetched("E9") == tools.payload(9, 3 * MIB // 2)
    redis = server.client()
    blocks = list(redis.scan_iter(b"fusionkv:tier:{own}:b:*"))
    assert sum(redis.strlen(block) for block in blocks) <= 4 * MIB
    records = list(redis.scan_iter(b"fusionkv:tier:{own}:r:*"))
    assert len(records) == 2
    assert all(0 < redis.pttl(name) <= 500_000 for name in (*blocks, *records))


async def test_what_has_expired_is_a_miss(start: Any, server: RedisServer, tools: Any) -> None:
    caller = start()
    await caller.put("E", tools.payload("x", 2 * MIB))
    server.client().delete(*server.client().scan_iter(b"fusionkv:tier:{own}:b:*"))
    with pytest.raises(DataLoss):
        await caller.fetched("E")
    assert await caller.find("E") is None


@pytest.mark.slow
async def test_a_silent_redis_costs_time_and_no_entry(start: Any, server: RedisServer, tools: Any) -> None:
    caller, data = start("--remote-timeout", "3"), tools.payload("x", 2 * MIB)
    await caller.put("E", data)
    server.pause()
    try:
        with pytest.raises(Unavailable, match="Redis of the remote tier"):
            await caller.fetched("E")
    finally:
        server.resume()

    async def back() -> bool:
        with contextlib.suppress(Unavailable):
            return await caller.fetched("E") == data
        return False

    await until(back)


async def test_a_name_belongs_to_one_service(start: Any, tools: Any) -> None:
    first, data = start(), tools.payload("x", 2 * MIB)
    await first.put("E", data)
    second = start()
    with pytest.raises(ResourceExhausted, match="give each a remote_name of its own"):
        await first.put("F", data)
    await second.put("F", data)
    assert await second.fetched("E") == await second.fetched("F") == data
    other = start("--remote-name", "another")
    assert await other.find("E") is None


def test_what_can_not_be_configured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not encrypted"):
        Config(remote_url="redis://127.0.0.1", disk_keys=tmp_path)
    with pytest.raises(ValueError, match="remote_name"):
        Config(remote_name="a*")
