"""Cache services that share an index are killed, stopped, join and leave: misses, never errors; few bytes move."""

import asyncio
import contextlib
import random
import secrets
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient, HitKind
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.tls import ClientTLS
from tests.chaos.entries import Entries
from tests.system.cache_process import NAMESPACE, SYSTEM, chunk, find, get, payload, put
from tests.system.redis_process import RedisServer
from tests.system.shared_services import Services
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.slow]


async def test_a_lookup_at_one_that_stands_still_is_answered_by_another(cluster: Services) -> None:
    names = cluster.names(10)
    for i in names:
        await put(cluster.clients[0], i, payload(i, 5000))
    await cluster.settled()
    client = CacheClient(cluster.services[0].address)
    # Who the others are follows from what they hold, and how often one may be asked besides from what was asked.
    for _ in range(4):
        for i in names:
            assert (await find(client, i)).hits[1].kind is HitKind.EXACT
    # Hiccups may have used that up. What nobody stored becomes no hotter by it.
    async with asyncio.timeout(60):
        while client._hedge._allowed < 1.0:
            await find(client, "nothing")
    there = next(i for i in names if cluster.home(i) == 1)
    cluster.services[0].process.send_signal(signal.SIGSTOP)
    try:
        found = await find(client, there, timeout=60)
        entry = found.hits[1].entry
        assert entry is not None
        assert cluster.services[1].address in entry.holders
        assert (found.lease, entry.lease, entry.tier) == (0, 0, "remote")
        buffer = bytearray(entry.size)
        await client.fetch(entry, memoryview(buffer), timeout=60)
        assert buffer == payload(there, 5000)
    finally:
        cluster.services[0].process.send_signal(signal.SIGCONT)
    await client.close()
    await cluster.settled()


async def test_a_killed_service_is_a_miss_and_comes_back_with_what_it_had(cluster: Services) -> None:
    names = cluster.names(10)
    for i in names:
        await put(cluster.clients[0], i, payload(i, 5000))
    await cluster.settled()
    lost = [i for i in names if cluster.home(i) == 2]
    client = cluster.clients[0]
    entry = (await find(client, lost[0])).hits[1].entry
    assert entry is not None
    cluster.services[2].kill9()
    with pytest.raises(errors.NotFound, match="no holder of entry"):
        await client.fetch(entry, memoryview(bytearray(entry.size)), timeout=10)
    # The client knows at once, the others when its time is over.
    assert (await find(client, lost[-1])).hits[1].kind is HitKind.MISS
    await cluster.settled(2)
    other = CacheClient(cluster.services[1].address)
    assert all([(await find(other, i)).hits[1].kind is HitKind.MISS for i in lost])
    assert await put(other, lost[0], payload(lost[0], 5000)), "it is put anew, at who is alive"
    await asyncio.to_thread(cluster.restart, 2)
    await cluster.settled()
    for i in names:
        assert await get(other, i) == payload(i, 5000)
    await other.close()


async def test_a_stopped_service_costs_the_time_of_one_fetch(cluster: Services) -> None:
    for i in cluster.names(6):
        await put(cluster.clients[0], i, payload(i, 5000))
    await cluster.settled()
    there = [i for i in cluster.names(6) if cluster.home(i) == 1]
    entry = (await find(cluster.clients[0], there[0])).hits[1].entry
    assert entry is not None
    path = [(SYSTEM, ()), *((chunk(i), ()) for i in there)]
    cluster.services[1].process.send_signal(signal.SIGSTOP)
    try:
        # Far more than half a second, and far less than silence costs without a limit.
        async with asyncio.timeout(20):
            with pytest.raises(errors.NotFound):
                await cluster.clients[0].fetch(entry, memoryview(bytearray(entry.size)), timeout=0.5)
        # At once: after 5 s the client would try it again.
        hits = (await cluster.clients[0].lookup(NAMESPACE, path, timeout=10)).hits
        assert [hit.kind for hit in hits[1:]] == [HitKind.MISS] * len(there)
    finally:
        cluster.services[1].process.send_signal(signal.SIGCONT)

    async def found() -> bool:
        return [await get(cluster.clients[0], i) for i in there] == [payload(i, 5000) for i in there]

    await until(found)


async def test_a_join_and_a_leave_move_only_what_must_move_while_serving(cluster: Services) -> None:
    names = [f"joined {i}" for i in range(120)]  # none that a test before made hot
    for i in names:
        await put(cluster.clients[0], i, payload(i, 3000))
    await cluster.settled()
    moved_before = sum(s.moved for s in await cluster.stats())
    reader, done = CacheClient(cluster.services[0].address), asyncio.Event()
    seen: Counter[str] = Counter()

    async def read_on() -> None:
        """Everything again and again: found and whole, or a miss, never an error."""
        while not done.is_set():
            for i in names:
                try:
                    data = await get(reader, i)
                except errors.NotFound:
                    data = None
                seen["miss" if data is None else "whole" if data == payload(i, 3000) else "wrong"] += 1
                await asyncio.sleep(0.03)  # or they become hot, and are copied

    reading = asyncio.create_task(read_on())
    await asyncio.to_thread(cluster.start, "--drain-seconds", "20")
    cluster.clients.append(CacheClient(cluster.services[3].address))
    homes = [cluster.home(i, [0, 1, 2, 3]) for i in names]

    async def moved() -> bool:
        return await cluster.entries() == [homes.count(n) for n in range(4)]

    await until(moved, 120)
    assert sum(s.moved for s in await cluster.stats()) - moved_before == homes.count(3) > 0
    assert set(seen) == {"whole"}, "nothing was out of reach while it moved"
    assert await asyncio.to_thread(cluster.services[3].stop) == 0
    await cluster.clients[3].close()
    del cluster.services[3], cluster.clients[3]
    await cluster.settled()
    done.set()
    await reading
    assert set(seen) <= {"whole", "miss"}
    assert seen["miss"] < 20, "the few that were looked up while it was there, and fetched after it had gone"
    homes = [cluster.home(i) for i in names]
    assert await cluster.entries() == [homes.count(n) for n in range(3)], "what it had was handed to the others"

    async def whole() -> bool:
        """Soon: a client that came for what had just gone takes it for a miss for a while."""
        return [await get(reader, i) for i in names] == [payload(i, 3000) for i in names]

    await until(whole)
    await reader.close()


async def test_a_hot_chunk_gets_a_second_holder_and_outlives_the_first(cluster: Services) -> None:
    await put(cluster.clients[0], "hot", payload("hot", 9000))
    await put(cluster.clients[0], "cold", payload("cold", 9000))
    await cluster.settled()
    home = cluster.home("hot")
    others = [CacheClient(cluster.services[n].address) for n in range(3) if n != home]
    for _ in range(40):
        await find(others[0], "hot")

    async def copied() -> bool:
        return sum(await cluster.entries()) == 3

    await until(copied)
    await cluster.settled()
    cluster.services[home].kill9()
    for client in others:
        assert await get(client, "hot") == payload("hot", 9000)
        await client.close()
    await asyncio.to_thread(cluster.restart, home)


async def test_with_mtls_and_encrypted_disks(
    launch: Any, tmp_path: Path, server: RedisServer, authority: Any
) -> None:
    """Fetched from the other, and handed over at the end, where nobody is called without a certificate."""
    inner = authority("inner")
    (cert, key), caller = inner.issue("cache"), inner.issue("worker")
    (tmp_path / "keys").write_text(f"{secrets.token_hex(32)}\n")
    files = {"cert": cert, "key": key, "client-ca": inner.ca, "ca": inner.ca}
    flags = [part for name, file in files.items() for part in (f"--tls-{name}", str(file))]
    more = (*flags, "--disk-keys", str(tmp_path / "keys"))
    services = Services(launch, tmp_path, f"{server.url}/1", *more, tls=ClientTLS(inner.ca, *caller))
    services.start()
    services.start()
    await services.emptied(2)
    for i in range(20):
        assert await put(services.clients[0], i, payload(i, 5000))
    await services.settled(2)
    assert all(await services.entries())
    for client in services.clients:
        for i in range(20):
            assert await get(client, i) == payload(i, 5000)
    assert await asyncio.to_thread(services.services[0].stop) == 0
    for i in range(20):
        assert await get(services.clients[1], i) == payload(i, 5000)
    await services.close()


async def test_an_entry_of_a_service_that_callers_still_avoid_is_not_counted_as_lost(cluster: Services) -> None:
    """One that gave no answer counts as out of reach for 5 s, for its own callers too, although it is back."""
    entries = Entries(SimpleNamespace(cache_clients=cluster.clients), random.Random(1), Counter())  # type: ignore[arg-type]
    while len(entries.stored) < 10:
        await entries.put_one()
    await cluster.settled()
    home = cluster.home(0)
    found = [(await find(client, 0)).hits[1].entry for client in cluster.clients]
    # Who the others are, callers know from what these hold.
    await asyncio.gather(*(find(client, i) for client in cluster.clients for i in entries.stored))
    cluster.services[home].process.send_signal(signal.SIGSTOP)
    try:
        for client, entry in zip(cluster.clients, found, strict=True):
            assert entry is not None
            with contextlib.suppress(errors.ServiceError):
                await client.fetch(entry, memoryview(bytearray(entry.size)), timeout=0.5)
            with contextlib.suppress(errors.ServiceError):
                await find(client, 0, timeout=0.5)
        address = cluster.services[home].address
        await until(lambda: not any(client._holders._up(address) for client in cluster.clients))
    finally:
        cluster.services[home].process.send_signal(signal.SIGCONT)
    await entries.everything_is_there(set())
    assert entries.seen["entries that callers did not find for a moment"] >= 1
