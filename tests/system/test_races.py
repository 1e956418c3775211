"""Many who put one key with different bytes in the same instant: one of them wins, whole, and all are told so."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.runtime.checksum import checksum
from tests.system.cache_process import find, flags, get, payload, put
from tests.system.redis_process import RedisServer
from tests.system.shared_services import sharing

pytestmark = [pytest.mark.system, pytest.mark.slow]
RACES = 250


def offers(dice: random.Random, name: object, count: int) -> list[bytes]:
    """Sizes differ too: of one frame, of several, and of more than what is written at once."""
    odd = (dice.random() < 0.1 for _ in range(count))
    sizes = (dice.choice((1, 4096, 70_000, 1_500_000)) if each else dice.randrange(1, 9000) for each in odd)
    return [payload((name, n), size) for n, size in enumerate(sizes)]


async def race(clients: Sequence[CacheClient], name: str, dice: random.Random) -> None:
    offered = offers(dice, name, len(clients))
    told = await asyncio.gather(*(put(c, name, data, 60) for c, data in zip(clients, offered, strict=True)))
    assert told.count(True) == 1, f"{told.count(True)} were told that theirs is stored"
    winner = offered[told.index(True)]
    for client in clients:
        entry = (await find(client, name, 30)).entry
        assert (entry.size, entry.checksum) == (len(winner), checksum(winner))
        assert await get(client, name, timeout=30) == winner


async def races(clients: Sequence[CacheClient], count: int) -> None:
    dice = random.Random(count)
    for n in range(0, count, 10):
        await asyncio.gather(*(race(clients, f"{n + more}", dice) for more in range(10)))


@pytest.mark.long
@pytest.mark.parametrize("more", [("--disk-bytes", "0", "--memory-bytes", "128MiB"), ("--memory-bytes", "1MiB")])
async def test_at_one_service(launch: Any, cache_client: Any, tmp_path: Path, more: tuple[str, ...]) -> None:
    service = launch(*flags(tmp_path / "data", *more))
    clients = [cache_client(service) for _ in range(3)]
    await races(clients, RACES)
    assert (await clients[0].stats()).checksum_failures == 0


@pytest.mark.long
async def test_at_services_that_share_a_remote_tier(launch: Any, redis: RedisServer, tmp_path: Path) -> None:
    """Each keeps what it was given first; what a third finds in the remote tier is one of them, whole."""
    dice = random.Random(1)
    async with sharing(launch, tmp_path, redis, count=3) as cluster:
        *writers, reader = cluster.clients
        for n in range(RACES):
            offered = offers(dice, n, len(writers))
            assert await asyncio.gather(*(put(c, n, data, 60) for c, data in zip(writers, offered, strict=True)))
            if n % 10 == 9:
                await cluster.settled()
            assert [await get(client, n) for client in writers] == offered
            assert await get(reader, n) in (None, *offered)
        assert sum([(await client.stats()).checksum_failures for client in cluster.clients]) == 0
