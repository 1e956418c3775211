"""The shared index from within, on one real Redis and on a Cluster: marks, groups, what is given up; placement."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from fusionkv.kvcache_service import metrics
from fusionkv.kvcache_service.cluster import publisher
from fusionkv.kvcache_service.cluster.elsewhere import Elsewhere
from fusionkv.kvcache_service.cluster.publisher import Publisher
from fusionkv.kvcache_service.cluster.rendezvous import ranking
from fusionkv.kvcache_service.cluster.replica import Replica
from fusionkv.kvcache_service.cluster.shared_index import Change, Member, SharedIndex, group_of
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.hits import HitKind
from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.store.entries import Residents, StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.protos.runtime.errors import Unavailable
from tests.ports import free_port
from tests.system.redis_process import RedisCluster, RedisServer
from tests.waiting import until

Server = RedisServer | RedisCluster
A, B, C = (name * 8 for name in (b"a", b"b", b"c"))


def digest(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def made(*path: object, checksum: bytes = b"c" * 16, variant: bytes = b"") -> record.Record:
    return record.make(digest("ns"), [digest(name) for name in ("S", *path)], variant, 100, 7, 3, checksum)


@pytest.fixture(scope="module", params=[RedisServer, RedisCluster], ids=["one", "cluster"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started: Server = request.param(tmp_path_factory.mktemp("redis"))
    yield started
    started.kill9()


def connected(server: Server, expiry: float = 60) -> SharedIndex:
    cluster = isinstance(server, RedisCluster)
    return SharedIndex(server.url, cluster=cluster, password=None, timeout=30, expiry=expiry)


@pytest.fixture
def redis(server: Server) -> Iterator[Any]:
    """A client of it, for what services do not do. It is empty."""
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
async def shared(server: Server, redis: Any) -> AsyncIterator[SharedIndex]:
    index = connected(server)
    yield index
    await index.close()


async def holders(shared: SharedIndex, entry: record.Record) -> dict[bytes, set[bytes]]:
    """Marks by checksum."""
    (found,) = await shared.entries([group_of(entry)])
    return {there.checksum: {m.mark for m in members} for there, members in found if there.key == entry.key}


def held(entry: record.Record) -> Change:
    return Change(entry.key, group_of(entry), entry)


def gone(entry: record.Record) -> Change:
    return Change(entry.key, group_of(entry), None)


async def test_an_entry_is_there_as_long_as_somebody_alive_holds_it(shared: SharedIndex, redis: Any) -> None:
    entry, other = made("x"), made("x", checksum=b"d" * 16)
    for mark in (A, B, C):
        known, _ = await shared.beat(mark, f"{mark[:1].decode()}:1", "serving", {})
        assert not known
        assert (await shared.beat(mark, f"{mark[:1].decode()}:1", "serving", {}))[0]
    for _ in range(2):  # twice does no harm
        await shared.apply(A, [held(entry)])
        await shared.apply(B, [held(entry)])
        await shared.apply(C, [held(other)])
    assert await holders(shared, entry) == {entry.checksum: {A, B}, other.checksum: {C}}
    ((found, _), _) = sorted((await shared.entries([group_of(entry)]))[0], key=lambda each: each[0].checksum)
    assert found == entry
    await shared.apply(B, [held(other)])
    assert await holders(shared, entry) == {entry.checksum: {A}, other.checksum: {B, C}}, "one entry a key and mark"
    await shared.apply(A, [gone(entry), gone(made("never there"))])
    assert await holders(shared, entry) == {other.checksum: {B, C}}
    await shared.beat(B, "b:1", "left", {})
    assert await holders(shared, entry) == {other.checksum: {C}}
    # The next who publishes in a group clears away the marks of the dead.
    await shared.apply(C, [held(made("y", "x"))])
    assert all(B not in value for value in redis.hgetall(b"fusionkv:group:" + group_of(entry)).values())
    await shared.apply(C, [gone(other), gone(made("y", "x"))])
    assert redis.keys("fusionkv:group:*") == []


async def test_a_group_is_bounded_and_what_is_in_it_stays(shared: SharedIndex) -> None:
    await shared.beat(A, "a:1", "serving", {})
    entries = [made(f"before {i}", "x") for i in range(300)]
    for at in range(0, 300, 50):
        await shared.apply(A, map(held, entries[at : at + 50]))
    (found,) = await shared.entries([group_of(entries[0])])
    assert {there.key for there, _ in found} == {entry.key for entry in entries[:256]}
    await shared.apply(A, [held(entries[3]), gone(entries[4]), held(entries[299])])
    (found,) = await shared.entries([group_of(entries[0])])
    assert {there.key for there, _ in found} == {e.key for e in [*entries[:4], *entries[5:256], entries[299]]}


async def test_what_others_wrote_under_our_names_costs_that_chunk_alone(shared: SharedIndex, redis: Any) -> None:
    await shared.beat(A, "a:1", "serving", {})
    entries = [made(name) for name in ("string", "empty", "garbage", "fine")]
    keys = [b"fusionkv:group:" + group_of(entry) for entry in entries]
    redis.set(keys[0], "not a hash")
    redis.hset(keys[1], "field", "")
    redis.hset(keys[2], b"f" * 48, b"\x05" + b"?" * 100)
    await shared.apply(A, map(held, entries))
    found = await shared.entries([group_of(entry) for entry in entries])
    assert shared.reachable
    assert [[there for there, _ in each] for each in found] == [[], [entries[1]], [entries[2]], [entries[3]]]
    redis.hset("fusionkv:members", mapping={B: "garbage", C: b"9999999999999 serving \xff:1", b"short": "1 x b:1"})
    await shared.beat(A, "a:1", "serving", {})
    assert set(shared.members) == {A, C}
    assert set(redis.hkeys("fusionkv:members")) == {A, C}
    redis.set("fusionkv:members", "not a hash")
    with pytest.raises(Unavailable, match="holds something else"):
        await shared.beat(A, "a:1", "serving", {})
    assert not shared.reachable


async def test_accesses_reach_the_holder_once(shared: SharedIndex) -> None:
    await shared.beat(A, "a:1", "serving", {B: {(digest(1), True): 3, (digest(2), False): 1}})
    await shared.beat(C, "c:1", "serving", {B: {(digest(1), False): 5}})
    _, seen = await shared.beat(B, "b:1", "serving", {})
    assert seen == [(digest(1), 3, True), (digest(2), 1, False), (digest(1), 5, False)]
    assert (await shared.beat(B, "b:1", "serving", {}))[1] == []


@pytest.mark.usefixtures("redis")
async def test_a_silent_mark_dies(server: Server) -> None:
    shared = connected(server, expiry=0.2)
    await shared.beat(A, "a:1", "serving", {})
    await shared.apply(A, [held(made("z"))])
    assert await holders(shared, made("z"))
    await asyncio.sleep(0.3)
    known, _ = await shared.beat(B, "b:1", "serving", {})
    assert not known
    assert set(shared.members) == {B}
    assert not await holders(shared, made("z"))
    for _ in range(2):
        known, _ = await shared.beat(A, "a:1", "serving", {}, announced=True)
        assert not known, "its entries may have been given up meanwhile"
        assert A not in shared.members
    await shared.close()


async def test_no_password_reaches_an_error_or_the_log(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from-a-file\n")
    locked = RedisServer(tmp_path, "--requirepass", "from-a-file")
    try:
        index = SharedIndex(locked.url, cluster=False, password=tmp_path / "password", timeout=30, expiry=5)
        await index.beat(A, "a:1", "serving", {})
        with caplog.at_level(logging.DEBUG, "fusionkv"):
            for port in (locked.port, free_port()):
                url = f"redis://:a-secret@127.0.0.1:{port}"
                wrong = SharedIndex(url, cluster=False, password=None, timeout=30, expiry=5)
                wrong.reachable = True
                with pytest.raises(Unavailable) as caught:
                    await wrong.beat(A, "a:1", "serving", {})
                assert "a-secret" not in str(caught.value)
                assert not wrong.reachable
                await wrong.close()
        assert "Redis is out of reach" in caplog.text
        assert "a-secret" not in caplog.text
        await index.close()
    finally:
        locked.kill9()


async def test_too_many_changes_while_redis_is_away_publish_everything_anew(
    monkeypatch: pytest.MonkeyPatch, shared: SharedIndex
) -> None:
    monkeypatch.setattr(publisher, "_MOST_WAITING", 10)
    residents = Residents([MemoryTier(1 << 20)], metrics.Counters())
    written = Publisher(residents, shared)
    await shared.beat(written.mark, "a:1", "serving", {})
    written.announced = True

    class Watcher:
        published, withdrawn = written.published, written.withdrawn

        @staticmethod
        def warmed(entry: StoredEntry) -> None:
            pass

    residents.watcher = Watcher()
    tasks = [asyncio.create_task(work) for work in (written.write_changes(), written.write_everything())]
    entries = [StoredEntry(made(i), 1.0) for i in range(30)]

    def publish(some: list[StoredEntry]) -> None:
        for entry in some:
            place, _ = residents.reserve(residents.home, 100)
            residents.settle(entry, residents.home, place)
            residents.publish(entry)

    async def complete() -> list[Any]:
        await until(lambda: not written.waiting)
        return await shared.entries([group_of(entry.record) for entry in entries])

    publish(entries[:6])
    assert [len(found) for found in await complete()] == [1] * 6 + [0] * 24
    before = written.mark
    shared.reachable = False
    for entry in entries[:3]:
        residents.withdraw(entry)
    publish(entries[6:])
    assert written.mark != before
    assert written.waiting > 0
    await shared.beat(written.mark, "a:1", "serving", {})
    written.announced = True
    written.resume()
    found = await complete()
    assert [sum(m.mark == written.mark for _, who in each for m in who) for each in found] == [0] * 3 + [1] * 27
    for task in tasks:
        task.cancel()
    residents.check_integrity()


async def test_accesses_that_a_late_redis_was_told_of_are_told_once_more(
    monkeypatch: pytest.MonkeyPatch, shared: SharedIndex, tmp_path: Path
) -> None:
    replica = Replica(Store(Config(data_dir=tmp_path), [MemoryTier(1 << 20)]), shared, None)
    told: list[Any] = []

    async def beat(_mark: bytes, _address: str, _state: str, seen: Any, *, announced: bool) -> Any:
        told.append(seen)
        raise Unavailable(f"late, announced: {announced}")

    monkeypatch.setattr(shared, "beat", beat)
    for _ in range(3):
        replica._note_seen(Elsewhere(HitKind.EXACT, made(1), (Member(A, "a:1", False),), b"g"))
        await replica._beat()
    assert [list(seen[A].values()) for seen in told] == [[1], [2], [2]], "each twice at most"


async def test_what_fails_beside_a_heartbeat_is_published_after_it(tmp_path: Path) -> None:
    """A heartbeat begins while Redis stands still, a write fails, and the heartbeat gets through."""
    server = RedisServer(tmp_path)
    shared = SharedIndex(server.url, cluster=False, password=None, timeout=2, expiry=60)
    store = Store(Config(data_dir=tmp_path, redis_expiry_seconds=60), [MemoryTier(1 << 20)])
    replica, residents = Replica(store, shared, None), store.residents
    await replica.start(["a:1"])
    await until(lambda: not replica.stats().waiting)
    server.pause()
    entry = StoredEntry(made(1), 1.0)
    residents.settle(entry, residents.home, residents.reserve(residents.home, 100)[0])
    residents.publish(entry)
    # It need not be so exactly: a heartbeat that fails as well is made up for by the next one.
    await asyncio.sleep(1)
    beat = asyncio.create_task(replica._beat())
    await until(lambda: shared.failures)
    server.resume()
    await beat
    await until(lambda: not replica.stats().waiting)
    assert await holders(shared, entry.record)
    await replica.close()
    await store.close()
    server.kill9()


def test_placement_moves_only_what_must_move() -> None:
    groups = [digest(i) for i in range(4000)]
    names = [f"cache-{i}:7070" for i in range(5)]
    before = {group: ranking(group, names) for group in groups}
    counts = Counter(order[0] for order in before.values())
    assert all(abs(counts[name] - 800) < 120 for name in names), "5 standard deviations"
    after = {group: ranking(group, [*names, "cache-5:7070"]) for group in groups}
    moved = [group for group in groups if before[group][0] != after[group][0]]
    assert {after[group][0] for group in moved} == {"cache-5:7070"}
    assert abs(len(moved) - 4000 / 6) < 120
    for group in groups:
        left = ranking(group, names[1:])
        assert left == [name for name in before[group] if name != names[0]], "who leaves is succeeded by the second"


def test_what_is_measured_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics.metrics, "get_meter", MeterProvider([reader]).get_meter)
    metrics.observe_shared_index(lambda: (3, 7))
    counters = metrics.Counters()
    counters.add("lookups.elsewhere", kind="exact")
    counters.add("moves", 2)
    data = reader.get_metrics_data()
    assert data is not None
    values = {
        metric.name: [point.value for point in metric.data.data_points]  # type: ignore[union-attr]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert values == {
        "fusionkv.kvcache.members": [3],
        "fusionkv.kvcache.shared_index.waiting": [7],
        "fusionkv.kvcache.lookups.elsewhere": [1],
        "fusionkv.kvcache.moves": [2],
    }
