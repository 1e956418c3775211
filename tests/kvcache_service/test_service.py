"""The RPCs over a real channel: what each does, and every status that the proto promises."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import xxhash

from fusionkv.kvcache_service.client import CacheClient, Entry, HitKind
from fusionkv.protos import errors
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.kvcache.v1 import kvcache_pb2_grpc

MIB = 1 << 20


@pytest.fixture
def names(tools: Any) -> dict[str, bytes]:
    return {name: tools.digest(name) for name in "SABCXYvw"}


async def test_put_lookup_fetch(start: Any, tools: Any, names: dict[str, bytes]) -> None:
    service = await start()
    s, a = names["S"], names["A"]
    data = tools.payload("a", 2 * MIB + 12345)
    key, stored = await service.put([s, a], data, tokens=11, base=70_000)
    assert stored
    found = await service.find(s, a)
    assert [hit.kind for hit in found.hits] == [HitKind.MISS, HitKind.EXACT]
    assert found.hits[0].entry is None
    checksum = xxhash.xxh3_128_digest(data)
    assert found.hits[1].entry == Entry(key, len(data), 11, 70_000, checksum, "memory", b"")
    assert found.lease != 0
    assert await service.fetch(found.hits[1].entry) == data
    await service.client.release(found.lease)
    await service.client.release(found.lease)
    await service.client.release(12345)
    assert len(service.store.leases) == 0


async def test_hits_by_kind_in_one_prompt(start: Any, tools: Any, names: dict[str, bytes]) -> None:
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


async def test_an_entry_of_another_namespace_is_not_found(start: Any, tools: Any, names: dict[str, bytes]) -> None:
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


async def test_the_answer_arrives_when_it_comes_before_the_bytes(
    start: Any, tools: Any, names: dict[str, bytes]
) -> None:
    """An early answer to a large Put: grpc.aio turns it into INTERNAL if it meets a write of the client's."""
    service = await start(memory=1 * MIB, disk=64 * MIB, max_entry_bytes=40 * MIB)
    data = tools.payload("large", 32 * MIB)
    assert (await service.put([names["S"]], data))[1]
    for _ in range(20):
        assert not (await service.put([names["S"]], data))[1]
    for _ in range(20):
        with pytest.raises(errors.ResourceExhausted):
            await service.put([names["S"], names["A"]], bytes(41 * MIB))
    assert service.store.counters.get("bytes.put") == len(data)
    disk = service.store.residents.home
    writable = disk._files[0]
    disk._files[0] = os.open(service.config.data_dir / "segments" / "000000.kv", os.O_RDONLY)
    for _ in range(10):
        with pytest.raises(errors.ResourceExhausted, match="can't write to the disk tier"):
            await service.put([names["S"], names["A"]], data[: 24 * MIB])
    os.close(disk._files[0])
    disk._files[0] = writable


async def test_delete_by_key_and_namespace(start: Any, tools: Any, names: dict[str, bytes]) -> None:
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


async def test_leased_entries_are_not_evicted_and_a_full_cache_refuses(
    start: Any, tools: Any, names: dict[str, bytes]
) -> None:
    service = await start(memory=1 * MIB, disk=4 * MIB)
    s = names["S"]
    chunks = [tools.digest(str(i)) for i in range(4)]
    for chunk in chunks:
        await service.put([s, chunk], tools.payload(chunk, MIB))
    leased = await service.find(s, chunks[0], lease_ms=20_000)
    await service.find(s, chunks[1], lease_ms=20_000)
    # Two of four are leased and hot: the two others go for two new ones, and then there is nothing more to give.
    for name in ("new 0", "new 1"):
        assert (await service.put([s, tools.digest(name)], tools.payload(name, MIB)))[1]
        await service.find(s, tools.digest(name), lease_ms=20_000)
    assert service.store.counters.get("evictions", "disk") == 2
    with pytest.raises(errors.ResourceExhausted, match="leased or in use; try again later, or raise disk_bytes"):
        await service.put([s, tools.digest("new 2")], tools.payload("new 2", MIB))
    assert (await service.client.stats()).puts_refused == 1
    assert await service.fetch(leased.hits[1].entry) == tools.payload(chunks[0], MIB)
    service.clock.now += 21
    assert (await service.put([s, tools.digest("new 2")], tools.payload("new 2", MIB)))[1]


async def test_the_coldest_goes_first(start: Any, tools: Any, names: dict[str, bytes]) -> None:
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


async def test_memory_holds_the_hottest(start: Any, tools: Any, names: dict[str, bytes]) -> None:
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


async def test_without_a_disk_tier(start: Any, tools: Any, names: dict[str, bytes]) -> None:
    service = await start(memory=1 * MIB, disk=0)
    s = names["S"]
    for name in ("a", "b", "c"):
        assert (await service.put([s, tools.digest(name)], tools.payload(name, 400_000)))[1]
    found = await service.find(s, tools.digest("c"))
    assert await service.fetch(found.hits[1].entry) == tools.payload("c", 400_000)
    assert service.store.counters.get("evictions", "memory") == 1
    with pytest.raises(errors.ResourceExhausted):
        await service.put([s, tools.digest("d")], tools.payload("d", MIB))


def header(names: dict[str, bytes], **changes: Any) -> pb.PutHeader:
    fields: dict[str, Any] = {
        "namespace": names["X"], "path": [names["S"], names["A"]], "size_bytes": 3, "tokens": 1, "base": 0,
        "checksum": xxhash.xxh3_128_digest(b"abc"),
    }  # fmt: skip
    return pb.PutHeader(**{**fields, **changes})


async def status_of(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code().name, raised.value.details()


def part(header: pb.PutHeader | None = None, data: bytes | None = None) -> pb.PutRequest:
    return pb.PutRequest(header=header) if header is not None else pb.PutRequest(data=data)


async def test_every_bad_put_has_its_status(start: Any, names: dict[str, bytes]) -> None:
    service = await start(max_path=4, max_entry_bytes=MIB)
    h = header(names)
    short, s = b"s" * 31, names["S"]
    cases: list[tuple[str, str, list[pb.PutRequest]]] = [
        ("INVALID_ARGUMENT", "first message must be the header", []),
        ("INVALID_ARGUMENT", "first message must be the header", [part(data=b"abc")]),
        ("INVALID_ARGUMENT", "first message must be the header", [pb.PutRequest()]),
        ("INVALID_ARGUMENT", "namespace has 31 bytes", [part(header(names, namespace=short))]),
        ("INVALID_ARGUMENT", "path has 31 bytes", [part(header(names, path=[s, short]))]),
        ("INVALID_ARGUMENT", "path of 0 elements", [part(header(names, path=[]))]),
        ("INVALID_ARGUMENT", "path of 5 elements; 1 to 4", [part(header(names, path=[s] * 5))]),
        ("INVALID_ARGUMENT", "variant has 31 bytes", [part(header(names, variant=short))]),
        ("INVALID_ARGUMENT", "no variants", [part(header(names, path=[s], variant=names["v"]))]),
        ("INVALID_ARGUMENT", "checksum has 3 bytes", [part(header(names, checksum=b"abc"))]),
        ("INVALID_ARGUMENT", "at least one token", [part(header(names, tokens=0))]),
        ("INVALID_ARGUMENT", "at least one token", [part(header(names, size_bytes=0))]),
        ("INVALID_ARGUMENT", "more than the 3 bytes", [part(h), part(data=b"abcd")]),
        ("INVALID_ARGUMENT", "2 bytes arrived, the header says 3", [part(h), part(data=b"ab")]),
        ("INVALID_ARGUMENT", "0 bytes arrived", [part(h)]),
        ("INVALID_ARGUMENT", "not data", [part(h), part(data=b"a"), part(h)]),
        ("DATA_LOSS", "checksum", [part(h), part(data=b"abd")]),
        ("RESOURCE_EXHAUSTED", "raise max_entry_bytes", [part(header(names, size_bytes=MIB + 1))]),
    ]
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = kvcache_pb2_grpc.KVCacheServiceStub(channel)
        for status, text, messages in cases:
            got = await status_of(stub.Put(iter(messages), timeout=20))
            assert got[0] == status, (text, got)
            assert text in got[1]
            await service.settled()
        assert len(service.store.residents) == 0
        assert (await service.client.stats()).checksum_failures == 1
        response = await stub.Put(iter([part(h), part(data=b""), part(data=b"abc")]), timeout=20)
        assert response.outcome == pb.PutResponse.OUTCOME_STORED


async def test_every_bad_request_has_its_status(start: Any, names: dict[str, bytes]) -> None:
    service = await start(max_path=4, max_leases=2)
    short, n, s = b"s" * 31, names["X"], pb.PathElement(digest=names["S"])
    bad_variant = pb.PathElement(digest=names["A"], variants=[short])
    many = pb.PathElement(digest=names["A"], variants=[names["v"]] * 65)
    cases: list[tuple[str, str, Any]] = [
        ("Lookup", "namespace has 31 bytes", pb.LookupRequest(namespace=short, path=[s])),
        ("Lookup", "path has 31 bytes", pb.LookupRequest(namespace=n, path=[s, pb.PathElement(digest=short)])),
        ("Lookup", "variant has 31 bytes", pb.LookupRequest(namespace=n, path=[s, bad_variant])),
        ("Lookup", "65 variants", pb.LookupRequest(namespace=n, path=[s, many])),
        ("Lookup", "path of 0", pb.LookupRequest(namespace=n)),
        ("Lookup", "path of 5", pb.LookupRequest(namespace=n, path=[s] * 5)),
        ("Delete", "either keys or a namespace", pb.DeleteRequest()),
        ("Delete", "either keys or a namespace", pb.DeleteRequest(keys=[n], namespace=n)),
        ("Delete", "key has 31 bytes", pb.DeleteRequest(keys=[short])),
        ("Delete", "namespace has 31 bytes", pb.DeleteRequest(namespace=short)),
        ("Fetch", "key has 31 bytes", pb.FetchRequest(key=short)),
    ]
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = kvcache_pb2_grpc.KVCacheServiceStub(channel)
        for method, text, request in cases:
            call = getattr(stub, method)(request, timeout=20)
            status, details = await status_of(call.read() if method == "Fetch" else call)
            assert (status, text in details) == ("INVALID_ARGUMENT", True), (method, details)
        status, details = await status_of(stub.Fetch(pb.FetchRequest(key=n), timeout=20).read())
        assert (status, "never stored" in details) == ("NOT_FOUND", True)
    await service.put([names["S"]], b"x")
    for _ in range(2):
        await service.find(names["S"])
    with pytest.raises(errors.ResourceExhausted, match="2 leases are out"):
        await service.find(names["S"])


async def test_stock_protobuf_clients_read_and_write_the_same_bytes(
    start: Any, tools: Any, names: dict[str, bytes]
) -> None:
    service = await start()
    data = tools.payload("stock", 3 * MIB + 77)
    checksum = xxhash.xxh3_128_digest(data)
    head = header(names, namespace=tools.digest("namespace"), size_bytes=len(data), checksum=checksum)

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


async def test_limits_on_calls_at_once(start: Any, tools: Any, names: dict[str, bytes]) -> None:
    service = await start(max_puts=1, max_fetches=1, memory=32 * MIB, disk=64 * MIB)
    data = tools.payload("big", 24 * MIB)
    key, _ = await service.put([names["S"]], data)
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = kvcache_pb2_grpc.KVCacheServiceStub(channel)
        # 24 MiB don't fit the channel's flow control, so a fetch that nobody reads goes on.
        fetch = stub.Fetch(pb.FetchRequest(key=key), timeout=60)
        await fetch.read()
        status, details = await status_of(stub.Fetch(pb.FetchRequest(key=key), timeout=20).read())
        assert (status, "raise max_fetches" in details) == ("RESOURCE_EXHAUSTED", True)
        fetch.cancel()
        put = stub.Put(timeout=60)
        await put.write(part(header(names)))
        await tools.eventually(lambda: bool(service.store.residents._reserved))
        with pytest.raises(errors.ResourceExhausted, match="raise max_puts"):
            await service.put([names["S"], names["B"]], b"b")
        await put.write(part(data=b"abc"))
        await put.done_writing()
        assert (await put).outcome == pb.PutResponse.OUTCOME_STORED
    await service.settled()
    entry = (await service.find(names["S"])).hits[0].entry
    assert await service.fetch(entry) == data


async def test_client_errors_are_ours(start: Any, tools: Any, names: dict[str, bytes]) -> None:
    service = await start()
    await service.put([names["S"]], b"abc")
    entry = (await service.find(names["S"])).hits[0].entry
    with pytest.raises(errors.InvalidArgument, match="the buffer holds 2 bytes, the entry 3"):
        await service.client.fetch(entry, memoryview(bytearray(2)), timeout=5)
    nobody = CacheClient("127.0.0.1:1")
    with pytest.raises(errors.Unavailable, match=r"stats at the cache service at 127\.0\.0\.1:1"):
        await nobody.stats(timeout=5)
    await nobody.close()
    for timeout in (0.0, -1.0):
        with pytest.raises(errors.DeadlineExceeded):
            await service.client.stats(timeout=timeout)
        with pytest.raises(errors.DeadlineExceeded):
            await service.client.fetch(entry, memoryview(bytearray(3)), timeout=timeout)
    gone = Entry(b"?" * 32, 3, 1, 0, entry.checksum, "memory", b"")
    with pytest.raises(errors.NotFound):
        await service.fetch(gone)


async def test_the_client_deletes_what_arrives_damaged(start: Any, names: dict[str, bytes]) -> None:
    service = await start()
    await service.put([names["S"]], b"abc")
    entry = (await service.find(names["S"])).hits[0].entry
    place = next(iter(service.store.residents)).places["memory"]
    service.store.residents.tiers[0].write(place, 1, [memoryview(b"?")])
    with pytest.raises(errors.DataLoss, match="it is deleted there"):
        await service.fetch(entry)
    assert (await service.find(names["S"])).hits[0].kind is HitKind.MISS


async def test_sixteen_clients_at_once(start: Any, tools: Any, names: dict[str, bytes]) -> None:
    service = await start(memory=2 * MIB, disk=64 * MIB)
    s = names["S"]
    sizes = [i * 70_001 + 1 for i in range(16)]
    await asyncio.gather(*(service.put([s, tools.digest(str(n))], tools.payload(n, n)) for n in sizes))

    async def check(n: int) -> None:
        for _ in range(3):
            found = await service.find(s, tools.digest(str(n)))
            assert await service.fetch(found.hits[1].entry) == tools.payload(n, n)

    await asyncio.gather(*(check(n) for n in sizes))
