"""Wall clocks that jump by a day under running services: only what is a time of day follows them."""

from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime import errors
from tests.chaos.process import Clock
from tests.services import start_gateway
from tests.system.cache_process import NAMESPACE, flags, path_to, payload, put
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.slow]
DAY = 86_400
SIZE = 64 << 10


@pytest.fixture
def wall(tmp_path: Path) -> Clock:
    if not Clock.preload:
        pytest.skip("a clock that jumps needs libfaketime: apt-get install libfaketime")
    return Clock(tmp_path / "clock")


async def test_leases_last_as_long_as_given(launch: Any, cache_client: Any, tmp_path: Path, wall: Clock) -> None:
    client = cache_client(launch(*flags(tmp_path / "data"), env=wall.environment))
    assert await put(client, "a", payload("a", SIZE))

    async def lease(milliseconds: int) -> int:
        path = [(part, ()) for part in path_to("a")]
        return (await client.lookup(NAMESPACE, path, lease_ms=milliseconds, timeout=10)).lease

    async def ended() -> bool:
        return (await client.stats(timeout=10)).active_leases == 0

    held = await lease(600_000)
    wall.jump(DAY)
    assert not await ended()
    await client.release(held)
    await until(ended)
    await lease(200)
    wall.jump(-DAY)
    await until(ended, 10)


def test_quotas_are_of_minutes_that_pass(launch: Any, tmp_path: Path, wall: Clock) -> None:
    (tmp_path / "quotas").write_text("[default]\nrequests_per_minute = 2\n")
    gateway = start_gateway(launch, tmp_path, None, "--quotas", str(tmp_path / "quotas"), env=wall.environment)
    with Client(gateway.address, timeout=20) as client:
        for _ in range(2):
            client.list()
        for jump in (DAY, -DAY, 0):
            wall.jump(jump)
            with pytest.raises(errors.ResourceExhausted, match="2 requests per minute") as refused:
                client.list()
            assert 0 < (refused.value.retry_after or 0) <= 30
