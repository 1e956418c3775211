"""Who is asked for a lookup, and for how long: never for more than is left, by a clock that nobody waits for."""

import asyncio
import contextlib
import selectors
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from fusionkv.kvcache_service.answers import Entry, Hit, Lookup
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.kvcache_service.cluster import holders
from fusionkv.kvcache_service.cluster.holders import Holders
from fusionkv.kvcache_service.hits import HitKind
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime.errors import DeadlineExceeded, Unavailable

SECONDS = 1.0
NAMESPACE, SYSTEM = b"n" * 32, b"s" * 32


class Clock(selectors.DefaultSelector):
    """What an event loop waits by: it does not wait, but says that the time has gone."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for ever"
            self.now += max(timeout, 1e-6)
        return ready


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


def run(clock: Clock, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
        runner.run(work)


def entry(*at: str, lease: int = 0) -> Entry:
    return Entry(b"k" * 32, 10, 1, 0, b"c" * 16, "remote", b"", holders=at, lease=lease)


class Service:
    """Answers a lookup after `seconds`, or fails; says how long it was given. Its answer to a release never comes."""

    def __init__(self, address: str, seconds: float = 0.0, *at: str, dead: bool = False) -> None:
        self.address = address
        self.seconds, self.at, self.dead = seconds, at, dead
        self.given: list[tuple[float, float]] = []
        self.released: list[int] = []
        self.stored: list[pb.PutHeader] = []

    async def ask(self, request: pb.LookupRequest, timeout: float) -> Lookup:
        self.given.append((time.monotonic(), timeout))
        if self.dead:
            raise Unavailable(f"{self.address} is dead")
        await asyncio.sleep(min(self.seconds, timeout))
        if self.seconds >= timeout:
            raise DeadlineExceeded(f"{self.address} is late")
        return Lookup((Hit(HitKind.EXACT, entry(*self.at, lease=7)),), 7)

    async def send(self, header: pb.PutHeader, data: memoryview, timeout: float) -> pb.PutResponse:
        self.given.append((time.monotonic(), timeout))
        if self.dead:
            raise Unavailable(f"{self.address} is dead")
        if self.at and not header.here:
            return pb.PutResponse(outcome=pb.PutResponse.OUTCOME_ELSEWHERE, address=self.at[0], asked=3)
        self.stored.append(header)
        return pb.PutResponse(outcome=pb.PutResponse.OUTCOME_STORED, key=b"k")

    async def release(self, lease: int) -> None:
        self.released.append(lease)
        await asyncio.sleep(1e9)

    async def close(self) -> None:
        pass


class Client(CacheClient):
    """A real one, whose calls go to the services of a test; the first is its own."""

    def __init__(self, *services: Service) -> None:
        super().__init__(services[0].address)
        self._own = services[0]
        others = {service.address: service for service in services}
        self._holders = Holders(others.__getitem__)  # type: ignore[arg-type]
        self._holders.reachable(Hit(HitKind.EXACT, entry(*(service.address for service in services[1:]))))

    async def ask(self, request: pb.LookupRequest, timeout: float) -> Lookup:
        return await self._own.ask(request, timeout)

    async def release(self, lease: int, *, timeout: float = 5.0) -> None:
        await self._own.release(lease)

    async def send(self, header: pb.PutHeader, data: memoryview, timeout: float) -> pb.PutResponse:
        return await self._own.send(header, data, timeout)

    async def store(self) -> tuple[bytes, bool]:
        data = memoryview(b"data")
        return await self.put(namespace=NAMESPACE, path=[SYSTEM], tokens=1, base=0, data=data, timeout=SECONDS)

    async def find(self) -> Lookup:
        return await self.lookup(NAMESPACE, [(SYSTEM, ())], timeout=SECONDS)

    async def rested(self) -> None:
        """After so many lookups that some may be asked twice."""
        before, self._own.seconds, self._own.dead = (self._own.seconds, self._own.dead), 0.0, False
        for _ in range(100):
            await self.find()
        self._own.given.clear()
        self._own.seconds, self._own.dead = before


@pytest.fixture(params=[0.1, 0.3, 0.6, 0.95, 5.0], ids="other answers after {}".format)
def slow(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.mark.parametrize("own", [0.2, 0.99, 5.0, -1.0], ids="own answers after {}".format)
def test_lookup_second_lookup_and_release_end_in_the_time_that_was_given(
    clock: Clock, own: float, slow: float
) -> None:
    async def work() -> None:
        services = [Service("own", own, dead=own < 0), Service("a", slow), Service("b", slow, dead=True)]
        client = Client(*services)
        await client.rested()
        for _ in range(12):
            began = time.monotonic()
            with contextlib.suppress(DeadlineExceeded, Unavailable):
                await client.find()
            took = time.monotonic() - began
            assert took <= SECONDS + 1e-3
            for service in services:
                assert all(at + given <= began + SECONDS + 1e-3 for at, given in service.given if at >= began)
            await asyncio.sleep(0.7)
        if slow < SECONDS / 2 and own > slow:
            assert services[1].released, "let go of, and nobody waited for it"
        await client.close()

    run(clock, work())


def test_one_that_is_dead_is_tried_once_in_a_while_and_all_others_answer_for_it(clock: Clock) -> None:
    async def work() -> None:
        own, other = Service("own", dead=True), Service("a", 0.01)
        client = Client(own, other)
        for _ in range(50):
            found = await client.find()
            assert found.lease == 0
            assert found.hits[0].entry == entry("a")
        assert (len(own.given), len(other.given)) == (1, 50)
        await asyncio.sleep(holders._DOWN_SECONDS + 0.1)
        own.dead = False
        assert (await client.find()).lease == 7, "its own again"
        own.dead = other.dead = True
        for _ in range(3):
            with pytest.raises(Unavailable):
                await client.find()
        assert len(other.given) == 51, "both are known to be dead"
        assert len(own.given) == 5, "and the own one is asked all the same"
        await client.close()

    run(clock, work())


def test_what_a_dead_service_holds_is_a_miss_in_the_answer_of_another(clock: Clock) -> None:
    async def work() -> None:
        client = Client(Service("own", dead=True), Service("a", 0.0, "own"))
        assert (await client.find()).hits == (Hit(HitKind.MISS, None),)
        await client.close()

    run(clock, work())


def test_what_is_put_while_its_own_service_is_dead_goes_where_it_belongs(clock: Clock) -> None:
    async def work() -> None:
        own, other, home = Service("own", dead=True), Service("a", 0.0, "b"), Service("b")
        client = Client(own, other, home)
        for _ in range(20):
            assert await client.store() == (b"k", True)
        assert len(own.given) == 1
        assert len(home.stored) == 20
        assert {header.asked for header in home.stored} <= {0, 3}, "sent there by either"
        home.dead = True
        for _ in range(20):
            assert await client.store() == (b"k", True)
        assert len(other.stored) == 20, "where it belongs nobody takes it"
        other.dead = True
        with pytest.raises(Unavailable):
            await client.store()
        own.dead = False
        assert await client.store() == (b"k", True)
        assert own.stored
        for service in (own, other, home):
            assert all(given <= SECONDS for _, given in service.given)
        await client.close()

    run(clock, work())


def test_with_no_time_left_a_service_that_was_out_of_reach_is_asked_all_the_same(clock: Clock) -> None:
    async def work() -> None:
        client = Client(Service("own", dead=True), Service("a"))
        await client.find()
        assert not client._holders._up("own")
        with pytest.raises(Unavailable):
            await client.lookup(NAMESPACE, [(SYSTEM, ())], timeout=0.004)
        await client.close()

    run(clock, work())


def test_a_short_time_without_an_answer_is_no_proof_of_an_end(clock: Clock) -> None:
    async def work() -> None:
        client = Client(Service("own", 0.2), Service("a", 0.2))
        with pytest.raises(DeadlineExceeded):
            await client.lookup(NAMESPACE, [(SYSTEM, ())], timeout=0.1)
        assert client._holders._up("own")
        client._own.seconds = 2.0
        with pytest.raises(DeadlineExceeded):
            await client.find()
        await asyncio.sleep(0.1)
        assert not client._holders._up("own")
        await client.close()

    run(clock, work())


def test_the_last_that_were_named_are_known_and_the_long_dead_forgotten(clock: Clock) -> None:
    async def work() -> None:
        client = Client(Service("own"), *(Service(f"{n}", dead=True) for n in range(100)))
        known = client._holders._named
        assert list(known) == [f"{n}" for n in range(36, 100)], "the last 64"
        await asyncio.sleep(holders._NAMED_SECONDS + 1)
        client._holders.reachable(Hit(HitKind.EXACT, entry("99")))
        client._own.dead = True
        with pytest.raises(Unavailable):
            await client.find()
        assert list(known) == ["99"], "named a moment ago: it may come back"
        await client.close()

    run(clock, work())
