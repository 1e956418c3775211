"""Keys of what a client read itself go to the service together, a moment later, and nobody waits for that."""

import asyncio
from collections.abc import Sequence

import pytest

from fusionkv.kvcache_service.client import Rise
from fusionkv.protos.runtime.errors import Unavailable
from tests.waiting import until


class Service:
    """Notes what it is asked for; says so when `out` of reach."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.out = False

    async def take_up(self, keys: Sequence[bytes]) -> None:
        self.asked.append(list(keys))
        if self.out:
            raise Unavailable("gone")


@pytest.fixture
def service() -> Service:
    return Service()


async def test_what_is_read_together_is_sent_together_and_later(service: Service) -> None:
    rise = Rise(service.take_up)
    keys = [b"%d" % number for number in range(12)]
    for key in keys:
        rise.soon(key)
    await asyncio.sleep(0)
    assert not service.asked, "the reader's own bytes come first"
    await until(lambda: len(service.asked) == 2)
    assert service.asked == [keys[:8], keys[8:]]


async def test_what_is_read_after_a_failed_call_is_sent(service: Service) -> None:
    rise = Rise(service.take_up)
    service.out = True
    rise.soon(b"first")
    await until(lambda: service.asked == [[b"first"]])
    service.out = False
    rise.soon(b"second")
    await until(lambda: service.asked == [[b"first"], [b"second"]])


async def test_closed_it_sends_nothing(service: Service) -> None:
    rise = Rise(service.take_up)
    rise.soon(b"first")
    rise.close()
    rise.soon(b"second")
    await asyncio.sleep(0.1)
    assert not service.asked
