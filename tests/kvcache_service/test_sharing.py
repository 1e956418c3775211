"""What a service does with its remote tier, over an engine that is a dictionary and fails as it is told."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fusionkv.kvcache_service.blobs import Blobs
from fusionkv.kvcache_service.client import HitKind
from fusionkv.kvcache_service.index.rows import PROTECTED
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.remote.access import RemoteAccess
from fusionkv.kvcache_service.remote.tier import RemoteEngine, RemoteTier
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime.errors import NotFound, ResourceExhausted, Unavailable
from tests.kvcache_service.tools import MIB, NAMESPACE, payload, serving
from tests.waiting import until


@dataclass
class Dictionary(RemoteEngine):
    values: dict[str, bytes] = field(default_factory=dict)
    away: bool = False
    full: bool = False
    broken: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        self._called("get")
        return [self.values.get(name) for name in names]

    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        self._called("put")
        if self.full:
            raise OSError("full")
        self.values.update(values)

    def touch(self, names: Sequence[str]) -> list[bool]:
        self._called("touch")
        return [name in self.values for name in names]

    def remove(self, names: Sequence[str]) -> None:
        if names:  # as other engines, it calls nobody for nothing
            self._called("remove")
        for name in names:
            self.values.pop(name, None)

    def remove_all(self, prefix: str) -> None:
        self._called("remove_all")
        self.values = {name: value for name, value in self.values.items() if not name.startswith(prefix)}

    def close(self) -> None:
        pass

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise RuntimeError("a fault of the client library")
        if self.away:
            raise Unreachable("away")

    @contextmanager
    def late(self, name: str) -> Iterator[threading.Event]:
        """Holds back the results of a method until its end; the event says that it was called."""
        asked, ended, method = threading.Event(), threading.Event(), getattr(self, name)

        def held(names: Sequence[str]) -> Any:
            found = method(names)
            asked.set()
            ended.wait(20)
            return found

        setattr(self, name, held)
        try:
            yield asked
        finally:
            setattr(self, name, method)
            ended.set()

    @property
    def blocks(self) -> list[str]:
        return [name for name in self.values if "{" not in name]


@pytest.fixture
def engine() -> Dictionary:
    return Dictionary()


@pytest.fixture
async def serve(engine: Dictionary, tmp_path: Path) -> AsyncIterator[Any]:
    """`await serve(memory=, disk=)` starts one more service over the engine."""
    numbers = count()
    async with AsyncExitStack() as stack:
        yield lambda **more: stack.enter_async_context(serving(tmp_path / f"{next(numbers)}", engine=engine, **more))


async def shared(service: Any) -> None:
    await until(lambda: not service.sharing.write_backs)


async def share(service: Any, path: Sequence[str], data: bytes, **more: Any) -> bytes:
    """Puts an entry, and waits until it is in the remote tier; gives its key."""
    key, _ = await service.put(path, data, **more)
    await shared(service)
    return key


async def kind(service: Any, *path: str) -> HitKind:
    return (await service.find(*path)).hits[-1].kind


async def used(service: Any, engine: Dictionary) -> None:
    """An entry that is used is written anew where the remote tier lacks it."""

    async def written() -> bool:
        await service.find("S")
        return bool(engine.blocks)

    await until(written)


async def test_what_is_found_exactly_here_asks_nobody(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    for path in ("S", "SA", "SAB"):
        await service.put(path, b"data")
    await shared(service)
    asked = engine.calls.count("get")
    assert {hit.kind for hit in (await service.find(*"SAB")).hits} == {HitKind.EXACT}
    assert engine.calls.count("get") == asked
    await service.find(*"SABCD")
    assert engine.calls.count("get") == asked + 1


async def test_it_is_copied_by_being_looked_up(serve: Any) -> None:
    a, b = await serve(), await serve(memory=16 * MIB)
    await share(a, "S", payload("x", 9 * MIB + 5), signature=b"signed")
    found = await b.find("S")
    assert found.hits[0].entry.signature == b"signed"
    assert (found.hits[0].entry.tier, found.lease, found.hits[0].entry.lease) == ("remote", 0, 0)
    await until(lambda: len(b.store.entries) == 1)
    assert (await b.entry("S")).tier == "memory"
    stats = await b.client.stats()
    assert (stats.remote.read, stats.remote.written, stats.remote.waiting) == (1, 0, 0)
    assert (await a.client.stats()).remote.written == 1


@contextmanager
def busy(service: Any) -> Iterator[None]:
    """While others are pulled: what is found is not pulled at once."""
    at_work = {bytes([n]): asyncio.get_running_loop().create_future() for n in range(4)}
    service.sharing.pulls._tasks.update(at_work)
    yield
    service.sharing.pulls._tasks.clear()


async def test_a_prefetch_copies_what_was_found(serve: Any) -> None:
    a, b = await serve(), await serve()
    await share(a, "S", b"data")
    with busy(b):
        entry = await b.entry("S")
    assert entry.tier == "remote"
    found = await b.stub.Prefetch(pb.PrefetchRequest(keys=[entry.key, b"?" * 32]), timeout=20)
    assert [each.HasField("arena_offset") for each in found.entries] == [True, False]


async def test_a_copy_has_been_used_once(serve: Any) -> None:
    a, b = await serve(), await serve()
    key = await share(a, "S", b"data")
    await b.find("S")
    await until(lambda: len(b.store.entries) == 1)
    uses, row = b.store.entries.index.rows.uses, b.store.entries.get(key).row
    assert uses[row] == 1
    await b.find("S")
    assert uses[row] == PROTECTED


async def test_many_fetch_what_is_copied_once(serve: Any) -> None:
    a, b = await serve(), await serve()
    data = payload("x", 2 * MIB)
    await share(a, "S", data)
    entry = await b.entry("S")
    assert await asyncio.gather(*(b.fetch(entry) for _ in range(20))) == [data] * 20
    assert (await b.client.stats()).remote.read == 1


async def test_one_that_was_only_offered_is_kept_where_it_is_copied(serve: Any) -> None:
    """Its path was asked for once, and another entry of the chunk is here: a Put would be superfluous."""
    a, b = await serve(), await serve()
    await a.put("SXY", b"long", offered=True)
    await b.put("SY", b"short", offered=True)
    await shared(a)
    hit = (await b.find(*"SXY")).hits[2]
    assert hit.kind is HitKind.EXACT
    assert await b.fetch(hit.entry) == b"long"
    assert await kind(b, *"SXY") is HitKind.EXACT


@pytest.mark.parametrize("how", ["changed", "short", "long", "gone", "another's"])
async def test_damage_there_is_a_miss_and_is_deleted(serve: Any, engine: Dictionary, how: str) -> None:
    a, b = await serve(), await serve()
    data = payload("x", 2 * MIB)
    await share(a, "S", data)
    first, second = engine.blocks
    value, other = engine.values[second], engine.values[first]
    wrong = {"changed": value[:-1] + b"!", "short": value[:-1], "long": value + b"x", "another's": other}
    if how == "gone":
        del engine.values[second]
    else:
        engine.values[second] = wrong[how]
    entry = await b.entry("S")
    with pytest.raises(NotFound):
        await b.fetch(entry)
    assert await kind(b, "S") is HitKind.MISS
    assert engine.values == {}
    assert (await b.client.stats()).checksum_failures == (how in ("changed", "another's"))
    # Who has it whole writes it anew once it is used there.
    await used(a, engine)
    await shared(a)
    assert await b.get("S") == data


async def test_without_room_here_it_is_refused_and_nothing_is_held(serve: Any) -> None:
    a, b = await serve(), await serve(memory=MIB, disk=2 * MIB)
    data = payload("x", 3 * MIB // 2)
    await b.put("T", payload("y", 3 * MIB // 2))
    await share(a, "S", data)
    lease = (await b.find("T")).lease
    entry = await b.entry("S")
    with pytest.raises(ResourceExhausted):
        await b.fetch(entry)
    await b.client.release(lease)
    assert await b.get("S") == data


@pytest.mark.parametrize("less", [{"max_entry_bytes": MIB}, {"disk": MIB}, {"tenant_share": 0.05}], ids=str)
async def test_what_never_has_room_here_is_a_miss(serve: Any, less: dict[str, Any]) -> None:
    a, b = await serve(), await serve(**less)
    await share(a, "S", payload("x", MIB + 1))
    await share(a, "T", payload("x", MIB // 2))
    assert await kind(b, "S") is HitKind.MISS
    assert await kind(b, "T") is HitKind.EXACT


async def test_while_it_is_away_nobody_asks_and_nothing_is_lost(serve: Any, engine: Dictionary) -> None:
    a, b = await serve(), await serve()
    await share(a, "S", b"before")
    entry = await b.entry("S")
    await until(lambda: len(b.store.entries) == 1)
    engine.away = True
    assert await kind(b, "T") is HitKind.MISS
    asked = engine.calls.count("get")
    for _ in range(20):
        assert await kind(b, "T") is HitKind.MISS
    assert engine.calls.count("get") == asked
    assert await b.fetch(entry) == b"before"
    await a.put("U", b"meanwhile")
    await until(lambda: not a.sharing.reachable)
    await a.find("U")
    assert (await a.client.stats()).remote.waiting == 1
    assert not a.sharing.write_backs._to_renew, "it is renewed when it is written"
    with pytest.raises(Unavailable, match="remote tier"):
        await a.client.delete(namespace=bytes(32))
    engine.away = False
    await until(lambda: a.sharing.reachable and b.sharing.reachable)
    await shared(a)
    assert await b.get("U") == b"meanwhile"


async def test_it_goes_away_between_lookup_and_fetch(serve: Any, engine: Dictionary) -> None:
    a, b = await serve(), await serve()
    for name in "ST":
        await share(a, name, payload("x", MIB))
    with busy(b):
        found = [await b.entry(name) for name in "ST"]
    engine.away = True
    asked = engine.calls.count("get")
    for entry in found:
        with pytest.raises(NotFound):
            await b.fetch(entry)
    assert engine.calls.count("get") == asked + 1, "by the first; no place is reserved for the second"
    assert await kind(b, "S") is HitKind.MISS
    engine.away = False


async def test_copies_keep_no_lookup_waiting(serve: Any, engine: Dictionary, monkeypatch: Any) -> None:
    a, b = await serve(), await serve(remote_lookup_ms=500)
    for name in "STUVW":
        await share(a, name, b"data")
    ended, busy, get, put = threading.Event(), [], engine.get, engine.put

    def slow(method: Any, argument: Any) -> Any:
        busy.append(method)
        ended.wait(20)
        return method(argument)

    monkeypatch.setattr(engine, "get", lambda names: get(names) if "{" in names[0] else slow(get, names))
    monkeypatch.setattr(engine, "put", lambda values: slow(put, values))
    engine.away, b.sharing._access.reachable = True, False  # so that four are written back at the same time
    for name in "1234":
        await b.put(name, b"data")
    engine.away = False
    await until(lambda: len(busy) == 4)
    for name in "STUV":
        assert await kind(b, name) is HitKind.EXACT
    await until(lambda: len(busy) == 8)
    found = await kind(b, "W")
    ended.set()
    assert (found, b.sharing.reachable) == (HitKind.EXACT, True)
    await shared(b)


async def test_what_came_in_time_counts_after_a_pause_of_this_process(engine: Dictionary) -> None:
    access, come = RemoteAccess(RemoteTier(engine), Counters(), 0.1), threading.Event()

    def pause() -> None:
        come.set()
        time.sleep(0.3)

    asking = asyncio.create_task(access.run_lookup(come.wait, 20))
    asyncio.get_running_loop().call_soon(pause)
    assert await asking
    come.clear()
    with pytest.raises(Unreachable, match=r"no response within 0\.1 s"):
        await access.run_lookup(come.wait, 20)
    come.set()
    access.close()


async def test_a_lookup_that_hangs_up_holds_nothing(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    await share(service, "S", b"data")
    with engine.late("get") as asked:
        lookup = asyncio.create_task(service.find(*"SA"))
        await until(asked.is_set)
        assert len(service.store.leases) == 1
        lookup.cancel()
        await until(lambda: not len(service.store.leases))


async def test_what_is_gone_with_its_lease_before_it_answers_is_a_miss(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    key = await share(service, "S", b"data")
    with engine.late("get") as asked:
        lookup = asyncio.create_task(service.find(*"SA", lease_ms=1))
        await until(asked.is_set)
        await service.client.delete([key], here=True)
        service.clock.now += 1
        service.store.leases.expire()
    assert [hit.kind for hit in (await lookup).hits] == [HitKind.MISS] * 2


async def test_what_is_put_anew_while_it_is_written_is_written_again(serve: Any, engine: Dictionary) -> None:
    one, other = await serve(), await serve()
    key = await share(one, "S", b"data")
    with engine.late("touch") as asked:
        await one.put("S", b"data")
        await one.client.delete([key], here=True)
        await one.put("S", b"data")
        await until(asked.is_set)
        await one.client.delete([key])
        await one.put("S", b"data")
    await shared(one)
    assert await kind(other, "S") is HitKind.EXACT
    assert await other.get("S") == b"data"


async def test_other_bytes_put_anew_are_not_written_as_the_old_ones(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    with engine.late("touch") as asked:
        key, _ = await service.put("S", b"data")
        await until(asked.is_set)
        await service.client.delete([key])
        await service.put("S", b"other")
    await shared(service)
    assert len(engine.blocks) == 1


async def test_an_entry_that_goes_before_it_is_written_back_is_no_failure(serve: Any, engine: Dictionary) -> None:
    """As in small tiers, which evict it."""
    service = await serve()
    with engine.late("touch") as asked:
        key, _ = await service.put("S", b"data")
        await until(asked.is_set)
        await service.store.delete([key])
    await shared(service)
    assert service.store.counters.get("remote.failures") == 0
    assert engine.values == {}


async def test_one_that_is_full_keeps_nothing_back(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    engine.full = True
    await share(service, "S", b"data")
    assert service.sharing.reachable
    assert engine.values == {}
    engine.full = False
    await used(service, engine)


async def test_a_deletion_that_fails_counts(serve: Any, engine: Dictionary, monkeypatch: pytest.MonkeyPatch) -> None:
    service = await serve()
    key = await share(service, "S", b"data")
    with monkeypatch.context() as failing:
        failing.setattr(engine, "remove", Mock(side_effect=Unreachable("away")))
        with pytest.raises(Unavailable, match="can't delete in the remote tier: away"):
            await service.client.delete([key])
    assert service.store.counters.get("remote.failures") == 1
    await service.client.delete([key])
    assert service.store.counters.get("remote.failures") == 1


@pytest.mark.parametrize("method", ["touch", "put"])
async def test_an_unexpected_error_stops_no_write_back(serve: Any, engine: Dictionary, method: str) -> None:
    service = await serve()
    await share(service, "S", b"data")
    engine.broken.add(method)
    for name in "TUVWX":
        await service.put(name, b"data")
    await until(lambda: service.store.counters.get("remote.failures") >= 5)
    engine.broken.clear()
    engine.values.clear()
    await used(service, engine)
    await service.put("Y", b"data")
    await shared(service)


async def test_an_unexpected_error_of_a_renewal_ends_nothing(serve: Any, engine: Dictionary, caplog: Any) -> None:
    service = await serve()
    await share(service, "S", b"data")
    engine.broken.add("touch")

    async def failed() -> bool:
        await service.find("S")
        return "is repeated" in caplog.text

    await until(failed)
    engine.broken.clear()
    engine.values.clear()
    await used(service, engine)


async def test_a_deletion_reaches_what_is_being_written(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    for round in range(8):
        key, _ = await service.put([f"{round}"], payload(round, 2 * MIB))
        for _ in range(round):
            await asyncio.sleep(0)
        await service.client.delete([key])
        await shared(service)
        await until(lambda: not service.store.work.tasks)
        assert engine.values == {}, round


async def test_a_deletion_reaches_what_a_failed_call_has_written(
    serve: Any, engine: Dictionary, monkeypatch: Any
) -> None:
    """Of a record that was written and not confirmed, the service rids the tier once it is back."""
    service, asked, go, put = await serve(), threading.Event(), threading.Event(), engine.put

    def lose(values: Sequence[tuple[str, bytes]]) -> None:
        asked.set()
        go.wait(20)
        put(values)
        if "{" in values[0][0]:
            raise Unreachable("no response")

    monkeypatch.setattr(engine, "put", lose)
    key, _ = await service.put("S", b"data")
    await until(asked.is_set)
    await service.client.delete([key])
    go.set()
    await until(lambda: engine.values and not service.sharing.reachable)
    await until(lambda: not engine.values and not service.sharing.write_backs)


async def test_a_lookup_asks_for_no_more_than_the_engine_takes(serve: Any, engine: Dictionary) -> None:
    """In an object store, a request for each value takes its time: the first chunks that are missing are found."""
    a, b = await serve(), await serve()
    for name in "ABC":
        await a.put(["S", name], name.encode())
    await shared(a)
    engine.lookup_values = 11  # one of the system prompt, five of each chunk
    for known in (2, 3):
        hits = (await b.find(*"SABC")).hits
        assert sum(hit.kind is not HitKind.MISS for hit in hits) == known
        await until(lambda known=known: len(b.store.entries) == known)
    blobs = Blobs(b.client, layout="a")
    assert await blobs.touch([b"%d" % n for n in range(20)]) == [False] * 20


async def test_a_deletion_reaches_what_is_being_copied(serve: Any, engine: Dictionary) -> None:
    a, b = await serve(), await serve()
    for round in range(8):
        name = f"{round}"
        key = await share(a, [name], payload(round, 2 * MIB))
        entry = await b.entry(name)
        for _ in range(round):
            await asyncio.sleep(0)
        await b.client.delete([entry.key])
        assert await kind(b, name) is HitKind.MISS, round
        await a.client.delete([key])
        assert engine.values == {}, round


@pytest.mark.parametrize("method", ["remove", "remove_all"])
async def test_a_lookup_brings_nothing_back_that_is_being_deleted(
    serve: Any, engine: Dictionary, monkeypatch: Any, method: str
) -> None:
    a, b = await serve(), await serve()
    key = await share(a, "S", b"data")
    assert await b.get("S") == b"data"
    asked, go, remove = threading.Event(), threading.Event(), getattr(engine, method)
    monkeypatch.setattr(engine, method, lambda names: (asked.set(), go.wait(20), remove(names)))
    named: Any = {"keys": [key]} if method == "remove" else {"namespace": NAMESPACE}
    deletion = asyncio.create_task(b.client.delete(**named))
    await until(asked.is_set)
    assert await b.get("S") == b"data"
    go.set()
    assert await deletion == 1
    assert len(b.store.entries) == 0
    assert await kind(b, "S") is HitKind.MISS


async def test_a_copy_writes_nothing_after_the_end(serve: Any, engine: Dictionary, monkeypatch: Any) -> None:
    a, b = await serve(), await serve()
    await share(a, "S", payload("x", MIB))
    asked, go, get = threading.Event(), threading.Event(), engine.get
    slow = lambda names: (asked.set(), go.wait(20), get(names))[-1]  # noqa: E731
    monkeypatch.setattr(engine, "get", lambda names: (get if "{" in names[0] else slow)(names))
    await b.find("S")
    await until(asked.is_set)
    await b.sharing.close()
    go.set()
    await b.settled()
    assert not [*(b.config.data_dir / "segments").iterdir()]


async def test_a_deletion_here_alone_leaves_it_there(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    key = await share(service, "S", b"data")
    assert await service.client.delete([key], here=True) == 1
    assert await service.get("S") == b"data"
    await service.client.delete([key])
    assert engine.values == {}


async def test_a_deletion_that_failed_deletes_when_it_is_tried_again(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    key = await share(service, "S", b"data")
    engine.away = True
    for _ in range(2):
        with pytest.raises(Unavailable, match="remote tier"):
            await service.client.delete([key])
        assert len(service.store.entries) == 0
    engine.away = False
    await until(lambda: service.sharing.reachable)
    await service.client.delete([key])
    assert engine.values == {}
    assert await kind(service, "S") is HitKind.MISS


async def test_while_it_is_away_no_deletion_claims_to_be_complete(serve: Any, engine: Dictionary) -> None:
    a, b = await serve(), await serve()
    key = await share(a, "S", b"data")
    engine.away = True
    assert await kind(b, "S") is HitKind.MISS
    with pytest.raises(Unavailable, match="remote tier"):
        await b.client.delete([key])
    assert await b.client.delete([key], here=True) == 0
    engine.away = False


async def test_at_its_end_a_service_writes_back_all(serve: Any, engine: Dictionary) -> None:
    service = await serve()
    for n in range(20):
        await service.put([f"{n}"], payload(n, 300_000))
    await service.sharing.write_backs.flush(30)
    assert len(engine.blocks) == 20
    engine.away = True
    await service.put(["more"], b"data")
    await service.sharing.write_backs.flush(0.05)
    engine.away = False


async def test_blobs_are_found_by_all(serve: Any, engine: Dictionary) -> None:
    one, other = await serve(), await serve()
    keys = [b"%d" % n for n in range(5)]
    data = [payload(n, 1000 + n) for n in range(5)]
    here, there = (Blobs(service.client, layout="a") for service in (one, other))
    await here.store(keys, [*map(memoryview, data)])
    await shared(one)
    assert await there.prefix([*keys, b"?"]) == 5
    into = [memoryview(bytearray(len(each))) for each in data]
    assert await there.retrieve(keys, into) == [True] * 5
    assert into == data
    engine.away = True
    assert await there.touch([*keys, b"?"]) == [True] * 5 + [False]
    assert not other.sharing.reachable


async def test_blobs_are_copied_several_at_a_time(serve: Any, engine: Dictionary, monkeypatch: Any) -> None:
    """Also more than are copied when they are found: each read waits for three others."""
    one, other = await serve(), await serve()
    keys, together, get = [b"%d" % n for n in range(8)], threading.Barrier(4), engine.get
    await Blobs(one.client, layout="a").store(keys, [memoryview(b"data")] * 8)
    await shared(one)

    def read(names: Sequence[str]) -> list[bytes | None]:
        if "{" not in names[0]:
            together.wait(5)
        return get(names)

    monkeypatch.setattr(engine, "get", read)
    into = [memoryview(bytearray(4)) for _ in keys]
    assert await Blobs(other.client, layout="a").retrieve(keys, into) == [True] * 8


async def test_a_blob_is_deleted_that_another_service_has_shared(serve: Any, engine: Dictionary) -> None:
    one, other = await serve(), await serve()
    here, there = (Blobs(service.client, layout="a") for service in (one, other))
    await here.store([b"1", b"2"], [memoryview(b"data")] * 2)
    await shared(one)
    assert await there.delete([b"1", b"?"]) == 1
    assert await there.touch([b"1", b"2"]) == [False, True]
    assert len(engine.blocks) == 1
