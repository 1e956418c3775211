"""Two cache services over each remote tier: what one has put the other finds, whatever is killed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient, HitKind
from fusionkv.protos.runtime import errors
from tests.system.cache_process import NAMESPACE, SYSTEM, chunk, find, flags, get, payload, put
from tests.system.mooncake_process import MooncakeMaster
from tests.system.redis_process import RedisServer
from tests.system.shared_services import REMOTES, TIMING, Remote, Services, made
from tests.waiting import until

pytestmark = pytest.mark.system
SIZES = (1, 4096, 100_000, 1 << 20, (3 << 20) + 17)


# Its server takes seconds to start.
SLOW = [pytest.param(kind, marks=pytest.mark.slow) if kind == "object store" else kind for kind in REMOTES]


@pytest.fixture(scope="module", params=SLOW)
def remote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    started = made(request.param, tmp_path_factory.mktemp("remote"))
    yield started
    started.kill9()


@pytest.fixture(scope="module")
def services(launch_module: Any, tmp_path_factory: pytest.TempPathFactory, remote: Remote) -> Iterator[Services]:
    started = Services(launch_module, tmp_path_factory.mktemp("shared"), remote)
    for _ in range(2):
        started.start()
    yield started
    for service in started.services:
        service.kill9()


@pytest.fixture
async def two(services: Services) -> AsyncIterator[Services]:
    """Both of them run, and are empty. Who ends the remote tier starts it again."""
    for number, service in enumerate(services.services):
        if service.process.poll() is not None:
            await asyncio.to_thread(services.restart, number)
    await services.emptied()
    yield services
    await services.close()


async def content(client: CacheClient, *path: object, namespace: bytes = NAMESPACE) -> tuple[HitKind, bytes | None]:
    """How the last element of a path is found behind the system prompt, and what."""
    asked = [(SYSTEM, ()), *((chunk(name), ()) for name in path)]
    hit = (await client.lookup(namespace, asked, timeout=20)).hits[-1]
    if hit.entry is None:
        return hit.kind, None
    buffer = bytearray(hit.entry.size)
    await client.fetch(hit.entry, memoryview(buffer), timeout=20)
    return hit.kind, bytes(buffer)


async def fill(client: CacheClient, names: Iterable[object], size: int) -> None:
    for name in names:
        assert await put(client, name, payload(name, size))


async def same(client: CacheClient, names: Iterable[object], size: int) -> bool:
    """Whether the client gets all of these entries."""
    return all([await fetched(client, name) == payload(name, size) for name in names])


async def test_what_one_has_put_the_other_finds(two: Services) -> None:
    """By exact and by alternative path, within its namespace; a copy is the other's own from then on."""
    a, b = two.clients
    for size in SIZES:
        assert await put(a, size, payload(size, size))
    await two.settled()
    for size in SIZES:
        assert (await find(b, size)).entry.tier in ("remote", "memory")
        assert await content(b, size, namespace=chunk("another namespace")) == (HitKind.MISS, None)
        assert await get(b, size) == payload(size, size)
        assert await content(b, "other", size) == (HitKind.ALTERNATIVE, payload(size, size))
    elsewhere = [(chunk("another system prompt"), ()), (chunk(SIZES[0]), ())]
    assert (await b.lookup(NAMESPACE, elsewhere, timeout=20)).hits[1].kind is HitKind.MISS
    assert await two.entries() == [len(SIZES), len(SIZES)], "copied by being read"
    # An alternative that was never looked up by its own path, either.
    assert await put(b, "alone", b"alone")
    await two.settled()
    assert await content(a, "other", "alone") == (HitKind.ALTERNATIVE, b"alone")
    assert sum([(await client.stats()).checksum_failures for client in two.clients]) == 0


async def test_the_first_service_is_killed(two: Services, cache_client: Any, remote: Remote) -> None:
    """kill -9: what it wrote back is found, or where that was in its own memory, a miss; then it comes back."""
    a, b = two.clients
    names = [f"{n}" for n in range(20)]
    await fill(a, names, 20_000)
    await two.settled()
    await two.kill9(0)
    began = time.monotonic()
    for name in names:
        lost = (None,) if isinstance(remote, MooncakeMaster) else ()
        assert await fetched(b, name) in (*lost, payload(name, 20_000))
    assert time.monotonic() - began < 60
    await asyncio.to_thread(two.restart, 0)
    again = cache_client(two.services[0])
    assert await same(again, names, 20_000), "its own disk has all that was acknowledged"
    if not isinstance(remote, MooncakeMaster):
        await until(lambda: same(b, names, 20_000))


async def test_what_was_not_written_back_is_shared_after_a_restart(two: Services, remote: Remote) -> None:
    a, b = two.clients
    remote.kill9()
    await fill(a, range(10), 3000)
    await two.kill9(0)
    remote.start()
    await asyncio.to_thread(two.restart, 0)
    await a.close()
    two.clients[0] = CacheClient(two.services[0].address)
    await two.settled()
    # At once, unless the other service meets only now that its connection was lost.
    await until(lambda: same(b, range(10), 3000))


async def fetched(client: CacheClient, name: object) -> bytes | None:
    """Looked up, fetched, and looked up once more if it was gone, as a worker does."""
    with contextlib.suppress(errors.NotFound):
        return await get(client, name)
    return await get(client, name)


@pytest.mark.long
@pytest.mark.slow
async def test_the_remote_tier_is_killed_and_comes_back_empty(two: Services, remote: Remote) -> None:
    """Each service goes on with its own, without an error; what is used afterwards is shared again."""
    a, b = two.clients
    assert await put(a, "before", payload("before", 50_000))
    await two.settled()
    assert (await find(b, "never fetched")).kind is HitKind.MISS
    remote.kill9()
    for n in range(5):
        assert await put(a, n, payload(n, 3000))
        assert await get(a, n) == payload(n, 3000)
        assert (await find(b, n)).kind is HitKind.MISS
    assert await get(a, "before") == payload("before", 50_000)
    assert (await find(b, "before")).kind in (HitKind.MISS, HitKind.EXACT), "it may have been copied"
    assert not (await a.stats()).remote.reachable
    with pytest.raises(errors.Unavailable, match="remote tier"):
        await a.delete(namespace=chunk("any"))
    remote.start()
    await two.settled()

    await until(lambda: same(b, range(5), 3000))

    async def healed() -> bool:
        await find(a, "before")
        return await fetched(b, "before") == payload("before", 50_000)

    await until(healed)


@pytest.mark.slow
@pytest.mark.parametrize("remote", ["redis", "object store", "directory"], indirect=True)
async def test_the_remote_tier_is_killed_in_the_middle_of_copies(two: Services, remote: Remote) -> None:
    """Each entry is a miss, or its bytes; afterwards each service answers with its own."""
    a, b = two.clients
    names = range(12)
    await fill(a, names, (3 << 20) + 17)
    await two.settled()
    asked, killed = [asyncio.create_task(fetched(b, name)) for name in names], False
    began = time.monotonic()
    for answered in asyncio.as_completed(asked):
        await answered
        if not killed:
            await asyncio.to_thread(remote.kill9)
            killed = True
    assert time.monotonic() - began < 60
    for name, task in zip(names, asked, strict=True):
        assert task.result() in (None, payload(name, (3 << 20) + 17))
    assert await same(a, names, (3 << 20) + 17)
    assert sum([(await client.stats()).checksum_failures for client in two.clients]) == 0
    remote.start()


@pytest.mark.long
@pytest.mark.slow
async def test_a_remote_tier_that_stands_still_costs_a_lookup_its_time_once(two: Services, remote: Remote) -> None:
    a, _ = two.clients
    assert await put(a, "own", payload("own", 3000))
    await two.settled()
    with remote.still():
        asked = time.monotonic()
        assert (await find(a, "nothing", timeout=30)).kind is HitKind.MISS
        assert time.monotonic() - asked < 20
        asked = time.monotonic()
        for _ in range(50):
            assert await get(a, "own") == payload("own", 3000)
            assert (await find(a, "nothing")).kind is HitKind.MISS
        assert time.monotonic() - asked < 10, "nobody asks it any more"
        assert await put(a, "meanwhile", b"meanwhile")
    await two.settled()
    assert await fetched(two.clients[1], "meanwhile") == b"meanwhile"


async def test_a_service_that_ends_writes_back_what_it_has(two: Services, remote: Remote) -> None:
    """The other finds all; but what a Mooncake Store had in the memory of the one that ended is gone."""
    await fill(two.clients[0], range(30), 30_000)
    assert await asyncio.to_thread(two.services[0].stop) == 0
    expected = [payload(n, 30_000) for n in range(30)]
    found = [await fetched(two.clients[1], n) for n in range(30)]
    assert all(data in (None, right) for data, right in zip(found, expected, strict=True))
    if not isinstance(remote, MooncakeMaster):
        assert found == expected


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("remote", ["redis", "mooncake"], indirect=True)
async def test_a_service_starts_and_ends_while_the_remote_tier_stands_still(two: Services, remote: Remote) -> None:
    assert await put(two.clients[1], "x", b"data")
    await two.settled()
    with remote.still():
        await two.kill9(0)
        two.restart(0)
        for n in range(20):
            assert await put(two.clients[0], n, payload(n, 3000))
            assert await get(two.clients[0], n) == payload(n, 3000)
            await asyncio.sleep(0.1)  # for its own calls to the remote tier, which begin with the start
        # They drain, and wait for what is written back and for Mooncake, each for seconds.
        for service in two.services:
            assert await asyncio.to_thread(service.stop, 40) == 0


@pytest.mark.parametrize("remote", ["redis"], indirect=True)
async def test_an_address_of_several_leads_to_one_that_lives(two: Services, cache_client: Any) -> None:
    """As a DNS name of several does."""
    assert await put(two.clients[0], "x", b"data")
    await two.settled()
    client = cache_client("ipv4:" + ",".join(service.address for service in two.services))
    assert await get(client, "x") == b"data"
    await two.kill9(0)

    async def found() -> bool:
        with contextlib.suppress(errors.Unavailable):
            return await fetched(client, "x") == b"data"
        return False

    await until(found)


async def test_a_service_without_a_key_leaves_what_it_encrypts(
    launch: Any, redis: RedisServer, cache_client: Any, tmp_path: Path
) -> None:
    """Be it without any key, or with the former one alone while keys are rotated: it neither finds nor deletes it."""
    clients = []
    for name, keys in (("plain", ""), ("old", "11"), ("new", "22 11"), ("next", "22 11"), ("none", "")):
        (tmp_path / name).write_text("".join(f"{key * 32}\n" for key in keys.split()))
        sealed = ("--disk-keys", str(tmp_path / name)) if keys else ()
        started = launch(*flags(tmp_path / f"{name}-data", "--remote-url", redis.url, *TIMING, *sealed))
        clients.append(cache_client(started))
    plain, old, new, later, none = clients

    async def shares(client: CacheClient, name: str, data: bytes) -> bool:
        """Whether it stores an entry, and writes it back."""

        async def written() -> bool:
            remote = (await client.stats()).remote
            return bool(remote.written) and not remote.waiting

        stored = await put(client, name, data)
        await until(written)
        return stored

    assert await shares(old, "x", b"by the old key")
    assert await get(plain, "x") is None
    assert await get(new, "x") == b"by the old key"
    assert await shares(new, "y", b"by the new key")
    assert await get(old, "y") is None
    assert await shares(plain, "x", b"by none")
    assert [await get(later, name) for name in "xy"] == [b"by the old key", b"by the new key"]
    assert await get(none, "x") == b"by none"
