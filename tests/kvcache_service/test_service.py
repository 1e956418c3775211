"""The RPCs over a real channel: what each of them does."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from fusionkv.kvcache_service.client import Entry, HitKind
from fusionkv.kvcache_service.store import reading
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.kvcache.v1 import kvcache_pb2_grpc
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from tests.kvcache_service import tools

MIB = 1 << 20


async def test_put_lookup_fetch(start: Any, names: dict[str, bytes]) -> None:
    service = await start()
    s, a = names["S"], names["A"]
    data = tools.payload("a", 2 * MIB + 12345)
    key, stored = await service.put([s, a], data, tokens=11, base=70_000)
    assert stored
    found = await service.find(s, a)
    assert [hit.kind for hit in found.hits] == [HitKind.MISS, HitKind.EXACT]
    assert found.hits[0].entry is None
    checksum = checksum_of(data)
    assert found.hits[1].entry == Entry(key, len(data), 11, 70_000, checksum, "memory", b"")
    assert found.lease != 0
    assert await service.fetch(found.hits[1].entry) == data
    await service.client.release(found.lease)
    await service.client.release(found.lease)
    await service.client.release(12345)
    assert len(service.store.leases) == 0


async def test_hits_by_kind_in_one_prompt(start: Any, names: dict[str, bytes]) -> None:
    service = await start()
    s, a, b, c, v, w = (names[n] for n in "SABCvw")
    data = {name: tools.payload(name, 5000) for name in ("S", "SA", "SAB", "SB", "SBv", "SC")}
    for name, path, variant in [
        ("S", [s], b""), ("SA", [s, a], b""), ("SAB", [s, a, b], b""), ("SB", [s, b], b""), ("SBv", [s, b], v),
    ]:  # fmt: skip
        assert (await service.put(path, data[name], variant=variant))[1]
    found = await service.find(s, a, b, c, (b, [w, v]), b, a)
    kinds = [hit.kind.value for hit in found.hits]
    assert kinds == ["exact", "exact", "exact", "miss", "alternative", "alternative", "alternative"]
    assert found.hits[4].entry.variant == v
    expected = ["S", "SA", "SAB", None, "SBv", None, "SA"]
    for hit, name in zip(found.hits, expected, strict=True):
        if name:
            assert await service.fetch(hit.entry) == data[name]
    stats = await service.client.stats()
    assert (stats.hits_exact, stats.hits_alternative, stats.misses) == (3, 3, 1)
    assert stats.active_leases == 1
    assert (stats.puts, stats.puts_existing, stats.bytes_put) == (5, 0, 25_000)
    assert stats.bytes_fetched == 5 * 5000
    assert {t.tier: t.entries for t in stats.tiers} == {pb.TIER_MEMORY: 5, pb.TIER_DISK: 5}


async def test_an_entry_of_another_namespace_is_not_found(start: Any, names: dict[str, bytes]) -> None:
    service = await start()
    await service.put([names["S"]], b"x", namespace=tools.digest("another tenant"))
    found = await service.find(names["S"])
    assert found.hits[0].kind is HitKind.MISS
    assert found.lease == 0


async def test_put_of_what_exists_answers_without_the_bytes(start: Any, names: dict[str, bytes]) -> None:
    service = await start()
    key, stored = await service.put([names["S"]], b"first")
    assert stored
    assert await service.put([names["S"]], b"other bytes") == (key, False)
    assert await service.fetch((await service.find(names["S"])).hits[0].entry) == b"first"
    assert (await service.client.stats()).puts_existing == 1


async def test_delete_by_key_and_namespace(start: Any, names: dict[str, bytes]) -> None:
    service = await start()
    other = tools.digest("another tenant")
    key, _ = await service.put([names["S"]], b"x" * 5000)
    await service.put([names["S"], names["A"]], b"y" * 5000)
    await service.put([names["S"]], b"z", namespace=other)
    leased = await service.find(names["S"])
    assert await service.client.delete([key, key, b"?" * 32]) == 1
    assert (await service.find(names["S"])).hits[0].kind is HitKind.MISS
    with pytest.raises(errors.NotFound):
        await service.fetch(leased.hits[0].entry)
    disk = service.store.residents.home
    assert disk.used_bytes == 8192 + 8192 + 4096, "the leased entry's bytes stay until its lease ends"
    assert (await service.put([names["S"]], b"new"))[1], "its name is free at once"
    await service.client.release(leased.lease)
    assert disk.used_bytes == 4096 + 8192 + 4096
    assert await service.client.delete(namespace=other) == 1
    assert await service.client.delete(namespace=tools.digest("namespace")) == 2
    assert disk.used_bytes == 0


async def test_leases_expire_and_long_ones_are_cut(start: Any, names: dict[str, bytes]) -> None:
    service = await start(max_lease_ms=10_000, lease_ms=2_000)
    await service.put([names["S"]], b"x")
    await service.find(names["S"])
    assert len(service.store.leases) == 1
    service.clock.now += 1.9
    assert (await service.client.stats()).active_leases == 1
    service.clock.now += 0.2
    assert (await service.client.stats()).active_leases == 0
    await service.find(names["S"], lease_ms=1_000_000)
    service.clock.now += 9.9
    assert (await service.client.stats()).active_leases == 1
    service.clock.now += 0.2
    assert (await service.client.stats()).active_leases == 0


async def test_the_coldest_goes_first(start: Any, names: dict[str, bytes]) -> None:
    service = await start(memory=1 * MIB, disk=3 * MIB, half_life_seconds=100.0)
    s = names["S"]
    a, b, c, d, e = (tools.digest(name) for name in "abcde")
    for chunk in (a, b, c):
        await service.put([s, chunk], tools.payload(chunk, MIB))
    for _ in range(4):
        await service.client.release((await service.find(s, a)).lease)
    service.clock.now += 100
    # a weighs 5 / 2, b and c 1 / 2 now; c gets one more.
    await service.client.release((await service.find(s, c)).lease)
    await service.put([s, d], tools.payload(d, MIB))
    found = [hit.kind.value for hit in (await service.find(s, a, lease_ms=1)).hits[1:]]
    assert found == ["exact"]
    present = {r.record.chunk for r in service.store.residents}
    assert present == {a, c, d}
    service.clock.now += 1
    await service.put([s, e], tools.payload(e, MIB))
    assert {r.record.chunk for r in service.store.residents} == {a, c, e}


async def test_memory_holds_the_hottest(start: Any, names: dict[str, bytes]) -> None:
    service = await start(memory=2 * MIB, disk=16 * MIB)
    s = names["S"]
    a, b, c = (tools.digest(name) for name in "abc")

    for chunk in (a, b):
        await service.put([s, chunk], tools.payload(chunk, MIB))
    for chunk in (a, b):
        await service.find(s, chunk)
    await service.put([s, c], tools.payload(c, MIB))
    in_memory = {r.record.chunk for r in service.store.residents if "memory" in r.places}
    assert in_memory == {a, b}, "a new entry drops nothing that is hotter"
    found = await service.find(s, c)
    assert found.hits[1].entry.tier == "disk"
    assert await service.fetch(found.hits[1].entry) == tools.payload(c, MIB)
    assert service.store.counters.get("promotions", "memory") == 0, "a and b are as hot, and leased"
    service.clock.now += 100
    found = await service.find(s, c)
    assert await service.fetch(found.hits[1].entry) == tools.payload(c, MIB)
    counters = service.store.counters
    assert (counters.get("promotions", "memory"), counters.get("demotions", "memory")) == (1, 1)
    found = await service.find(s, c)
    assert found.hits[1].entry.tier == "memory"
    assert await service.fetch(found.hits[1].entry) == tools.payload(c, MIB)
    stats = {t.tier: t for t in (await service.client.stats()).tiers}
    assert (stats[pb.TIER_MEMORY].entries, stats[pb.TIER_MEMORY].promotions, stats[pb.TIER_MEMORY].demotions) == (
        2, 1, 1,
    )  # fmt: skip
    assert stats[pb.TIER_DISK].entries == 3


async def test_prefetch_brings_up_what_there_is_room_for(start: Any, names: dict[str, bytes]) -> None:
    service = await start(memory=2 * MIB, disk=16 * MIB)
    keys = {}
    for name in "SABC":
        keys[name], _ = await service.put([names[name]], tools.payload(name, MIB))
        service.clock.now += 1000
    residents = service.store.residents
    assert {n for n, key in keys.items() if "memory" in residents.get(key).places} == {"B", "C"}
    async with grpc.aio.insecure_channel(service.address) as channel:
        prefetch = kvcache_pb2_grpc.KVCacheServiceStub(channel).Prefetch
        found = await prefetch(pb.PrefetchRequest(keys=[keys["S"], keys["C"], b"?" * 32]), timeout=20)
        assert [entry.HasField("arena_offset") for entry in found.entries] == [False, True, False], "S is the coldest"
        for _ in range(3):
            lease = (await service.find(names["A"])).lease
        asked = pb.PrefetchRequest(keys=[keys["A"]] * 3)
        found = await prefetch(asked, timeout=20)
        place = residents.get(keys["A"]).places["memory"]
        assert {entry.arena_offset for entry in found.entries} == {place.offset}
        assert found.arena == residents.tiers[0].arena
        assert service.store.counters.get("promotions", "memory") == 1
        assert bytes(residents.tiers[0].read(place, 0, MIB)) == tools.payload("A", MIB)
        await service.client.release(lease)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await prefetch(pb.PrefetchRequest(keys=[b"short"]), timeout=20)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await prefetch(pb.PrefetchRequest(keys=[b"k" * 32] * 257), timeout=20)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_prefetch_finds_damaged_is_deleted(
    start: Any, names: dict[str, bytes], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reading, "_faults", logs.RateLimitedLog(logging.getLogger("fusionkv"))
    )  # as if it were the first
    service = await start(memory=1 * MIB, disk=16 * MIB)
    key, _ = await service.put([names["S"]], tools.payload("S", 900_000))
    service.clock.now += 1000
    await service.put([names["A"]], tools.payload("A", 900_000))
    place = service.store.residents.get(key).places["disk"]
    service.store.residents.home.write(place, 5000, [memoryview(b"?" * 10)])
    await service.find(names["S"])
    async with grpc.aio.insecure_channel(service.address) as channel:
        prefetch = kvcache_pb2_grpc.KVCacheServiceStub(channel).Prefetch
        found = await prefetch(pb.PrefetchRequest(keys=[key]), timeout=20)
    assert not found.entries[0].HasField("arena_offset")
    assert service.store.residents.get(key) is None
    assert (await service.client.stats()).checksum_failures == 1
    assert f"entry {key.hex()} was damaged in the disk tier and is deleted: checksum mismatch" in caplog.text


async def test_without_a_disk_tier(start: Any, names: dict[str, bytes]) -> None:
    service = await start(memory=1 * MIB, disk=0)
    s = names["S"]
    for name in ("a", "b", "c"):
        assert (await service.put([s, tools.digest(name)], tools.payload(name, 400_000)))[1]
    found = await service.find(s, tools.digest("c"))
    assert await service.fetch(found.hits[1].entry) == tools.payload("c", 400_000)
    assert service.store.counters.get("evictions", "memory") == 1
    with pytest.raises(errors.ResourceExhausted):
        await service.put([s, tools.digest("d")], tools.payload("d", MIB))


async def test_stock_protobuf_clients_read_and_write_the_same_bytes(start: Any, names: dict[str, bytes]) -> None:
    service = await start()
    data = tools.payload("stock", 3 * MIB + 77)
    checksum = checksum_of(data)
    head = pb.PutHeader(
        namespace=tools.digest("namespace"),
        path=[names["S"], names["A"]],
        size_bytes=len(data),
        tokens=1,
        checksum=checksum,
    )

    def messages() -> Iterator[pb.PutRequest]:
        yield pb.PutRequest(header=head)
        for at in range(0, len(data), 700_001):
            yield pb.PutRequest(data=data[at : at + 700_001])

    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = kvcache_pb2_grpc.KVCacheServiceStub(channel)
        response = await stub.Put(messages(), timeout=20)
        assert response.outcome == pb.PutResponse.OUTCOME_STORED
        frames = [message.data async for message in stub.Fetch(pb.FetchRequest(key=response.key), timeout=20)]
        assert b"".join(frames) == data
        assert [len(frame) for frame in frames] == [MIB, MIB, MIB, 77]
        again = await stub.Put(messages(), timeout=20)
        assert again.outcome == pb.PutResponse.OUTCOME_EXISTS
    entry = (await service.find(names["S"], names["A"])).hits[1].entry
    assert await service.fetch(entry) == data


async def test_sixteen_clients_at_once(start: Any, names: dict[str, bytes]) -> None:
    service = await start(memory=2 * MIB, disk=64 * MIB)
    s = names["S"]
    sizes = [i * 70_001 + 1 for i in range(16)]
    await asyncio.gather(*(service.put([s, tools.digest(str(n))], tools.payload(n, n)) for n in sizes))

    async def check(n: int) -> None:
        for _ in range(3):
            found = await service.find(s, tools.digest(str(n)))
            assert await service.fetch(found.hits[1].entry) == tools.payload(n, n)

    await asyncio.gather(*(check(n) for n in sizes))
