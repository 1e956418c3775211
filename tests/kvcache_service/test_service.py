"""The RPCs over a real channel: what each of them does, and what OpenTelemetry is told."""

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fusionkv.kvcache_service import metrics
from fusionkv.kvcache_service.client import Entry, HitKind
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.store import contents, reading, store, upkeep
from fusionkv.kvcache_service.tiers.base import Recovered
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from tests.kvcache_service import tools
from tests.kvcache_service.tools import MIB, digest, payload
from tests.waiting import until


async def test_put_of_what_is_new_and_of_what_exists_lookup_fetch(service: Any) -> None:
    data = payload("a", 2 * MIB + 12345)
    assert (await service.find(*"SA")).lease == 0
    key, stored = await service.put("SA", data, tokens=11, base=70_000)
    assert stored
    assert await service.put("SA", b"other bytes") == (key, False)
    assert (await service.client.stats()).puts_existing == 1
    found = await service.find(*"SA")
    assert [hit.kind for hit in found.hits] == [HitKind.MISS, HitKind.EXACT]
    assert found.hits[0].entry is None
    assert found.hits[1].entry == Entry(key, len(data), 11, 70_000, checksum_of(data), "memory", b"")
    assert found.lease != 0
    assert await service.fetch(found.hits[1].entry) == data
    for lease in (found.lease, found.lease, 12345):
        await service.client.release(lease)
    assert len(service.store.leases) == 0


async def test_hits_by_kind_in_one_prompt(service: Any) -> None:
    v, w = map(digest, "vw")
    for path, variant in (("S", b""), ("SA", b""), ("SAB", b""), ("SB", b""), ("SB", v)):
        assert (await service.put(path, payload((path, variant), 5000), variant=variant))[1]
    found = await service.find(*"SABC", ("B", [w, v]), *"BA")
    kinds = [hit.kind.value for hit in found.hits]
    assert kinds == ["exact", "exact", "exact", "miss", "alternative", "alternative", "alternative"]
    assert found.hits[4].entry.variant == v
    expected = [("S", b""), ("SA", b""), ("SAB", b""), None, ("SB", v), None, ("SA", b"")]
    for hit, name in zip(found.hits, expected, strict=True):
        if name:
            assert await service.fetch(hit.entry) == payload(name, 5000)
    stats = await service.client.stats()
    assert (stats.hits_exact, stats.hits_alternative, stats.misses) == (3, 3, 1)
    assert stats.active_leases == 1
    assert (stats.puts, stats.puts_existing, stats.bytes_put) == (5, 0, 25_000)
    assert stats.bytes_fetched == 5 * 5000
    assert {t.tier: t.entries for t in stats.tiers} == {pb.TIER_MEMORY: 5, pb.TIER_DISK: 5}


async def test_delete_by_key_and_namespace(service: Any) -> None:
    other = digest("another tenant")
    key, _ = await service.put("S", b"x" * 5000)
    await service.put("SA", b"y" * 5000)
    await service.put("S", b"z", namespace=other)
    leased = await service.find("S")
    assert await service.client.delete([key, key, b"?" * 32]) == 1
    assert (await service.find("S")).hits[0].kind is HitKind.MISS
    with pytest.raises(errors.NotFound):
        await service.fetch(leased.hits[0].entry)
    disk = service.store.residents.home
    assert disk.used_bytes == 8192 + 8192 + 4096, "the leased entry's bytes stay until its lease ends"
    assert (await service.put("S", b"new"))[1], "its name is free at once"
    await service.client.release(leased.lease)
    assert disk.used_bytes == 4096 + 8192 + 4096
    assert await service.client.delete(namespace=other) == 1
    assert await service.client.delete(namespace=digest("namespace")) == 2
    assert disk.used_bytes == 0


async def test_leases_expire_and_long_ones_are_cut(start: Any) -> None:
    service = await start(max_lease_ms=10_000, lease_ms=2_000)
    await service.put("S", b"x")
    for more, seconds in (({}, 1.9), ({"lease_ms": 1_000_000}, 9.9)):
        await service.find("S", **more)
        assert len(service.store.leases) == 1
        for wait, left in ((seconds, 1), (0.2, 0)):
            service.clock.now += wait
            assert (await service.client.stats()).active_leases == left


async def test_the_longest_lease_fits_a_response(start: Any) -> None:
    """With a longer one, every Lookup was an internal error, and left a lease that nobody knew."""
    (most,) = (field.metadata["high"] for field in dataclasses.fields(Config) if field.name == "max_lease_ms")
    service = await start(lease_ms=most, max_lease_ms=most)
    await service.put("S", b"data")
    assert (await service.find("S")).lease


async def test_the_coldest_goes_first(start: Any) -> None:
    service = await start(memory=1 * MIB, disk=3 * MIB, half_life_seconds=100.0)
    a, b, c, d, e = (digest(name) for name in "abcde")
    for chunk in (a, b, c):
        await service.put(["S", chunk], payload(chunk, MIB))
    for _ in range(4):
        await service.client.release((await service.find("S", a)).lease)
    service.clock.now += 100
    # a weighs 5 / 2, b and c 1 / 2 now; c gets one more.
    await service.client.release((await service.find("S", c)).lease)
    await service.put(["S", d], payload(d, MIB))
    assert [hit.kind.value for hit in (await service.find("S", a, lease_ms=1)).hits[1:]] == ["exact"]
    assert service.chunks("disk") == {a, c, d}
    residents = service.store.residents
    hottest = [[residents.entries.get(key).record.chunk for key in residents.hottest(count)] for count in (0, 2, 9)]
    assert hottest == [[], [a, c], [a, c, d]]
    service.clock.now += 1
    await service.put(["S", e], payload(e, MIB))
    assert service.chunks("disk") == {a, c, e}


@pytest.mark.parametrize("disk", [0, 2 * MIB])
async def test_among_many_small_ones_the_coldest_range_goes(start: Any, monkeypatch: Any, disk: int) -> None:
    monkeypatch.setattr(contents, "_MAX_VICTIMS", 4)
    service, count = await start(memory=1 * MIB, disk=disk), (disk or MIB) // 16_384
    for n in range(count):
        await service.put(["S", f"{n}"], payload(n, 16_000))
    # All but two ranges, apart from each other, become hotter; one of these is leased in its middle.
    service.clock.now += 1000
    for n in range(count):
        if not (8 <= n < 24 or 32 <= n < 48):
            await service.find("S", f"{n}", lease_ms=1)
    leased = await service.entry("S", "40", lease_ms=600_000)
    service.clock.now += 1
    assert (await service.put("L", payload("large", 16 * 16_384)))[1]
    left = [n for n in range(count) if (await service.find("S", f"{n}", lease_ms=1)).hits[1].entry is not None]
    assert left == [n for n in range(count) if not 8 <= n < 24]
    assert await service.fetch(leased) == payload(40, 16_000)
    assert await service.get("L") == payload("large", 16 * 16_384)
    assert service.count("evictions", "disk" if disk else "memory") == 16


async def test_memory_holds_the_hottest(start: Any) -> None:
    service = await start(memory=2 * MIB, disk=16 * MIB)
    for chunk in "ab":
        await service.put(["S", chunk], payload(chunk, MIB))
    for chunk in "ab":
        await service.find("S", chunk)
    await service.put("Sc", payload("c", MIB))
    assert service.chunks("memory") == {digest("a"), digest("b")}, "a new entry drops nothing that is hotter"
    entry = await service.entry(*"Sc")
    assert entry.tier == "disk"
    assert await service.fetch(entry) == payload("c", MIB)
    assert service.count("promotions") == 0, "a and b are as hot, and leased"
    service.clock.now += 100
    assert await service.get(*"Sc") == payload("c", MIB)
    assert (service.count("promotions"), service.count("demotions")) == (1, 1)
    entry = await service.entry(*"Sc")
    assert entry.tier == "memory"
    assert await service.fetch(entry) == payload("c", MIB)
    tiers = {t.tier: t for t in (await service.client.stats()).tiers}
    memory = tiers[pb.TIER_MEMORY]
    assert (memory.entries, memory.promotions, memory.demotions, tiers[pb.TIER_DISK].entries) == (2, 1, 1, 3)


async def test_prefetch_brings_up_what_there_is_room_for(start: Any) -> None:
    service, keys = await start(memory=2 * MIB, disk=16 * MIB), {}
    for name in "SABC":
        keys[name], _ = await service.put(name, payload(name, MIB))
        service.clock.now += 1000
    entries = service.store.entries
    assert {n for n, key in keys.items() if "memory" in entries.get(key).places} == {"B", "C"}
    found = await service.stub.Prefetch(pb.PrefetchRequest(keys=[keys["S"], keys["C"], b"?" * 32]), timeout=20)
    assert [entry.HasField("arena_offset") for entry in found.entries] == [False, True, False], "S is the coldest"
    for _ in range(3):
        lease = (await service.find("A")).lease
    found = await service.stub.Prefetch(pb.PrefetchRequest(keys=[keys["A"]] * 3), timeout=20)
    place = entries.get(keys["A"]).places["memory"]
    assert {entry.arena_offset for entry in found.entries} == {place.offset}
    assert found.arena == service.store.residents.tiers[0].arena
    assert service.count("promotions") == 1
    assert bytes(service.store.residents.tiers[0].read(place, 0, MIB)) == payload("A", MIB)
    await service.client.release(lease)


async def test_what_prefetch_finds_damaged_is_deleted(start: Any, caplog: Any, monkeypatch: Any) -> None:
    # As if it were the first.
    monkeypatch.setattr(store, "_faults", logs.RateLimitedLog(logging.getLogger("fusionkv")))
    service = await start(memory=1 * MIB, disk=16 * MIB)
    key, _ = await service.put("S", payload("S", 900_000))
    service.clock.now += 1000
    await service.put("A", payload("A", 900_000))
    place = service.store.entries.get(key).places["disk"]
    service.store.residents.home.write(place, 5000, [memoryview(b"?" * 10)])
    await service.find("S")
    found = await service.stub.Prefetch(pb.PrefetchRequest(keys=[key]), timeout=20)
    assert not found.entries[0].HasField("arena_offset")
    assert service.store.entries.get(key) is None
    assert (await service.client.stats()).checksum_failures == 1
    assert f"entry {key.hex()} was damaged in the disk tier and is deleted: checksum mismatch" in caplog.text


async def test_without_a_disk_tier(start: Any) -> None:
    service = await start(memory=1 * MIB, disk=0)
    for name in "abc":
        assert (await service.put(["S", name], payload(name, 400_000)))[1]
    assert await service.get(*"Sc") == payload("c", 400_000)
    assert service.count("evictions") == 1
    with pytest.raises(errors.ResourceExhausted):
        await service.put("Sd", payload("d", MIB))


async def test_while_its_index_is_loaded_a_service_finds_what_there_is(tmp_path: Path, monkeypatch: Any) -> None:
    names, go, recover = "ABCDEF", threading.Event(), DiskTier.recover

    def held(self: DiskTier) -> Iterator[Recovered]:
        found = recover(self)
        yield from islice(found, 3)
        go.wait(20)
        yield from found

    async def found() -> int:
        return sum([await service.entry(name) is not None for name in names])

    async with tools.serving(tmp_path) as service:
        keys = [(await service.put(name, payload(name, 5000)))[0] for name in names]
    monkeypatch.setattr(DiskTier, "recover", held)
    monkeypatch.setattr(store, "_RECOVERY_BATCH", 1)
    async with tools.serving(tmp_path, opened=False) as service:
        await until(lambda: len(service.store.entries) == 3)
        assert await found() == 3
        with monkeypatch.context() as soon:
            soon.setattr(store, "_OPEN_SECONDS", 0.01)
            for call in (service.put("new", b"data"), service.client.delete(keys)):
                with pytest.raises(errors.Unavailable, match="the index is being loaded"):
                    await call
        waiting = asyncio.gather(service.put("new", b"data"), service.client.delete(namespace=tools.NAMESPACE))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        go.set()
        (_, stored), deleted = await waiting
        assert (stored, deleted >= 6) == (True, True), "the Put may come first"
        assert await found() == 0


async def put_in_pieces(service: Any, data: bytes, size: int) -> Any:
    """With gRPC's own client, in messages of so many bytes."""
    names = {"namespace": digest("namespace"), "path": [digest("S"), digest("A")]}
    head = pb.PutHeader(**names, size_bytes=len(data), tokens=1, checksum=checksum_of(data))
    pieces = [pb.PutRequest(data=data[at : at + size]) for at in range(0, len(data), size)]
    return await service.stub.Put(iter([pb.PutRequest(header=head), *pieces]), timeout=20)


async def test_stock_protobuf_clients_read_and_write_the_same_bytes(service: Any) -> None:
    data = payload("stock", 3 * MIB + 77)
    response = await put_in_pieces(service, data, 700_001)
    assert response.outcome == pb.PutResponse.OUTCOME_STORED
    frames = [message.data async for message in service.stub.Fetch(pb.FetchRequest(key=response.key), timeout=20)]
    assert b"".join(frames) == data
    assert [len(frame) for frame in frames] == [MIB, MIB, MIB, 77]
    assert (await put_in_pieces(service, data, 700_001)).outcome == pb.PutResponse.OUTCOME_EXISTS
    assert await service.get(*"SA") == data


async def test_an_entry_may_come_in_small_messages(service: Any) -> None:
    """The system writes at most 1024 pieces at once."""
    data = payload("small", 1025)
    assert (await put_in_pieces(service, data, 1)).outcome == pb.PutResponse.OUTCOME_STORED
    assert await service.get(*"SA") == data


def points(reader: InMemoryMetricReader) -> dict[str, dict[str, int]]:
    """metric -> its attribute -> value."""
    (resource,) = reader.get_metrics_data().resource_metrics
    return {
        metric.name: {next(iter(point.attributes.values()), ""): point.value for point in metric.data.data_points}
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


async def test_metrics_and_spans(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(metrics.metrics, "get_meter", meters.get_meter)
    monkeypatch.setattr(reading, "tracer", tracers.get_tracer("test"))
    service = await start(memory=1 * MIB, disk=2 * MIB)
    metrics.observe_tiers(
        lambda: [(tier.name, tier.used_bytes, tier.capacity_bytes) for tier in service.store.residents.tiers]
    )
    for name in "abb":
        await service.put(["S", name], tools.payload(name, MIB))
        service.clock.now += 1
    found = await service.find(*"Sa")
    await service.fetch(found.hits[1].entry)
    await service.client.release(found.lease)
    with pytest.raises(errors.ResourceExhausted, match="larger than the disk tier of 2097152: raise disk_bytes"):
        await service.put("Sc", tools.payload("c", 2 * MIB + 1))
    await service.put("Sc", tools.payload("c", MIB))
    expected: dict[str, dict[str, int]] = {
        "lookups": {"exact": 1, "miss": 1},
        "puts": {"stored": 3, "exists": 1, "refused": 1},
        "stored": {"": 3 * MIB},
        "fetched": {"memory": MIB},
        "promotions": {"memory": 1},
        "demotions": {"memory": 2},
        "evictions": {"disk": 1},
        # There from the start, so that an alert sees the first one.
        "checksum.failures": {"memory": 0, "disk": 0, "remote": 0, "network": 0},
        "tier.used": {"memory": MIB, "disk": 2 * MIB},
        "tier.capacity": {"memory": MIB, "disk": 2 * MIB},
    }
    assert points(reader) == {f"fusionkv.kvcache.{name}": found for name, found in expected.items()}
    (span,) = exporter.get_finished_spans()
    assert span.name == "kvcache.read"
    assert dict(span.attributes or {}) == {"fusionkv.tier": "disk", "fusionkv.bytes": MIB, "fusionkv.promoted": True}


async def test_calls_while_their_client_closes_and_afterwards(service: Any) -> None:
    client = service.client
    calls = [call for number in range(8) for call in (client.stats(), service.put(f"P{number}", bytes(9)))]
    closing = asyncio.gather(*calls, client.close(), *(client.stats() for _ in range(8)), return_exceptions=True)
    async with asyncio.timeout(60):
        while not closing.done():
            with contextlib.suppress(errors.Unavailable):
                await client.stats()
            await asyncio.sleep(0)
    ended = [*(await closing), *await asyncio.gather(client.stats(), return_exceptions=True)]
    assert {type(result) for result in ended} <= {pb.StatsResponse, tuple, errors.Unavailable, type(None)}
    assert "the client is closed" in str(ended[-1])


async def test_the_sweep_goes_on_after_an_unexpected_error(start: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(upkeep, "_SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "_SAVE_HEAT_SECONDS", 0.0)
    service = await start()
    sweep = asyncio.create_task(upkeep.sweep(service.store))
    with monkeypatch.context() as broken:
        broken.setattr(service.store.residents.home, "save_heat", lambda heats: heats.nothing)
        await service.put("S", b"data")
        await service.find("S")
        await until(lambda: "the sweep failed" in caplog.text or sweep.done())
    service.clock.now += 100
    await until(lambda: not len(service.store.leases) or sweep.done())
    assert not sweep.done()
    sweep.cancel()
