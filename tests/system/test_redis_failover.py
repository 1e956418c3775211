"""The Redis of a shared index fails over: its replica is promoted, and the address that all know leads there."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import HitKind
from tests.chaos.network import Relay
from tests.system.cache_process import find, get, payload, put
from tests.system.redis_process import RedisServer, free_port
from tests.system.shared_services import Services
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300), pytest.mark.slow]


def where(server: RedisServer) -> str:
    return server.url.removeprefix("redis://")


@pytest.mark.parametrize("lost", [False, True], ids=["nothing lost", "last writes lost"])
async def test_services_go_on_with_the_replica(launch: Any, tmp_path: Path, lost: bool) -> None:
    primary = replica = RedisServer(tmp_path)
    relay = Relay(f"127.0.0.1:{free_port()}", where(primary))
    await relay.start()
    services = Services(launch, tmp_path, f"redis://{relay.address}")
    try:
        for _ in range(2):
            await asyncio.to_thread(services.start)
        await services.emptied(2)
        first, second = services.clients

        async def stored(numbers: range) -> None:
            for i in numbers:
                assert await put(first, i, payload(i, 3000))
            await services.settled(2)

        await stored(range(20))
        replica = await asyncio.to_thread(primary.replica)
        if lost:
            # What is written from now on, the replica never sees.
            await asyncio.to_thread(replica.promote)
            await stored(range(20, 40))
        primary.kill9()
        await asyncio.to_thread(replica.promote)
        relay.aim(where(replica))

        async def all_found() -> bool:
            """Until a service has noticed, what the other one holds is a miss."""
            return all([await get(client, i) == payload(i, 3000) for client in (first, second) for i in range(20)])

        await until(all_found)
        if lost:
            # Whoever holds them finds them; for the other they are misses until they are published again.
            for i in range(20, 40):
                holder, other = services.clients[:: 1 if services.home(i, (0, 1)) == 0 else -1]
                assert await get(holder, i) == payload(i, 3000)
                assert await get(other, i) in (None, payload(i, 3000))
        for i in range(40, 45):
            assert await put(second, i, payload(i, 3000))
        await services.settled(2)
        for i in range(40, 45):
            assert (await find(first, i)).hits[1].kind is HitKind.EXACT
    finally:
        await services.close()
        for service in services.services:
            service.kill9()
        await relay.close()
        for server in {primary, replica}:
            if server.process.poll() is None:
                server.kill9()
