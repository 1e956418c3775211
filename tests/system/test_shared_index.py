"""Three cache services behind one Redis: each finds what any of them holds; Redis forgets, is silent, is gone."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient, HitKind
from fusionkv.kvcache_service.cluster.shared_index import SharedIndex
from fusionkv.protos.runtime import errors
from tests.system.cache_process import NAMESPACE, SYSTEM, ask, chunk, find, get, payload, put
from tests.system.redis_process import RedisCluster, RedisServer
from tests.system.shared_services import TIMEOUT_MS, Services, put_here
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.slow]


async def test_every_service_finds_what_any_of_them_holds(cluster: Services) -> None:
    contents = {i: payload(i, 20_000 + i) for i in range(60)}
    for i, data in contents.items():
        assert await put(cluster.clients[i % 3], i, data), "the first of two"
        assert not await put(cluster.clients[(i + 1) % 3], i, data), "any service knows that it is there"
    await cluster.settled()
    homes = [cluster.home(i) for i in contents]
    assert await cluster.entries() == [homes.count(n) for n in range(3)], "each is where it belongs, once"
    for client, service in zip(cluster.clients, cluster.services, strict=True):
        for i, data in contents.items():
            hit = (await ask(client, i)).hits[1]
            assert hit.kind is HitKind.EXACT
            assert hit.entry is not None
            expected = cluster.services[homes[i]].address
            assert hit.entry.holders == (() if expected == service.address else (expected,))
            assert await get(client, i) == data
    # Behind another chunk, and behind another system prompt.
    path = [(SYSTEM, []), (chunk("other"), []), (chunk(0), [])]
    for client in cluster.clients:
        hits = (await client.lookup(NAMESPACE, path, timeout=10)).hits
        assert [hit.kind for hit in hits] == [HitKind.MISS, HitKind.MISS, HitKind.ALTERNATIVE]
        hits = (await client.lookup(NAMESPACE, [(chunk("S2"), []), (chunk(0), [])], timeout=10)).hits
        assert [hit.kind for hit in hits] == [HitKind.MISS, HitKind.MISS]


async def test_the_best_entry_wins_wherever_it_is(cluster: Services) -> None:
    """Exact before a variant before the longest common suffix, as one service alone has it."""
    a, b, _ = cluster.clients
    x, y, z, variant = (chunk(name) for name in "xyzv")

    async def store(client: CacheClient, path: list[bytes], as_variant: bytes = b"") -> None:
        await put_here(client, path, b"".join(path) + as_variant, as_variant)
        await cluster.settled()

    async def found(path: list[bytes], variants: tuple[bytes, ...] = ()) -> list[bytes]:
        got = []
        for client in (a, b):
            elements = [*((digest, ()) for digest in path[:-1]), (path[-1], variants)]
            entry = (await client.lookup(NAMESPACE, elements, timeout=10)).hits[-1].entry
            assert entry is not None
            buffer = bytearray(entry.size)
            await client.fetch(entry, memoryview(buffer), timeout=10)
            got.append(bytes(buffer))
        assert got[0] == got[1], "both services choose the same"
        return [got[0][at : at + 32] for at in range(0, len(got[0]), 32)]

    await store(a, [SYSTEM, x, z])
    assert await found([SYSTEM, y, z]) == [SYSTEM, x, z]
    await store(b, [SYSTEM, z])
    assert await found([SYSTEM, y, z]) == [SYSTEM, z], "it carries nothing of other chunks"
    assert await found([SYSTEM, y, x, z]) == [SYSTEM, x, z]
    await store(b, [SYSTEM, z], variant)
    assert await found([SYSTEM, y, z], (variant,)) == [SYSTEM, z, variant]
    assert await found([SYSTEM, x, z], (variant,)) == [SYSTEM, x, z], "exact comes first"
    assert await found([SYSTEM, y, z], (chunk("no such"),)) == [SYSTEM, z]


async def test_versions_are_bounded_together(cluster: Services) -> None:
    """Put through all services at once, of several chunks; any service finds the one that is most alike."""
    three, names = keys.versions_variant(3), range(4)
    puts = [
        client.put(
            namespace=NAMESPACE, path=[SYSTEM, chunk(f"before {i}"), chunk(name)], variant=three, tokens=1, base=0,
            data=memoryview(payload((n, i, name), 1000)), offered=True, timeout=30,
        )
        for n, client in enumerate(cluster.clients) for i in range(n, 12, 3) for name in names
    ]  # fmt: skip
    assert all(stored for _, stored in await asyncio.gather(*puts))
    await cluster.settled()
    homes = [cluster.home(name) for name in names]
    assert await cluster.entries() == [3 * homes.count(n) for n in range(3)]
    for name in names:
        path = [chunk(f"before {i}") for i in range(12)]
        for client in cluster.clients:
            elements = [(SYSTEM, []), *((digest, []) for digest in path), (chunk(name), [three])]
            hit = (await client.lookup(NAMESPACE, elements, timeout=10)).hits[-1]
            assert hit.kind is HitKind.ALTERNATIVE
            assert hit.entry is not None
            assert hit.entry.variant == three
            elements = [(SYSTEM, []), (chunk("elsewhere"), []), (chunk(name), [three])]
            assert (await client.lookup(NAMESPACE, elements, timeout=10)).hits[-1].kind is HitKind.MISS


async def test_a_deletion_is_one_everywhere(cluster: Services, server: RedisServer) -> None:
    for i in range(30):
        await put(cluster.clients[0], i, payload(i, 100))
    await cluster.settled()
    entry = (await find(cluster.clients[1], 7)).hits[1].entry
    assert entry is not None
    assert await cluster.clients[2].delete([entry.key]) == 1
    await cluster.settled()
    for client in cluster.clients:
        assert await get(client, 7) is None
    assert await cluster.clients[0].delete(namespace=NAMESPACE) == 29
    await cluster.settled()
    assert await cluster.entries() == [0, 0, 0]
    assert server.client().keys("fusionkv:group:*") == []


async def test_a_path_asked_for_at_one_service_is_kept_at_another(cluster: Services) -> None:
    """What is offered is kept for its path if that was asked for, wherever it was: as one service alone has it."""
    name = next(i for i in range(100) if cluster.home(i) == 2)
    asker, home = cluster.clients[0], cluster.clients[2]
    long = [SYSTEM, chunk("before"), chunk(name)]

    async def offer() -> bool:
        data = memoryview(b"long")
        return (
            await asker.put(namespace=NAMESPACE, path=long, tokens=1, base=0, data=data, offered=True, timeout=30)
        )[1]

    async def ask() -> HitKind:
        return (await asker.lookup(NAMESPACE, [(digest, ()) for digest in long], timeout=10)).hits[2].kind

    assert await put(asker, name, b"short")
    await cluster.settled()
    assert await ask() is HitKind.ALTERNATIVE
    assert not await offer(), "asked for once, by the request that computed it"
    await ask()
    assert await offer()
    await cluster.settled()
    assert await ask() is HitKind.EXACT
    assert (await home.stats()).tiers[-1].entries == 2


async def test_two_writers_of_one_chunk_at_two_services(cluster: Services) -> None:
    for i in range(20):
        data = payload(i, 50_000)
        stored = await asyncio.gather(*(put(client, i, data) for client in cluster.clients))
        assert sorted(stored) == [False, False, True]
    await cluster.settled()
    assert sum(await cluster.entries()) == 20
    # Different bytes under one key at two services, as two workers may compute them: each is fetched as it is.
    for n in (0, 1):
        await put_here(cluster.clients[n], [SYSTEM, chunk("twice")], payload(n, 1000))
    await cluster.settled()
    for n, expected in ((0, (0,)), (1, (1,)), (2, (0, 1))):
        assert await get(cluster.clients[n], "twice") in [payload(m, 1000) for m in expected]
    assert sum([(await client.stats()).checksum_failures for client in cluster.clients]) == 0


async def test_without_redis_each_service_goes_on_with_its_own(cluster: Services, server: RedisServer) -> None:
    """Stopped, so that every call of it runs into its time, then killed; what was put meanwhile is published."""
    for i in range(30):
        await put(cluster.clients[0], i, payload(i, 2000))
    await cluster.settled()
    homes = [cluster.home(i) for i in range(30)]

    async def serves_its_own(client: CacheClient, number: int) -> None:
        for i, home in enumerate(homes):
            assert await get(client, i) == (payload(i, 2000) if home == number else None)

    server.pause()
    began, slowest = time.monotonic(), 0.0
    while time.monotonic() - began < 2:
        asked = time.monotonic()
        await find(cluster.clients[0], "nothing")
        slowest = max(slowest, time.monotonic() - asked)
    assert slowest < TIMEOUT_MS / 1000 + 10, "a silent Redis costs a Lookup no more than its time"
    for number, client in enumerate(cluster.clients):
        await serves_its_own(client, number)
        assert not (await client.stats()).shared_index.reachable
        assert await put(client, f"meanwhile {number}", payload(number, 2000)), "a Put stays where it arrives"
        assert (await find(client, f"meanwhile {number}")).hits[1].kind is HitKind.EXACT
    with pytest.raises(errors.Unavailable, match="Redis is out of reach"):
        await cluster.clients[0].delete([chunk("any")])
    server.kill9()
    assert await asyncio.to_thread(cluster.services[2].stop) == 0
    await asyncio.to_thread(cluster.restart, 2)
    again = CacheClient(cluster.services[2].address)
    await asyncio.wait_for(serves_its_own(again, 2), 60)
    await again.close()
    server.start()
    await cluster.settled()
    for client in cluster.clients:
        for number in range(3):
            assert await get(client, f"meanwhile {number}") == payload(number, 2000)
        for i in range(30):
            assert await get(client, i) == payload(i, 2000)


async def test_redis_forgets_and_is_told_again(cluster: Services, server: RedisServer) -> None:
    names = cluster.names(10)
    for i in names:
        await put(cluster.clients[0], i, payload(i, 2000))
    await cluster.settled()

    async def found(some: Sequence[str]) -> bool:
        kinds = {(await ask(client, i)).hits[1].kind for client in cluster.clients for i in some}
        return kinds == {HitKind.EXACT}

    assert await found(names)
    redis = server.client()
    redis.flushall()
    # Under their new marks. Nothing is asked for meanwhile: what is asked for again and again is copied.
    await until(lambda: redis.hlen("fusionkv:members") == 3)
    await cluster.settled()
    assert await found(names)
    # What nobody of them wrote: no entry, another chunk's entry under this name, another type.
    groups = {i: b"fusionkv:group:" + keys.replica_key(NAMESPACE, SYSTEM, chunk(i)) for i in names}
    away = [i for i in groups if cluster.home(i) == 1][:4]
    field, value = next(iter(redis.hgetall(groups[away[1]]).items()))
    redis.hset(groups[away[0]], b"x" * 48, b"\x01nonsense")
    redis.delete(groups[away[1]])
    redis.hset(groups[away[2]], field, value)
    assert (await ask(cluster.clients[0], away[0])).hits[1].kind is HitKind.EXACT
    assert (await ask(cluster.clients[0], away[1])).hits[1].kind is HitKind.MISS
    assert await get(cluster.clients[0], away[2], ask) == payload(away[2], 2000)
    # A holder that lost an entry without a word is found out by the first who comes for it.
    redis.hset(groups[away[1]], field, value)
    await cluster.clients[1].delete([field[:32]], here=True)
    await cluster.settled()
    redis.hset(groups[away[1]], field, value)
    assert (await ask(cluster.clients[0], away[1])).hits[1].kind is HitKind.EXACT
    with pytest.raises(errors.NotFound):
        await get(cluster.clients[0], away[1], ask)
    await cluster.settled()
    assert not redis.exists(groups[away[1]])
    redis.flushall()
    await until(lambda: healed(cluster, [i for i in groups if i != away[1]]))


async def healed(cluster: Services, names: list[str]) -> bool:
    return all([(await ask(cluster.clients[0], i)).hits[1].kind is HitKind.EXACT for i in names])


async def test_a_redis_cluster_is_as_good_as_one_server(launch: Any, tmp_path: Path) -> None:
    """Every chunk's group in a slot of its own; a node that dies is Redis out of reach, not an error."""
    redis = RedisCluster(tmp_path)
    services = Services(launch, tmp_path, redis.url, "--redis-cluster")
    try:
        services.start()
        services.start()
        await services.emptied(2)
        contents = {i: payload(i, 2000) for i in range(40)}
        for i, data in contents.items():
            assert await put(services.clients[i % 2], i, data)
        await services.settled(2)
        held = [len(server.client().keys("fusionkv:group:*")) for server in redis.servers]
        assert sum(held) == len(contents)
        assert all(held)
        for client in services.clients:
            path = [(SYSTEM, []), *((chunk(i), []) for i in contents)]
            hits = (await client.lookup(NAMESPACE, path, timeout=10)).hits
            assert [hit.kind for hit in hits[1:]] == [HitKind.EXACT, *[HitKind.ALTERNATIVE] * 39]
            for i, data in contents.items():
                assert await get(client, i) == data
        redis.servers[2].kill9()
        for i, data in contents.items():
            home = services.home(i, [0, 1])
            assert await get(services.clients[home], i) == data
            with contextlib.suppress(errors.NotFound):
                assert await get(services.clients[1 - home], i) in (data, None)
    finally:
        await services.close()
        redis.kill9()


async def test_what_asks_redis_ends_when_it_is_asked_to(server: RedisServer) -> None:
    """At whatever moment: redis-py's own calls overlook it at some, and a service that ends waited for its tasks."""
    index = SharedIndex(server.url, cluster=False, password=None, timeout=10, expiry=10)
    for rounds in range(60):
        task = asyncio.create_task(index.entries([b"group"]))
        for _ in range(rounds):
            await asyncio.sleep(0)
        asked = task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == asked, rounds
    await index.close()
