"""The Redis of a remote tier fails over: its replica is promoted, and the address that all know leads there."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.network import Relay
from tests.ports import free_port
from tests.system.cache_process import get, payload, put
from tests.system.redis_process import RedisServer
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
    services = Services(launch, tmp_path, SimpleNamespace(url=f"redis://{relay.address}", flags=()))  # type: ignore[arg-type]
    try:
        for _ in range(2):
            await asyncio.to_thread(services.start)
        await services.emptied()
        first, second = services.clients

        async def stored(numbers: range) -> None:
            for i in numbers:
                assert await put(first, i, payload(i, 3000))
            await services.settled()

        await stored(range(20))
        replica = await asyncio.to_thread(primary.replica)
        if lost:
            # What is written from now on, the replica never sees.
            await asyncio.to_thread(replica.promote)
            await stored(range(20, 40))
        primary.kill9()
        await asyncio.to_thread(replica.promote)
        relay.aim(where(replica))

        async def shared(numbers: range) -> bool:
            """What the replica lacks is written to it once it is used where it is."""
            for i in numbers:
                assert await get(first, i) == payload(i, 3000)
            return all([await get(second, i) == payload(i, 3000) for i in numbers])

        await until(lambda: shared(range(40 if lost else 20)), 120)
        for i in range(40, 45):
            assert await put(second, i, payload(i, 3000))
        await services.settled()
        for i in range(40, 45):
            assert await get(first, i) == payload(i, 3000)
    finally:
        await services.close()
        for service in services.services:
            service.kill9()
        await relay.close()
        for server in {primary, replica}:
            if server.process.poll() is None:
                server.kill9()
