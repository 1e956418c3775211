"""Blobs of other engines: found, read and stored in batches, apart by tenant and layout, and never wrong."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service import blobs as module
from fusionkv.kvcache_service import servicer
from fusionkv.kvcache_service.blobs import Blobs, BlobThread
from fusionkv.kvcache_service.data_plane import connection
from fusionkv.kvcache_service.transport import Transport
from fusionkv.protos.runtime import errors
from tests.kvcache_service.tools import MIB, Service, hanging, nearby, payload


def named(count: int, size: int = 1000) -> dict[bytes, bytes]:
    """Blobs by key, of different bytes."""
    return {b"key %d" % n: payload(f"blob {n}", size + n) for n in range(count)}


async def stored(blobs: Blobs, given: dict[bytes, bytes]) -> list[bool]:
    return await blobs.store([*given], [*map(memoryview, given.values())])


def buffers(given: dict[bytes, bytes]) -> list[memoryview]:
    return [memoryview(bytearray(len(data))) for data in given.values()]


@pytest.fixture
async def blobs(service: Service) -> Blobs:
    return Blobs(service.client, layout="a")


async def test_what_is_stored_is_found_and_read(service: Service, blobs: Blobs) -> None:
    given = named(100)
    assert await stored(blobs, given) == [True] * 100
    assert await stored(blobs, given) == [False] * 100
    into = buffers(given)
    assert await blobs.retrieve([*given], into) == [True] * 100
    assert into == [*given.values()]
    assert len(service.store.leases) == 0
    assert await blobs.delete([*given][:30]) == 30
    assert await blobs.touch([*given]) == [False] * 30 + [True] * 70


async def test_what_is_in_memory_comes_in_the_call_that_finds_it(start: Any, monkeypatch: Any) -> None:
    service = await start(memory=2 * MIB, disk=16 * MIB)
    blobs, given, calls, on_data_plane = (
        Blobs(service.client, layout="a"),
        named(5, MIB // 2),
        [],
        Transport._on_data_plane,
    )

    def count(self: Transport, request: Any, *args: Any) -> Any:
        calls.append(request.WhichOneof("call"))
        return on_data_plane(self, request, *args)

    await stored(blobs, given)
    monkeypatch.setattr(Transport, "_on_data_plane", count)
    monkeypatch.setattr(connection, "_WAIT_SECONDS", 30)
    names, into = [*given], buffers(given)
    hot = [
        n for n, entry in enumerate((await blobs.pin(names, lease_ms=1)).entries) if entry and entry.tier == "memory"
    ]
    assert 0 < len(hot) < 5
    service.clock.now += 1
    calls.clear()
    assert await blobs.retrieve([*(names[n] for n in hot), b"?"], [*(into[n] for n in hot), into[0]]) == [
        *([True] * len(hot)),
        False,
    ]
    assert calls == ["find"]
    assert len(service.store.leases) == 0
    assert await blobs.retrieve(names, into) == [True] * 5
    assert calls == ["find", "find", "fetch_all", "release"], "others come from the disk"
    assert into == [*given.values()]
    assert len(service.store.leases) == 0
    for call in (blobs.retrieve, blobs.store):
        with pytest.raises(ValueError, match="5 keys and 4 buffers"):
            await call(names, into[1:])


async def test_many_small_ones_come_in_one_call(start: Any) -> None:
    """More than are received on the event loop, and each smaller than what is received at a time."""
    service = await start(memory=16 * MIB, disk=64 * MIB)
    blobs, given = Blobs(service.client, layout="a"), named(256, 12_000)
    assert await stored(blobs, given) == [True] * 256
    into = buffers(given)
    assert await blobs.retrieve([*given], into) == [True] * 256
    assert into == [*given.values()]


async def test_a_prefix_ends_at_the_first_gap(blobs: Blobs, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MAX_FOUND", 7)
    given = named(20)
    await stored(blobs, given)
    names = [*given]
    assert await blobs.prefix(names) == 20
    assert await blobs.prefix([]) == 0
    assert await blobs.prefix([b"?", *names]) == 0
    assert await blobs.prefix([*names[:9], b"?", *names[9:]]) == 9
    assert await blobs.prefix([*names, b"?"]) == 20


async def test_more_are_deleted_than_one_call_takes(blobs: Blobs, monkeypatch: Any) -> None:
    monkeypatch.setattr(servicer, "_MAX_KEYS", 7)
    monkeypatch.setattr(module, "MAX_FOUND", 7)
    given = named(20)
    await stored(blobs, given)
    assert await blobs.delete([*given, b"?"]) == 20
    assert await blobs.delete([]) == 0


async def test_others_do_not_find_it(service: Service, blobs: Blobs) -> None:
    given = named(3)
    await stored(blobs, given)
    for other in (Blobs(service.client, layout="b"), Blobs(service.client, layout="a", tenant="t")):
        assert await other.prefix([*given]) == 0
        assert await other.retrieve([*given], buffers(given)) == [False] * 3
        assert await other.delete([*given]) == 0
    assert await blobs.prefix([*given]) == 3


async def test_of_another_size_or_gone_is_a_miss(service: Service, blobs: Blobs) -> None:
    given = named(4)
    await stored(blobs, given)
    names, into = [*given], buffers(given)
    pin = await blobs.pin(names)
    await service.store.delete([pin.entries[2].key])  # type: ignore[union-attr]
    into[0] = into[0][:-1]
    assert await blobs.retrieve(names, into) == [False, True, False, True], (
        "deleted ones are not read, even if pinned"
    )
    await blobs.unpin(pin)
    assert [view == data for view, data in zip(into, given.values(), strict=True)] == [False, True, False, True]


async def test_what_is_pinned_is_not_evicted(start: Any) -> None:
    service = await start(memory=1 * MIB, disk=4 * MIB)
    blobs = Blobs(service.client, layout="a")
    await blobs.store([b"kept"], [memoryview(payload("kept", MIB))])
    pin = await blobs.pin([b"kept"])
    for n in range(8):
        await blobs.store([b"%d" % n], [memoryview(payload(n, MIB))])
    into = memoryview(bytearray(MIB))
    assert await blobs.retrieve([b"kept"], [into]) == [True]
    assert into == payload("kept", MIB)
    await blobs.unpin(pin)
    assert len(service.store.leases) == 0


async def test_damaged_blobs_are_misses_among_others(start: Any) -> None:
    service = await start(memory=1 * MIB, disk=32 * MIB)
    blobs, given = Blobs(service.client, layout="a"), named(6, MIB)
    await stored(blobs, given)
    names = [*given]
    pin = await blobs.pin(names, lease_ms=1)
    service.clock.now += 1
    entry = service.store.entries.get(pin.entries[3].key)
    service.store.residents.tiers[1].write(entry.places["disk"], 5, [memoryview(b"??")])
    into = buffers(given)
    expected = [True, True, True, False, True, True]
    assert await blobs.retrieve(names, into) == expected
    assert [view == data for view, data in zip(into, given.values(), strict=True)] == expected
    assert await blobs.touch(names) == expected


@pytest.mark.parametrize("limits", [(4096, 256, 64 << 20), (3, 2, 5000)], ids=["large", "small"])
@pytest.mark.parametrize("way", ["data plane", "grpc", "near"])
async def test_every_way_brings_the_same(
    service: Service, tmp_path: Path, monkeypatch: Any, way: str, limits: tuple[int, int, int]
) -> None:
    for name, limit in zip(("MAX_FOUND", "MAX_READ", "_READ_BYTES"), limits, strict=True):
        monkeypatch.setattr(module, name, limit)
    given = named(10)
    if way == "grpc":
        await service.plane.stop(5)
    async with nearby(service, tmp_path / "s") as near:
        blobs = Blobs((near if way == "near" else service).client, layout="a")
        assert await stored(blobs, given) == [True] * 10
        into = buffers(given)
        found = await blobs.retrieve([*given, b"?"], [*into, memoryview(bytearray(1))])
        assert found == [True] * 10 + [False]
        assert into == [*given.values()]


async def test_the_first_error_comes_after_all_others_are_stored(start: Any) -> None:
    service = await start(memory=8 * MIB, disk=32 * MIB, max_entry_bytes=MIB)
    blobs = Blobs(service.client, layout="a")
    data = [payload("a", 10), payload("b", 2 * MIB), payload("c", 10)]
    with pytest.raises(errors.ResourceExhausted, match="exceeds the limit"):
        await blobs.store([b"a", b"b", b"c"], [*map(memoryview, data)])
    assert await blobs.touch([b"a", b"b", b"c"]) == [True, False, True]


async def test_clear_deletes_those_of_a_tenant_and_layout(service: Service, blobs: Blobs) -> None:
    given = named(3)
    other = Blobs(service.client, layout="b")
    await stored(blobs, given)
    await stored(other, given)
    assert await blobs.clear() == 3
    assert await blobs.touch([*given]) == [False] * 3
    assert await other.touch([*given]) == [True] * 3


async def test_callers_without_an_event_loop(service: Service) -> None:
    given = named(5)

    def use() -> list[bytes]:
        blobs = BlobThread(service.client.address, layout="a", tenant="t")
        try:
            values = [*map(memoryview, given.values())]
            assert blobs.run(lambda b: b.store([*given], values)) == [True] * 5
            into = buffers(given)
            waiting = blobs.submit(lambda b: b.retrieve([*given], into))
            assert waiting.result() == [True] * 5
            return [bytes(view) for view in into]
        finally:
            blobs.close()

    assert await asyncio.to_thread(use) == [*given.values()]
    assert not [t for t in threading.enumerate() if t.name == "fusionkv-blobs"]


async def test_who_waits_while_it_is_closed_gets_an_error(service: Service, monkeypatch: Any) -> None:
    asked = hanging(service, "find", monkeypatch)
    blobs = BlobThread(service.client.address, layout="a")
    found = blobs.submit(lambda b: b.prefix([b"a"]))
    await asked.wait()
    await asyncio.to_thread(blobs.close)
    with pytest.raises(errors.Unavailable, match="the client is closed"):
        found.result(0)
    with pytest.raises(errors.Unavailable, match=r"the client of the cache service at .* is closed"):
        blobs.run(lambda b: b.prefix([b"a"]))


async def test_what_is_damaged_in_memory_is_deleted(service: Service, blobs: Blobs) -> None:
    given = named(3)
    await stored(blobs, given)
    pin = await blobs.pin([*given])
    entry = service.store.entries.get(pin.entries[1].key)  # type: ignore[union-attr]
    service.store.residents.tiers[0].write(entry.places["memory"], 5, [memoryview(b"??")])
    assert await service.client.fetch_all(pin.entries, buffers(given), timeout=5) == [True, False, True]
    assert await blobs.touch([*given]) == [True, False, True]
    with pytest.raises(errors.InvalidArgument, match="the buffer holds 1 bytes, the entry 1000"):
        await service.client.fetch_all(pin.entries[:1], [memoryview(bytearray(1))], timeout=5)
