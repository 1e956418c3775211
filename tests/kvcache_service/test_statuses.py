"""Every status that the proto promises, as a caller sees it."""

import os
from typing import Any

import grpc
import pytest

from fusionkv.kvcache_service.client import CacheClient, Entry, HitKind
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.kvcache.v1 import kvcache_pb2_grpc
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from tests.kvcache_service import tools
from tests.waiting import until

MIB = 1 << 20


async def test_the_answer_arrives_when_it_comes_before_the_bytes(start: Any, names: dict[str, bytes]) -> None:
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
    writable = disk._files[0, "kv"]
    disk._files[0, "kv"] = os.open(service.config.data_dir / "segments" / "000000.kv", os.O_RDONLY)
    for _ in range(10):
        with pytest.raises(errors.ResourceExhausted, match="can't write the entry"):
            await service.put([names["S"], names["A"]], data[: 24 * MIB])
    os.close(disk._files[0, "kv"])
    disk._files[0, "kv"] = writable


async def test_leased_entries_are_not_evicted_and_a_full_cache_refuses(start: Any, names: dict[str, bytes]) -> None:
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


def header(names: dict[str, bytes], **changes: Any) -> pb.PutHeader:
    fields: dict[str, Any] = {
        "namespace": names["X"], "path": [names["S"], names["A"]], "size_bytes": 3, "tokens": 1, "base": 0,
        "checksum": checksum_of(b"abc"),
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
        ("INVALID_ARGUMENT", "2 bytes arrived, the header specifies 3", [part(h), part(data=b"ab")]),
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
    with pytest.raises(errors.ResourceExhausted, match="2 leases are active"):
        await service.find(names["S"])


async def test_limits_on_calls_at_once(start: Any, names: dict[str, bytes]) -> None:
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
        await until(lambda: bool(service.store.residents._reserved))
        with pytest.raises(errors.ResourceExhausted, match="raise max_puts"):
            await service.put([names["S"], names["B"]], b"b")
        await put.write(part(data=b"abc"))
        await put.done_writing()
        assert (await put).outcome == pb.PutResponse.OUTCOME_STORED
    await service.settled()
    entry = (await service.find(names["S"])).hits[0].entry
    assert await service.fetch(entry) == data


async def test_client_errors_are_ours(start: Any, names: dict[str, bytes]) -> None:
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
