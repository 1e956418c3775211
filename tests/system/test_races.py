"""Many who put one key with different bytes in the same instant: one of them wins, whole, and all are told so."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.runtime.checksum import checksum
from tests.system.cache_process import find, flags, get, payload, put
from tests.system.redis_process import RedisServer
from tests.system.shared_services import Services, sharing

pytestmark = [pytest.mark.system, pytest.mark.slow]
RACES = 250


async def race(clients: Sequence[CacheClient], name: str, dice: random.Random) -> None:
    """Sizes differ too: of one frame, of several, and of more than what is written at once."""
    sizes = [
        dice.choice((1, 4096, 70_000, 1_500_000)) if dice.random() < 0.1 else dice.randrange(1, 9000) for _ in clients
    ]
    offered = [payload((name, n), size) for n, size in enumerate(sizes)]
    told = await asyncio.gather(*(put(c, name, data, 60) for c, data in zip(clients, offered, strict=True)))
    assert told.count(True) == 1, f"{told.count(True)} were told that theirs is stored"
    winner = offered[told.index(True)]
    for client in clients:
        entry = (await find(client, name, 30)).hits[1].entry
        assert (entry.size, entry.checksum) == (len(winner), checksum(winner))
        buffer = bytearray(entry.size)
        await client.fetch(entry, memoryview(buffer), timeout=30)
        assert buffer == winner


async def races(clients: Sequence[CacheClient], count: int) -> None:
    dice = random.Random(count)
    for n in range(0, count, 10):
        await asyncio.gather(*(race(clients, f"{n + more}", dice) for more in range(10)))


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
async def test_at_one_service(launch: Any, tmp_path: Path, tiers: str) -> None:
    more = {
        "memory": ("--disk-bytes", "0", "--memory-bytes", "128MiB"),
        "disk": ("--memory-bytes", "1MiB"),
        "both": ("--memory-bytes", "128MiB"),
    }[tiers]
    service = launch(*flags(tmp_path / "data", *more))
    clients = [CacheClient(service.address) for _ in range(3)]
    try:
        await races(clients, RACES)
        assert (await clients[0].stats()).checksum_failures == 0
    finally:
        for client in clients:
            await client.close()


@pytest.fixture
async def cluster(launch: Any, redis: RedisServer, tmp_path: Path) -> AsyncIterator[Services]:
    async with sharing(launch, tmp_path, redis, count=3) as services:
        yield services


async def test_at_services_that_share_a_remote_tier(cluster: Services) -> None:
    """Each keeps what it was given first; what a third finds in the remote tier is one of them, whole."""
    dice = random.Random(1)
    *writers, reader = cluster.clients
    for n in range(RACES):
        sizes = [dice.choice((1, 4096, 70_000, 1_500_000)) if n % 10 == 0 else dice.randrange(1, 9000) for _ in "ab"]
        offered = [payload((n, m), size) for m, size in enumerate(sizes)]
        assert await asyncio.gather(*(put(c, n, data, 60) for c, data in zip(writers, offered, strict=True)))
        if n % 10 == 9:
            await cluster.settled()
        assert [await get(client, n) for client in writers] == offered
        assert await get(reader, n) in (None, *offered)
    assert sum([(await client.stats()).checksum_failures for client in cluster.clients]) == 0
