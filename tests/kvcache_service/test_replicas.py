"""One replica of a chunk serves every path: which are kept and which replaced, against a model; who goes first."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.bench.cache.workload import SYSTEM, Workload
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.index.heat import FrequencySketch
from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.store.upkeep import evict_to_watermark
from fusionkv.kvcache_service.store.writing import reserve
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from tests.examples import examples
from tests.kvcache_service.tools import NAMESPACE, Clock, path, record, stored

BLOCK = 4096


class Replicas:
    """A store in memory, named by strings: the system prompt S, then chunks."""

    def __init__(self, blocks: int = 512, **more: Any) -> None:
        self.clock = Clock()
        self.loop = asyncio.new_event_loop()
        self.store = Store(Config(**more), [MemoryTier(blocks * BLOCK)], clock=self.clock, wall=self.clock)

    def close(self) -> None:
        self.store.check_integrity(idle=True)
        self.loop.run_until_complete(self.store.close())
        self.loop.close()

    def put(self, digests: list[bytes], offered: bool = False) -> bool:
        async def send() -> bool:
            writer = reserve(self.store, record(digests, digests[-1], offered=offered))
            if writer is None:
                return False
            await writer.write(memoryview(digests[-1]))
            return await writer.commit()

        return self.loop.run_until_complete(send())

    def find(self, digests: list[bytes]) -> list[tuple[HitKind, EntryRecord | None]]:
        found, lease = self.store.lookup(NAMESPACE, digests, [()] * len(digests), 30.0)
        self.store.leases.release(lease)
        return [(kind, entry and entry.record) for kind, entry in found]


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    made = Replicas()
    yield made
    made.close()


def test_a_replica_takes_over_the_heat_of_those_that_it_replaces(replicas: Replicas) -> None:
    replicas.put(path("SABC"), offered=True)
    for _ in range(50):
        replicas.find(path("SXC"))
    before = next(iter(replicas.store.entries)).heat
    replicas.put(path("SC"), offered=True)
    assert next(iter(replicas.store.entries)).heat == before


def test_a_path_that_is_asked_for_again_gets_and_keeps_its_own(replicas: Replicas) -> None:
    replicas.put(path("SC"), offered=True)
    replicas.find(path("SABC"))
    assert not replicas.put(path("SABC"), offered=True), "asked for once, by the request that computed it"
    replicas.find(path("SABC"))
    assert replicas.put(path("SABC"), offered=True)
    assert replicas.find(path("SABC"))[-1][0] is HitKind.EXACT
    kind, found = replicas.find(path("SDC"))[-1]
    assert (kind, found.depth) == (HitKind.ALTERNATIVE, 2), "other paths go on with the one encoded alone"
    assert replicas.put(path("SDEC"))
    assert stored(replicas.store) == {"SC", "SABC", "SDEC"}


def test_a_leased_replica_is_replaced_and_its_bytes_stay_until_the_lease_ends(replicas: Replicas) -> None:
    replicas.put(path("SABC"), offered=True)
    found, lease = replicas.store.lookup(NAMESPACE, path("SC"), [(), ()], 30.0)
    replicas.put(path("SC"), offered=True)
    old = found[1][1]
    assert not old.visible
    assert replicas.store.residents.home.used_bytes == 2 * BLOCK
    replicas.store.leases.release(lease)
    assert replicas.store.residents.home.used_bytes == BLOCK


def test_of_two_offered_at_the_same_time_one_stays(replicas: Replicas) -> None:
    async def both() -> list[bool]:
        writers = []
        for names in ("SABC", "SXYC"):
            writer = reserve(replicas.store, record(names, path(names)[-1], offered=True))
            await writer.write(memoryview(path(names)[-1]))
            writers.append(writer)
        return await asyncio.gather(*(writer.commit() for writer in writers))

    assert replicas.loop.run_until_complete(both()) == [True, False]
    assert stored(replicas.store) == {"SABC"}


# So few that many come again.
paths = st.lists(st.sampled_from("AB"), min_size=1, max_size=3).map(lambda tail: "S" + "".join(tail))
steps = st.lists(st.tuples(st.sampled_from(["put", "offer", "offer", "find", "find"]), paths), max_size=40)


@settings(max_examples=examples(150), deadline=None)
@given(steps)
def test_replicas_agree_with_a_model(taken: list[tuple[str, str]]) -> None:
    replicas = Replicas()
    entries: dict[str, bool] = {}  # path -> offered
    asked: Counter[str] = Counter()
    for step, names in taken:
        same = [other for other in entries if other[-1] == names[-1]]
        if step == "find":
            found = replicas.find(path(names))
            for at in range(2, len(names) + 1):
                prefix = names[:at]
                known = [other for other in entries if other[-1] == prefix[-1]]
                asked[prefix] += at > 2
                kind = HitKind.EXACT if prefix in entries else HitKind.ALTERNATIVE if known else HitKind.MISS
                assert found[at - 1][0] is kind, "a chunk that has a replica is found by every path"
            continue
        offered = step == "offer"
        wanted = all(len(names) < len(other) for other in same) or asked[names] > 1
        stores = names not in entries and (wanted or not offered)
        isolated = {other for other in entries if len(other) == 2}
        assert replicas.put(path(names), offered) == stores
        if stores:
            for other in same:
                if entries[other] and len(other) > len(names) and asked[other] <= 1:
                    del entries[other]
            entries[names] = offered
        assert stored(replicas.store) == set(entries)
        assert isolated <= set(entries), "an entry encoded alone went"
    replicas.close()


def test_demand_is_bounded_and_remembers_the_last() -> None:
    demand = FrequencySketch(limit=100)
    for i in range(1000):
        demand.add(i.to_bytes(8))
        demand.add(b"often..." + b"x" * i)
        assert len(demand._young) + len(demand._old) <= 200
    assert demand.count(b"often...") == 1000
    assert demand.count((999).to_bytes(8)) == 1
    assert demand.count((700).to_bytes(8)) == 0


def test_watermarks_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"low_watermark \(0.9\) exceeds high_watermark \(0.5\)"):
        Config(low_watermark=0.9, high_watermark=0.5)
    assert Config(low_watermark=0.5, high_watermark=0.5)


def test_between_the_watermarks_the_coldest_make_room_ahead_of_need() -> None:
    replicas = Replicas(blocks=100, high_watermark=0.9, low_watermark=0.5)
    for i in range(90):
        replicas.clock.now += 600
        replicas.put([SYSTEM, bytes([i]) * 32])
    replicas.loop.run_until_complete(evict_to_watermark(replicas.store))
    home = replicas.store.residents.home
    assert home.used_bytes == 90 * BLOCK, "not over the high watermark"
    replicas.put([SYSTEM, bytes([90]) * 32])
    found, lease = replicas.store.lookup(NAMESPACE, [SYSTEM, bytes([0]) * 32], [(), ()], 30.0)
    held = found[1][1]
    replicas.find([SYSTEM, bytes([1]) * 32])
    replicas.loop.run_until_complete(evict_to_watermark(replicas.store))
    left = {entry.record.chunk[0] for entry in replicas.store.entries}
    assert left == {0, 1, *range(43, 91)}, "the held one, the one asked for, and the last"
    assert held.visible
    assert replicas.store.counters.get("evictions", "memory") == 41
    replicas.store.leases.release(lease)
    replicas.close()


@pytest.mark.long
@pytest.mark.slow
def test_under_pressure_uploads_of_one_query_go_first() -> None:
    """60% of the chunks from a knowledge base, 30% shared, 10% unique; room for little more than the former two."""
    workload = Workload(queries=1500, chunks=6, knowledge=60, shared=60, zipf=0.5, seed=3)
    replicas = Replicas(blocks=1 + 60 + 60 + 40)
    knowledge, went = set(workload.corpus()), Counter[str]()
    asked = Counter(chunk for query in workload for chunk in query[1:])
    lasting = knowledge | {chunk for chunk, n in asked.items() if n > 1}
    replicas.put([SYSTEM])
    for chunk in workload.corpus():
        replicas.put([SYSTEM, chunk])
    for query in workload:
        replicas.clock.now += 5
        before = {entry.record.chunk for entry in replicas.store.entries}
        for chunk, (kind, _) in zip(query, replicas.find(query), strict=True):
            if kind is HitKind.MISS:
                replicas.put([SYSTEM, chunk], offered=True)
        gone = before - {entry.record.chunk for entry in replicas.store.entries}
        went.update("lasting" if chunk in lasting else "unique" for chunk in gone)
    present = {entry.record.chunk for entry in replicas.store.entries}
    assert went["unique"] > 700
    assert went["lasting"] < 0.02 * went["unique"]
    assert len(lasting - present) <= 2
    replicas.close()
