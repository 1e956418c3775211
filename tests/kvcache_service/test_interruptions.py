"""What happens when callers race, hang up, or the bytes on disk go bad under a running service."""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fusionkv.kvcache_service.client import HitKind
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.kvcache.v1 import kvcache_pb2_grpc
from fusionkv.protos.runtime import errors, frames
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from tests.kvcache_service import tools
from tests.waiting import until

MIB = 1 << 20


@pytest.fixture
def s() -> bytes:
    return tools.digest("S")


def header(s: bytes, data: bytes, namespace: bytes) -> pb.PutRequest:
    return pb.PutRequest(
        header=pb.PutHeader(namespace=namespace, path=[s], size_bytes=len(data), tokens=1, checksum=checksum_of(data))
    )


async def test_of_two_writers_the_first_to_commit_wins(start: Any, s: bytes) -> None:
    service = await start()
    data = [b"one" * 1000, b"two" * 1000]
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = kvcache_pb2_grpc.KVCacheServiceStub(channel)
        puts = [stub.Put(timeout=20) for _ in data]
        for put, content in zip(puts, data, strict=True):
            await put.write(header(s, content, tools.digest("namespace")))
        # Both have reserved their space, in memory and on disk.
        await until(lambda: len(service.store.residents._reserved) == 4)
        for i in (1, 0):
            await puts[i].write(pb.PutRequest(data=data[i]))
            await puts[i].done_writing()
            outcome = (await puts[i]).outcome
            assert outcome == (pb.PutResponse.OUTCOME_STORED if i else pb.PutResponse.OUTCOME_EXISTS)
    await service.settled()
    assert await service.fetch((await service.find(s)).hits[0].entry) == data[1]


async def test_twenty_writers_at_once_store_one_entry(start: Any, s: bytes) -> None:
    service = await start()
    data = tools.payload("same", 100_000)
    results = await asyncio.gather(*(service.put([s], data) for _ in range(20)))
    assert sum(stored for _, stored in results) == 1
    assert len({key for key, _ in results}) == 1
    await service.settled()
    assert service.store.residents.home.used_bytes == 102_400


@pytest.mark.parametrize("sent", [0, 100, 9 * MIB])
async def test_a_caller_that_hangs_up_leaves_nothing(start: Any, s: bytes, sent: int) -> None:
    service = await start(memory=16 * MIB, disk=32 * MIB)
    data = tools.payload("x", 10 * MIB)
    async with grpc.aio.insecure_channel(service.address) as channel:
        put = kvcache_pb2_grpc.KVCacheServiceStub(channel).Put(timeout=20)
        await put.write(header(s, data, tools.digest("namespace")))
        for at in range(0, sent, MIB):
            await put.write(pb.PutRequest(data=data[at : min(at + MIB, sent)]))
        await until(lambda: len(service.store.residents._reserved) == 2)
        put.cancel()
        await until(lambda: not service.store.residents._reserved)
    await service.settled()
    assert service.store.residents.home.used_bytes == 0
    assert (await service.put([s], data))[1]


async def test_puts_cancelled_at_random_moments(start: Any, s: bytes) -> None:
    service = await start(memory=8 * MIB, disk=16 * MIB)
    moments = random.Random(7)
    for i in range(40):
        path = [s, tools.digest(str(i % 8))]
        task = asyncio.create_task(service.put(path, tools.payload(i % 8, 600_000)))
        await asyncio.sleep(moments.random() * 0.012)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if i % 10 == 9:
            await service.settled()
    await service.settled()
    for i in range(8):
        hit = (await service.find(s, tools.digest(str(i)))).hits[1]
        if hit.entry is not None:
            assert await service.fetch(hit.entry) == tools.payload(i, 600_000)


@pytest.mark.parametrize("memory", [16 * MIB, 1 * MIB], ids=["from memory", "from disk"])
async def test_fetches_that_hang_up_hold_nothing(start: Any, s: bytes, memory: int) -> None:
    service = await start(memory=memory, disk=32 * MIB)
    data = tools.payload("x", 12 * MIB)
    await service.put([s], data)
    entry = (await service.find(s, lease_ms=1)).hits[0].entry
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = kvcache_pb2_grpc.KVCacheServiceStub(channel)
        for frames in (0, 1, 3):
            call = stub.Fetch(pb.FetchRequest(key=entry.key), timeout=20)
            for _ in range(frames):
                await call.read()
            call.cancel()
        late = stub.Fetch(pb.FetchRequest(key=entry.key), timeout=0.2)
        with contextlib.suppress(grpc.aio.AioRpcError):  # its time may be over before the first bytes come
            await late.read()
        await until(lambda: all(e.pins == 0 for e in service.store.residents))
    await service.settled()
    assert await service.fetch(entry) == data


async def test_an_entry_that_is_read_is_not_overwritten(start: Any, s: bytes) -> None:
    service = await start(memory=20 * MIB, disk=20 * MIB)
    data = tools.payload("read", 12 * MIB)
    await service.put([s], data)
    entry = (await service.find(s)).hits[0].entry
    async with grpc.aio.insecure_channel(service.address) as channel:
        call = kvcache_pb2_grpc.KVCacheServiceStub(channel).Fetch(pb.FetchRequest(key=entry.key), timeout=60)
        received = [(await call.read()).data]
        assert await service.client.delete([entry.key]) == 1
        with pytest.raises(errors.ResourceExhausted):
            await service.put([s, tools.digest("big")], tools.payload("big", 12 * MIB))
        assert (await service.put([s], tools.payload("again", 6 * MIB)))[1]
        while (message := await call.read()) is not grpc.aio.EOF:
            received.append(message.data)
    assert b"".join(received) == data


async def test_many_fetches_of_one_cold_entry_read_it_once(start: Any, s: bytes) -> None:
    service = await start(memory=2 * MIB, disk=16 * MIB)
    data = tools.payload("x", MIB)
    for name in ("x", "y", "z"):
        await service.put([s, tools.digest(name)], tools.payload(name, MIB))
        service.clock.now += 10
    entry = (await service.find(s, tools.digest("x"))).hits[1].entry
    assert entry.tier == "disk"
    assert await asyncio.gather(*(service.fetch(entry) for _ in range(8))) == [data] * 8
    assert service.store.counters.get("promotions", "memory") == 1


def segment(service: Any) -> Path:
    return Path(service.config.data_dir / "segments" / "000000.kv")


async def on_disk_only(service: Any, s: bytes) -> Any:
    """An entry of 600 kB that is in the disk tier alone, and another one that stays well."""
    for name in ("good", "bad"):
        await service.put([s, tools.digest(name)], tools.payload(name, 600_000))
    service.clock.now += 1
    await service.put([s, tools.digest("filler")], tools.payload("filler", MIB))
    await service.find(s, tools.digest("filler"))  # leased, it leaves no room to what a Lookup would take up
    entry = (await service.find(s, tools.digest("bad"))).hits[1].entry
    assert entry.tier == "disk"
    return entry


@pytest.mark.parametrize("at", [0, 1, 299_999, 599_999, None])
async def test_damage_on_disk_is_data_loss_and_deleted(start: Any, s: bytes, at: int | None) -> None:
    """at: where a bit is flipped; None: the segment is cut in the middle of the entry."""
    service = await start(memory=1 * MIB, disk=16 * MIB)
    entry = await on_disk_only(service, s)
    offset = service.store.residents.get(entry.key).places["disk"].offset
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
    assert (await service.find(s, tools.digest("bad"))).hits[1].kind is HitKind.MISS
    good = (await service.find(s, tools.digest("good"))).hits[1].entry
    assert await service.fetch(good) == tools.payload("good", 600_000)
    assert (await service.client.stats()).checksum_failures == 1 or at is None
    assert (await service.put([s, tools.digest("bad")], tools.payload("bad", 600_000)))[1]
    again = (await service.find(s, tools.digest("bad"))).hits[1].entry
    assert await service.fetch(again) == tools.payload("bad", 600_000)


async def test_a_disk_that_can_t_be_written_refuses_and_goes_on(start: Any, s: bytes) -> None:
    service = await start(memory=1 * MIB, disk=16 * MIB)
    entry = await on_disk_only(service, s)
    disk = service.store.residents.home
    writable = disk._files[0, "kv"]
    disk._files[0, "kv"] = os.open(segment(service), os.O_RDONLY)
    for size in (100, 9 * MIB):
        with pytest.raises(errors.ResourceExhausted, match="can't write the entry"):
            await service.put([s, tools.digest("new")], tools.payload("new", size))
    await service.settled()
    assert await service.fetch(entry) == tools.payload("bad", 600_000)
    os.close(disk._files[0, "kv"])
    disk._files[0, "kv"] = writable
    assert (await service.put([s, tools.digest("new")], tools.payload("new", 9 * MIB)))[1]
    assert (await service.client.stats()).puts_refused == 2


async def test_a_deadline_between_the_last_byte_and_the_half_close(
    start: Any, s: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's threads have ended the call, and the event loop has not heard of it yet."""
    service = await start()
    whole = frames.split

    def split(data: memoryview) -> Iterator[memoryview]:
        yield from whole(data)
        time.sleep(1.2)

    monkeypatch.setattr(frames, "split", split)
    with pytest.raises(errors.DeadlineExceeded):
        await service.client.put(
            namespace=tools.digest("namespace"), path=[s], tokens=1, base=0, data=memoryview(b"data"), timeout=1
        )
