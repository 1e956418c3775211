"""The cache service as a process: restarts, kill -9, SIGTERM, limits of the machine."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest

from fusionkv.kvcache_service.__main__ import make_store
from fusionkv.kvcache_service.client import CacheClient, HitKind
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.keys import namespace
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.kvcache.v1 import kvcache_pb2_grpc
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from tests.commands import run_python
from tests.system.cache_process import MIB, MODULE, NAMESPACE, check_stopped, find, flags, get, path_to, payload, put
from tests.waiting import until

pytestmark = pytest.mark.system


@pytest.fixture
def start(launch: Any, tmp_path: Path) -> Any:
    """`start("--flag", ..., memory=, disk=)`: a service; another one later is over the same files."""
    return lambda *more, **sizes: launch(*flags(tmp_path / "data", *more, **sizes))


@pytest.mark.long
@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize(
    ("seed", "disk"),
    [
        (3, 40),
        *(pytest.param(seed, 512, marks=pytest.mark.slow) for seed in range(3)),
        *(pytest.param(seed, 40, marks=pytest.mark.slow) for seed in (4, 5)),
    ],
)
async def test_kill_9_in_the_middle_of_puts_loses_nothing_acknowledged(
    start: Any, cache_client: Any, tmp_path: Path, seed: int, disk: int, sealed: bool
) -> None:
    """Puts from 4 clients with deletes between; the process is killed with some in flight, three times.

    40 MiB of disk are far too few, so that space is given from entry to entry all the time.
    """
    (tmp_path / "keys").write_text("01" * 32)
    more = ("--disk-keys", str(tmp_path / "keys")) if sealed else ()
    rng = random.Random(seed)
    sizes = {i: rng.choice([100, 5_000, 300_000, 3 * MIB, 9 * MIB]) + i for i in range(160)}
    todo = list(sizes)  # far more than three rounds take
    acknowledged: set[int] = set()
    deleted: set[int] = set()
    interrupted = 0
    for _ in range(3):
        service = start(*more, disk=f"{disk}MiB")
        due = asyncio.Event()
        stop_at = len(todo) - rng.randint(5, 30)

        async def work(address: str, due: asyncio.Event, stop_at: int) -> None:
            nonlocal interrupted
            client = CacheClient(address)
            try:
                while todo:
                    name = todo.pop()
                    if len(todo) <= stop_at:
                        due.set()
                    with contextlib.suppress(errors.ResourceExhausted):
                        assert await put(client, name, payload(name, sizes[name]))
                        acknowledged.add(name)
                    if acknowledged and rng.random() < 0.1:
                        victim = rng.choice(sorted(acknowledged))
                        acknowledged.remove(victim)
                        entry = (await find(client, victim)).entry
                        if entry is not None:
                            await client.delete([entry.key])
                            deleted.add(victim)
            except errors.Unavailable:
                interrupted += 1
            finally:
                await client.close()

        workers = asyncio.gather(*(work(service.address, due, stop_at) for _ in range(4)))
        await due.wait()
        await asyncio.sleep(rng.uniform(0, 0.03))
        service.kill9()
        await workers
    assert interrupted >= 3
    if not sealed:
        await check_stopped(tmp_path / "data", disk * MIB)
    service = start(*more, disk=f"{disk}MiB")
    client = cache_client(service)
    present = 0
    for name, size in sizes.items():
        found = await get(client, name)
        if name in acknowledged and disk == 512:
            assert found == payload(name, size), f"entry {name} was acknowledged"
        elif name in deleted:
            assert found is None, f"the deletion of entry {name} was acknowledged"
        else:
            assert found in (None, payload(name, size)), f"entry {name} is torn"
        present += found is not None
    assert present > 3
    assert (await client.stats()).checksum_failures == 0
    assert service.stop() == 0


async def test_a_tenants_share_is_counted_right_after_kill_9(start: Any, cache_client: Any, tmp_path: Path) -> None:
    """Four clients of one tenant are cut off in puts that evict, three times; another's entries stay."""
    share, size = ("--tenant-share", "0.5"), 300_000
    ours, other = (namespace(b"model", {}, name) for name in ("ours", "other"))
    names, put_by_now = itertools.count(), 0

    async def put_one(client: CacheClient, tenant: bytes, name: object) -> bytes:
        fields = {"path": path_to(name), "tokens": 1, "base": 0, "data": memoryview(payload(name, size))}
        return (await client.put(namespace=tenant, timeout=30, **fields))[0]  # type: ignore[arg-type]

    async def put_many(client: CacheClient) -> None:
        nonlocal put_by_now
        with contextlib.suppress(errors.Unavailable):
            while True:
                await put_one(client, ours, next(names))
                put_by_now += 1

    service = start(*share, disk="16MiB")
    kept = [await put_one(cache_client(service), other, f"kept {n}") for n in range(16)]
    for _ in range(3):
        enough = put_by_now + 60
        work = asyncio.gather(*(put_many(cache_client(service)) for _ in range(4)))
        await until(lambda enough=enough: put_by_now >= enough)
        service.kill9()
        await work
        store = make_store(Config(data_dir=tmp_path / "data", disk_bytes=16 * MIB, tenant_share=0.5))
        await store.open()
        store.check_integrity(idle=True)
        tenants = [entry.record.namespace for entry in store.entries]
        # A place has a multiple of 4096 bytes; an entry that was being put when the process ended is not there.
        assert 8 * MIB // 303_104 - 4 <= tenants.count(ours) <= 8 * MIB // 303_104
        assert all(store.entries.get(key) is not None for key in kept)
        await store.close()
        service = start(*share, disk="16MiB")


async def test_sigterm_lets_a_put_in_flight_finish(start: Any, cache_client: Any) -> None:
    service = start("--drain-seconds", "60")
    data = payload("late", 2 * MIB)
    async with grpc.aio.insecure_channel(service.address) as channel:
        call = kvcache_pb2_grpc.KVCacheServiceStub(channel).Put(timeout=30)
        entry = {"namespace": NAMESPACE, "path": path_to("late"), "size_bytes": len(data), "tokens": 1}
        await call.write(pb.PutRequest(header=pb.PutHeader(**entry, checksum=checksum_of(data))))
        await call.initial_metadata()  # the service has taken the call: one that it has not is not in flight
        await call.write(pb.PutRequest(data=data[:MIB]))
        service.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(service.wait_for_line, "is draining")
        await call.write(pb.PutRequest(data=data[MIB:]))
        await call.done_writing()
        assert (await call).outcome == pb.PutResponse.OUTCOME_STORED
    assert await asyncio.to_thread(service.stop) == 0
    assert "stopped" in service.log
    assert await get(cache_client(start()), "late") == data


async def test_a_stale_socket_is_replaced_and_a_live_one_not(start: Any, cache_client: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    listen = ("--listen", f"unix:{path}")
    start(*listen).kill9()
    assert stat.S_ISSOCK(os.stat(path).st_mode), "kill -9 leaves the socket file"
    service = start(*listen)
    second = run_python("-m", *flags(tmp_path / "other"), *listen, status=1)
    assert "another process serves there" in second.stderr
    assert await put(cache_client(service), "x", b"abc")
    service.stop()
    path.write_text("a file")
    third = run_python("-m", *flags(tmp_path / "data"), *listen, status=1)
    assert "the file is no socket" in third.stderr


def test_clear_errors_at_start(start: Any, tmp_path: Path) -> None:
    service = start()
    cases = [
        (flags(tmp_path / "data"), 1, f"in use by process {service.process.pid}: give each cache service a data_dir"),
        (
            [*flags(tmp_path / "new"), "--listen", service.address],
            1,
            f"{service.address} is in use by another program",
        ),
        (
            [*flags(tmp_path / "new"), "--data-port", service.address.rpartition(":")[2]],
            1,
            f"{service.address} is in use by another program: stop it, or set another address with --data-port",
        ),
        ([*flags(tmp_path / "new"), "--listen", "foo"], 1, "--listen foo: an address is host:port, such as"),
        (
            [*flags(tmp_path / "new"), "--listen", f"unix:/tmp/{'s' * 100}"],
            1,
            "s.data: the path of a unix socket has at most 107 bytes, not 110",
        ),
        ([*flags(tmp_path / "new"), "--max-path", "0"], 2, "outside 1..65535"),
        (flags(Path("/proc/nowhere")), 1, "/proc/nowhere"),
    ]
    for argv, status, text in cases:
        done = run_python("-m", *argv, status=status)
        assert text in done.stderr
        assert "Traceback" not in done.stderr
    help = run_python("-m", MODULE, "--help")
    assert "(default: 127.0.0.1:7070)" in " ".join(help.stdout.split())


async def test_without_a_disk_tier_nothing_is_written(start: Any, cache_client: Any, tmp_path: Path) -> None:
    service = start(disk="0")
    client = cache_client(service)
    assert await put(client, "x", b"abc")
    assert await get(client, "x") == b"abc"
    assert not (tmp_path / "data").exists()
    service.kill9()
    assert (await find(cache_client(start(disk="0")), "x")).kind is HitKind.MISS
