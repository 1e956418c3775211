"""Every status that the proto promises, and what happens when callers race, hang up, or bytes on disk go bad."""

import asyncio
import contextlib
import errno
import gc
import os
import random
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from fusionkv.kvcache_service import servicer
from fusionkv.kvcache_service.client import Entry, HitKind
from fusionkv.kvcache_service.store import upkeep, writing
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.disk_index import DiskIndex
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.kvcache.v1.kvcache_pb2_grpc import KVCacheServiceStub
from fusionkv.protos.runtime import admission, errors
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from tests.kvcache_service.tools import MIB, Service, digest, payload, record, reserved
from tests.system.cache_process import check_stopped
from tests.waiting import until

NAMESPACE, S, A, V = (digest(name) for name in ("namespace", *"SAv"))


def segment(service: Service) -> Path:
    return Path(service.config.data_dir / "segments" / "000000.kv")


@contextlib.contextmanager
def read_only(service: Service) -> Iterator[None]:
    """While its disk tier can't be written."""
    files, name = service.store.residents.home.segments._files, (0, "kv")
    writable, files[name] = files[name], os.open(segment(service), os.O_RDONLY)
    yield
    os.close(files[name])
    files[name] = writable


async def test_the_answer_arrives_when_it_comes_before_the_bytes(start: Any) -> None:
    """An early answer to a large Put: grpc.aio turns it into INTERNAL if it meets a write of the client's."""
    service = await start(memory=1 * MIB, disk=64 * MIB, max_entry_bytes=40 * MIB)
    data = payload("large", 32 * MIB)
    assert (await service.put("S", data))[1]
    for _ in range(5):
        assert not (await service.put("S", data))[1]
    for _ in range(5):
        with pytest.raises(errors.ResourceExhausted):
            await service.put("SA", bytes(41 * MIB))
    assert service.store.counters.get("stored") == len(data)
    with read_only(service):
        for _ in range(5):
            with pytest.raises(errors.ResourceExhausted, match="can't write the entry"):
                await service.put("SA", data[: 24 * MIB])


async def test_leased_entries_are_not_evicted_and_a_full_cache_refuses(start: Any) -> None:
    service = await start(memory=1 * MIB, disk=4 * MIB)
    for chunk in "0123":
        await service.put(["S", chunk], payload(chunk, MIB))
    leased = await service.entry("S", "0", lease_ms=20_000)
    await service.find("S", "1", lease_ms=20_000)
    # Two of four are leased and hot: the two others go for two new ones, and then there is nothing more to give.
    for name in ("new 0", "new 1"):
        assert (await service.put(["S", name], payload(name, MIB)))[1]
        await service.find("S", name, lease_ms=20_000)
    assert service.count("evictions", "disk") == 2
    with pytest.raises(errors.ResourceExhausted, match="leased or in use; try again later, or raise disk_bytes"):
        await service.put(["S", "new 2"], payload("new 2", MIB))
    assert (await service.client.stats()).puts_refused == 1
    assert await service.fetch(leased) == payload("0", MIB)
    service.clock.now += 21
    assert (await service.put(["S", "new 2"], payload("new 2", MIB)))[1]


async def status_of(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code().name, raised.value.details()


def head(data: bytes = b"abc", **changes: Any) -> pb.PutRequest:
    names = {"namespace": NAMESPACE, "path": [S], "size_bytes": len(data), "checksum": checksum_of(data)}
    return pb.PutRequest(header=pb.PutHeader(**{"tokens": 1, "base": 0, **names, **changes}))


def part(data: bytes) -> pb.PutRequest:
    return pb.PutRequest(data=data)


async def test_every_bad_put_has_its_status(start: Any) -> None:
    service = await start(max_path=4, max_entry_bytes=MIB)
    short, first = b"s" * 31, "first message must be the header"
    cases: list[tuple[str, str, list[pb.PutRequest]]] = [
        ("INVALID_ARGUMENT", first, []),
        ("INVALID_ARGUMENT", first, [part(b"abc")]),
        ("INVALID_ARGUMENT", first, [pb.PutRequest()]),
        ("INVALID_ARGUMENT", "namespace has 31 bytes", [head(namespace=short)]),
        ("INVALID_ARGUMENT", "path has 31 bytes", [head(path=[S, short])]),
        ("INVALID_ARGUMENT", "path of 0 elements", [head(path=[])]),
        ("INVALID_ARGUMENT", "path of 5 elements; 1 to 4", [head(path=[S] * 5)]),
        ("INVALID_ARGUMENT", "more than 65536 fields", [head(path=[b""] * 70_000)]),
        ("INVALID_ARGUMENT", "variant has 31 bytes", [head(path=[S, A], variant=short)]),
        ("INVALID_ARGUMENT", "no variants", [head(path=[S], variant=V)]),
        ("INVALID_ARGUMENT", "checksum has 3 bytes", [head(checksum=b"abc")]),
        ("INVALID_ARGUMENT", "at least one token", [head(tokens=0)]),
        ("INVALID_ARGUMENT", "at least one token", [head(size_bytes=0)]),
        ("INVALID_ARGUMENT", "more than the 3 bytes", [head(), part(b"abcd")]),
        ("INVALID_ARGUMENT", "2 bytes arrived, the header specifies 3", [head(), part(b"ab")]),
        ("INVALID_ARGUMENT", "0 bytes arrived", [head()]),
        ("INVALID_ARGUMENT", "not data", [head(), part(b"a"), head()]),
        ("DATA_LOSS", "checksum", [head(), part(b"abd")]),
        ("RESOURCE_EXHAUSTED", "raise max_entry_bytes", [head(size_bytes=MIB + 1)]),
    ]
    for status, text, messages in cases:
        got = await status_of(service.stub.Put(iter(messages), timeout=20))
        assert got[0] == status, (text, got)
        assert text in got[1]
        await service.settled()
    assert len(service.store.entries) == 0
    assert (await service.client.stats()).checksum_failures == 1
    response = await service.stub.Put(iter([head(), part(b""), part(b"abc")]), timeout=20)
    assert response.outcome == pb.PutResponse.OUTCOME_STORED


async def test_every_bad_request_has_its_status(start: Any) -> None:
    service = await start(max_path=4, max_leases=2)
    short, n, s = b"s" * 31, NAMESPACE, pb.PathElement(digest=S)
    bad_variant, many = (pb.PathElement(digest=A, variants=v) for v in ([short], [V] * 65))
    cases: list[tuple[str, str, Any]] = [
        ("Lookup", "namespace has 31 bytes", pb.LookupRequest(namespace=short, path=[s])),
        ("Lookup", "path has 31 bytes", pb.LookupRequest(namespace=n, path=[s, pb.PathElement(digest=short)])),
        ("Lookup", "variant of a chunk is not 32 bytes", pb.LookupRequest(namespace=n, path=[s, bad_variant])),
        ("Lookup", "65 variants", pb.LookupRequest(namespace=n, path=[s, many])),
        ("Lookup", "path of 0", pb.LookupRequest(namespace=n)),
        ("Lookup", "path of 5", pb.LookupRequest(namespace=n, path=[s] * 5)),
        ("Delete", "either keys or a namespace", pb.DeleteRequest()),
        ("Delete", "either keys or a namespace", pb.DeleteRequest(keys=[n], namespace=n)),
        ("Delete", "key has 31 bytes", pb.DeleteRequest(keys=[short])),
        ("Delete", "namespace has 31 bytes", pb.DeleteRequest(namespace=short)),
        ("Fetch", "key has 31 bytes", pb.FetchRequest(key=short)),
        ("Prefetch", "key has 31 bytes", pb.PrefetchRequest(keys=[short])),
        ("Prefetch", "5 keys at once; at most 4", pb.PrefetchRequest(keys=[n] * 5)),
    ]
    for method, text, request in cases:
        call = getattr(service.stub, method)(request, timeout=20)
        status, details = await status_of(call.read() if method == "Fetch" else call)
        assert (status, text in details) == ("INVALID_ARGUMENT", True), (method, details)
    status, details = await status_of(service.stub.Fetch(pb.FetchRequest(key=n), timeout=20).read())
    assert (status, "never stored" in details) == ("NOT_FOUND", True)
    await service.put("S", b"x")
    for _ in range(2):
        await service.find("S")
    with pytest.raises(errors.ResourceExhausted, match=r"2 leases are active.* raise max_leases"):
        await service.find("S")
    service.clock.now += 3600
    assert (await service.find("S")).lease, "those that are over do not count"


async def test_limits_on_calls_at_once(start: Any) -> None:
    service = await start(max_puts=1, max_fetches=1, memory=32 * MIB, disk=64 * MIB)
    data = payload("big", 24 * MIB)
    key, _ = await service.put("S", data)
    # 24 MiB don't fit the channel's flow control, so a fetch that nobody reads goes on.
    fetch = service.stub.Fetch(pb.FetchRequest(key=key), timeout=60)
    await fetch.read()
    status, details = await status_of(service.stub.Fetch(pb.FetchRequest(key=key), timeout=20).read())
    assert (status, "raise max_fetches" in details) == ("RESOURCE_EXHAUSTED", True)
    fetch.cancel()
    put = service.stub.Put(timeout=60)
    await put.write(head(path=[S, A]))
    await until(lambda: bool(reserved(service.store)))
    with pytest.raises(errors.ResourceExhausted, match="raise max_puts"):
        await service.put("SB", b"b")
    await put.write(part(b"abc"))
    await put.done_writing()
    assert (await put).outcome == pb.PutResponse.OUTCOME_STORED
    await service.settled()
    assert await service.get("S") == data


async def test_a_put_that_stalls_ends(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(servicer, "_STALL_SECONDS", 0.2)
    monkeypatch.setattr(admission, "_SECONDS", 0.2)
    service = await start(max_puts=1)
    for messages in ([], [head()], [head(), part(b"a")], [head(), part(b"abcd")]):
        put = service.stub.Put()
        for message in messages:
            await put.write(message)
        wrong = messages[-1:] == [part(b"abcd")]
        status, details = await status_of(put)
        assert status == ("INVALID_ARGUMENT" if wrong else "DEADLINE_EXCEEDED"), messages
        assert wrong or ("nothing was sent for 0.2 s" if messages else "did not arrive in time") in details
        await service.settled()
    assert (await service.put("S", b"abc"))[1]


async def test_a_fetch_that_stalls_ends(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(admission, "_STALL_SECONDS", 0.2)
    service, data = await start(memory=16 * MIB, disk=32 * MIB, max_fetches=1), payload("x", 12 * MIB)
    await service.put("S", data)
    entry = await service.entry("S")
    # By default, gRPC may take in all of it for a caller that reads nothing.
    options = [("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(service.client.address, options=options) as channel:
        call = KVCacheServiceStub(channel).Fetch(pb.FetchRequest(key=entry.key))
        assert (await call.read()).data == data[:MIB]
        await until(lambda: service.store.entries.get(entry.key).pins == 0)
        assert await service.fetch(entry) == data

        async def rest() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        assert await status_of(rest()) == ("DEADLINE_EXCEEDED", "nothing was read for 0.2 s")


async def test_client_errors_are_ours(service: Any, cache_client: Any) -> None:
    await service.put("S", b"abc")
    entry = await service.entry("S")
    with pytest.raises(errors.InvalidArgument, match="the buffer holds 2 bytes, the entry 3"):
        await service.client.fetch(entry, memoryview(bytearray(2)), timeout=5)
    with pytest.raises(errors.Unavailable, match=r"stats at the cache service at 127\.0\.0\.1:1"):
        await cache_client("127.0.0.1:1").stats(timeout=5)
    with pytest.raises(errors.Unavailable, match=r"find at the cache service at 127\.0\.0\.1:1"):
        await cache_client("127.0.0.1:1").find(NAMESPACE, [S], timeout=5)
    for timeout in (0.0, -1.0):
        with pytest.raises(errors.DeadlineExceeded):
            await service.client.stats(timeout=timeout)
        with pytest.raises(errors.DeadlineExceeded):
            await service.client.fetch(entry, memoryview(bytearray(3)), timeout=timeout)
    with pytest.raises(errors.NotFound):
        await service.fetch(Entry(b"?" * 32, 3, 1, 0, entry.checksum, "memory", b""))


async def test_the_client_deletes_what_arrives_damaged(service: Any) -> None:
    await service.put("S", b"abc")
    entry = await service.entry("S")
    place = next(iter(service.store.entries)).places["memory"]
    service.store.residents.tiers[0].write(place, 1, [memoryview(b"?")])
    with pytest.raises(errors.DataLoss, match="it is deleted there"):
        await service.fetch(entry)
    assert (await service.find("S")).hits[0].kind is HitKind.MISS


async def test_what_was_stored_anew_is_not_taken_for_what_was_leased(service: Any) -> None:
    await service.put("S", payload("x", MIB))
    entry = await service.entry("S")
    await service.client.delete([entry.key])
    await service.put("S", payload("other bytes", MIB))
    with pytest.raises(errors.NotFound, match="stored anew"):
        await service.fetch(entry)
    assert await service.get("S") == payload("other bytes", MIB), "and it is kept"


async def test_of_two_writers_the_first_to_commit_wins(service: Any) -> None:
    data = [b"one" * 1000, b"two" * 1000]
    puts = [service.stub.Put(timeout=20) for _ in data]
    for put, content in zip(puts, data, strict=True):
        await put.write(head(content))
    # Both have reserved their space, in memory and on disk.
    await until(lambda: reserved(service.store) == 4)
    for i in (1, 0):
        await puts[i].write(pb.PutRequest(data=data[i]))
        await puts[i].done_writing()
        outcome = (await puts[i]).outcome
        assert outcome == (pb.PutResponse.OUTCOME_STORED if i else pb.PutResponse.OUTCOME_EXISTS)
    await service.settled()
    assert await service.get("S") == data[1]


async def test_deletions_at_once_share_the_entries(service: Any) -> None:
    keys = [(await service.put(["S", f"{n}"], b"data"))[0] for n in range(20)]
    deleted = await asyncio.gather(*(service.store.delete(keys) for _ in range(5)))
    assert sum(deleted) == 20
    assert len(service.store.entries) == 0


@pytest.mark.parametrize("sent", [0, 100, 9 * MIB])
async def test_a_caller_that_hangs_up_leaves_nothing(start: Any, sent: int) -> None:
    service, data = await start(memory=16 * MIB, disk=32 * MIB), payload("x", 10 * MIB)
    put = service.stub.Put(timeout=20)
    await put.write(head(data))
    for at in range(0, sent, MIB):
        await put.write(pb.PutRequest(data=data[at : min(at + MIB, sent)]))
    await until(lambda: reserved(service.store) == 2)
    put.cancel()
    await until(lambda: not reserved(service.store))
    await service.settled()
    assert service.store.residents.home.used_bytes == 0
    assert (await service.put("S", data))[1]


async def test_puts_cancelled_at_random_moments(start: Any) -> None:
    service, moments = await start(memory=8 * MIB, disk=16 * MIB), random.Random(7)
    for i in range(40):
        task = asyncio.create_task(service.put(["S", str(i % 8)], payload(i % 8, 600_000)))
        await asyncio.sleep(moments.random() * 0.012)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if i % 10 == 9:
            await service.settled()
    await service.settled()
    for i in range(8):
        if (entry := await service.entry("S", str(i))) is not None:
            assert await service.fetch(entry) == payload(i, 600_000)


@pytest.mark.parametrize("memory", [16 * MIB, 1 * MIB], ids=["from memory", "from disk"])
async def test_fetches_that_hang_up_hold_nothing(start: Any, memory: int) -> None:
    service, data = await start(memory=memory, disk=32 * MIB), payload("x", 12 * MIB)
    await service.put("S", data)
    entry = await service.entry("S", lease_ms=1)
    for count in (0, 1, 3):
        call = service.stub.Fetch(pb.FetchRequest(key=entry.key), timeout=20)
        for _ in range(count):
            await call.read()
        call.cancel()
    late = service.stub.Fetch(pb.FetchRequest(key=entry.key), timeout=0.2)
    with contextlib.suppress(grpc.aio.AioRpcError):  # its time may be over before the first bytes come
        await late.read()
    await until(lambda: all(e.pins == 0 for e in service.store.entries))
    await service.settled()
    assert await service.fetch(entry) == data


async def test_an_entry_that_is_read_is_not_overwritten(start: Any) -> None:
    service, data = await start(memory=20 * MIB, disk=20 * MIB), payload("read", 12 * MIB)
    await service.put("S", data)
    entry = await service.entry("S")
    call = service.stub.Fetch(pb.FetchRequest(key=entry.key), timeout=60)
    received = [(await call.read()).data]
    assert await service.client.delete([entry.key]) == 1
    with pytest.raises(errors.ResourceExhausted):
        await service.put(["S", "big"], payload("big", 12 * MIB))
    assert (await service.put("S", payload("again", 6 * MIB)))[1]
    while (message := await call.read()) is not grpc.aio.EOF:
        received.append(message.data)
    assert b"".join(received) == data


async def on_disk_only(service: Service) -> Any:
    """An entry of 600 kB that is in the disk tier alone, and another one that stays well."""
    for name in ("good", "bad"):
        await service.put(["S", name], payload(name, 600_000))
    service.clock.now += 1
    await service.put(["S", "filler"], payload("filler", MIB))
    await service.find("S", "filler")  # leased, it leaves no room to what a Lookup would take up
    entry = await service.entry("S", "bad")
    assert entry.tier == "disk"
    return entry


@pytest.mark.parametrize("at", [0, 1, 299_999, 599_999, None])
async def test_damage_on_disk_is_data_loss_and_deleted(start: Any, at: int | None) -> None:
    """at: where a bit is flipped; None: the segment is cut in the middle of the entry."""
    service = await start(memory=1 * MIB, disk=16 * MIB)
    entry = await on_disk_only(service)
    offset = service.store.entries.get(entry.key).places["disk"].offset
    if at is None:
        os.truncate(segment(service), offset + 300_000)
    else:
        file = os.open(segment(service), os.O_RDWR)
        os.pwrite(file, bytes([os.pread(file, 1, offset + at)[0] ^ 0x10]), offset + at)
        os.close(file)
    with pytest.raises(errors.DataLoss, match=None if at is None else "damaged on disk; it is deleted"):
        await service.fetch(entry)
    with pytest.raises(errors.NotFound):
        await service.fetch(entry)
    assert (await service.find("S", "bad")).hits[1].kind is HitKind.MISS
    assert await service.get("S", "good") == payload("good", 600_000)
    assert (await service.client.stats()).checksum_failures == 1 or at is None
    assert (await service.put(["S", "bad"], payload("bad", 600_000)))[1]
    assert await service.get("S", "bad") == payload("bad", 600_000)


@pytest.mark.parametrize("call", ["put", "delete", "fetch"])
async def test_what_fails_after_its_caller_has_left_is_not_unhandled(start: Any, monkeypatch: Any, call: str) -> None:
    """The log had tracebacks of a full disk, or said that a connection had failed."""
    service = await start(memory=1 * MIB, disk=16 * MIB)
    store, key = service.store, (await on_disk_only(service)).key
    asked, go, unhandled = threading.Event(), threading.Event(), Mock()
    asyncio.get_running_loop().set_exception_handler(unhandled)

    async def put() -> None:
        writer = writing.reserve(store, record("SN", b"new"))
        await writer.write(memoryview(b"new"))
        await writer.commit()

    async def fetch() -> None:
        with store.reader.pinned(key) as entry:
            await anext(store.reader.frames(entry))

    def fail(*_: Any) -> None:
        asked.set()
        go.wait(20)
        raise Unreachable("too many open files")

    with monkeypatch.context() as failing:
        failing.setattr(DiskTier, {"put": "commit", "delete": "forget", "fetch": "copy"}[call], fail)
        calling = asyncio.create_task({"put": put, "delete": lambda: store.delete([key]), "fetch": fetch}[call]())
        await until(asked.is_set)
        calling.cancel()
        await asyncio.wait([calling])
        go.set()
        await until(lambda: not (store.work.tasks or store.reader.pending))
    gc.collect()
    unhandled.assert_not_called()
    await store.withdraw([])


async def test_a_disk_that_can_t_be_written_refuses_and_goes_on(start: Any) -> None:
    service = await start(memory=1 * MIB, disk=16 * MIB)
    entry = await on_disk_only(service)
    with read_only(service):
        for size in (100, 9 * MIB):
            with pytest.raises(errors.ResourceExhausted, match="can't write the entry"):
                await service.put(["S", "new"], payload("new", size))
        await service.settled()
        assert await service.fetch(entry) == payload("bad", 600_000)
    assert (await service.put(["S", "new"], payload("new", 9 * MIB)))[1]
    assert (await service.client.stats()).puts_refused == 2


async def test_evictions_that_can_t_be_recorded_count_once(start: Any, monkeypatch: Any) -> None:
    service = await start(disk=4 * MIB, high_watermark=0.6, low_watermark=0.3)
    for name in "ABC":
        await service.put(name, payload(name, MIB))
    with monkeypatch.context() as full:
        full.setattr(DiskIndex, "delete", Mock(side_effect=OSError("no space left")))
        for _ in range(2):
            with pytest.raises(OSError, match="no space left"):
                await upkeep.evict_to_watermark(service.store)
            with pytest.raises(OSError, match="no space left"):
                await service.store.forget()
    await service.store.forget()
    await upkeep.evict_to_watermark(service.store)
    assert service.count("evictions", "disk") == 3 - len(service.store.entries) >= 2


async def test_what_a_disk_can_t_read_counts_as_damaged(start: Any, monkeypatch: Any) -> None:
    """Also once it was verified, with which a stream begins."""
    service = await start(memory=1 * MIB, disk=16 * MIB)
    entry = await on_disk_only(service)
    verify = DiskTier.copy

    def verified(*arguments: Any) -> Any:
        checksum = verify(*arguments)
        monkeypatch.setattr(DiskTier, "read", Mock(side_effect=OSError(errno.EIO, "input/output error")))
        return checksum

    monkeypatch.setattr(DiskTier, "copy", verified)
    with pytest.raises(errors.DataLoss, match="input/output error; it is deleted"):
        await service.fetch(entry)
    assert service.count("checksum.failures", "disk") == 1
    assert (await service.client.stats()).checksum_failures == 1


@pytest.mark.parametrize("again", ["by a caller", "by the sweep"])
async def test_a_deletion_that_can_t_be_recorded_fails_until_it_is(
    start: Any, tmp_path: Path, monkeypatch: Any, again: str
) -> None:
    """Otherwise what was deleted, as the second call said, would come back with the next start."""
    service = await start()
    key, _ = await service.put("S", b"deleted")
    with monkeypatch.context() as full:
        full.setattr(DiskIndex, "delete", Mock(side_effect=OSError("no space left")))
        for deletion in ({"keys": [key]}, {"keys": [key]}, {"namespace": NAMESPACE}):
            with pytest.raises(errors.ResourceExhausted, match="can't record the deletion: no space left"):
                await service.client.delete(**deletion)
        assert await service.entry("S") is None
    assert (await service.put("S", b"stored anew"))[1]
    if again == "by a caller":
        assert await service.client.delete([digest("any")]) == 0
    else:
        monkeypatch.setattr(upkeep, "_SWEEP_SECONDS", 0.01)
        sweep = asyncio.create_task(upkeep.sweep(service.store))
        await until(lambda: not service.store.entries.withdrawn)
        sweep.cancel()
    assert not service.store.entries.withdrawn
    assert await service.get("S") == b"stored anew"
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    assert await check_stopped(tmp_path / "killed") == 1


async def test_what_was_evicted_and_deleted_stays_deleted(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Although the eviction could not be recorded, of which nobody was told but a Put that needed the room."""
    service = await start(memory=MIB, disk=2 * MIB, high_watermark=1.0)
    keys = [(await service.put(name, payload(name, MIB)))[0] for name in "AB"]
    with monkeypatch.context() as full:
        full.setattr(DiskIndex, "delete", Mock(side_effect=OSError("no space left")))
        for _ in range(2):
            with pytest.raises(errors.ResourceExhausted, match="can't write the entry: no space left"):
                await service.put("C", payload("C", MIB))
        with pytest.raises(errors.ResourceExhausted, match="can't record the deletion"):
            await service.client.delete(keys[:1])
    assert await service.client.delete(keys[:1]) == 0
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    assert await check_stopped(tmp_path / "killed", 2 * MIB) == 1


async def test_a_deadline_during_a_write_is_no_failure_of_the_service(service: Any) -> None:
    """gRPC reports the write as an internal error: before, every third of these puts."""
    await service.plane.stop(0)
    data = payload("x", 3 * MIB)
    for n in range(60):
        with contextlib.suppress(errors.DeadlineExceeded):
            await service.put([f"{n}"], data, timeout=0.002 * (1 + n % 10))


async def test_a_call_for_many_entries_on_disk_holds_a_frame_of_them(start: Any) -> None:
    """Memory has room for one; 256 calls for 256 entries each would hold 64 GiB."""
    service = await start(memory=MIB, disk=64 * MIB)
    keys = [(await service.put([f"{n}"], payload(n, MIB)))[0] for n in range(16)]
    request = pb.FetchAllRequest(entries=[pb.FetchRequest(key=key) for key in keys])
    tracemalloc.start()
    try:
        async with service.plane._service.reads.all(request) as (sizes, frames):
            assert tracemalloc.get_traced_memory()[0] < 4 * MIB
            assert sizes == [MIB] * 16
            assert [bytes(frame) async for frame in frames] == [payload(n, MIB) for n in range(16)]
    finally:
        tracemalloc.stop()
