"""LMCache itself with our L2 adapter: its storage manager and its server store through us, and find it again."""

import asyncio
import json
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.kvcache_service.adapters import engine_blobs
from fusionkv.kvcache_service.client import CacheClient
from tests.ports import free_port
from tests.system.cache_process import MIB
from tests.waiting import wait_until

pytest.importorskip("lmcache", reason="LMCache is not installed: make test-engines")

from lmcache.lmcache_native import Bitmap  # pyright: ignore[reportMissingImports]
from lmcache.v1.distributed.api import (  # pyright: ignore[reportMissingImports]
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (  # pyright: ignore[reportMissingImports]
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig  # pyright: ignore[reportMissingImports]
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry  # pyright: ignore[reportMissingImports]
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig  # pyright: ignore[reportMissingImports]
from lmcache.v1.distributed.storage_manager import StorageManager  # pyright: ignore[reportMissingImports]
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj  # pyright: ignore[reportMissingImports]
from lmcache.v1.multiprocess.custom_types import (  # pyright: ignore[reportMissingImports]
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory  # pyright: ignore[reportMissingImports]
from lmcache.v1.platform.event_notifier import consume_fd  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.system
SHAPE = torch.Size([2, 4, 256, 64])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
SECONDS = 2.0


def keys(count: int, salt: str = "", model: str = "m", start: int = 0) -> list[ObjectKey]:
    return [ObjectKey(n.to_bytes(32, "big"), model, 1, 0, salt) for n in range(start, start + count)]


def content(key: ObjectKey, size: int) -> torch.Tensor:
    """Bytes that no other key has."""
    seed = int.from_bytes(key.chunk_hash, "big") * 31 + sum(key.cache_salt.encode())
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def objects(
    of: list[ObjectKey], filled: bool, shape: torch.Size = SHAPE, dtype: torch.dtype = torch.bfloat16
) -> list[Any]:
    size = shape.numel() * dtype.itemsize
    made = []
    for key in of:
        data = content(key, size) if filled else torch.zeros(size, dtype=torch.uint8)
        metadata = MemoryObjMetadata(
            shape, dtype, 0, size, 1, 0, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[dtype]
        )
        made.append(TensorMemoryObj(data, metadata, None))
    return made


def config(address: str, **more: Any) -> PluginL2AdapterConfig:
    return PluginL2AdapterConfig.from_dict(
        {
            "module_path": "fusionkv.kvcache_service.adapters.lmcache",
            "class_name": "FusionKVL2Adapter",
            "adapter_params": {"cache": address, "seconds": SECONDS, **more},
        }
    )


@contextmanager
def adapter(address: str, **more: Any) -> Iterator[Any]:
    made = create_l2_adapter_from_registry(config(address, **more))
    try:
        yield made
    finally:
        made.close()


def wait(descriptor: int, take: Callable[[], Any]) -> Any:
    """What a task ends with, once its descriptor tells of it."""
    while not (result := take()) and not isinstance(result, Bitmap):
        ready, _, _ = select.select([descriptor], [], [], 20)
        assert ready, "no result"
        consume_fd(descriptor)
    return result


def store(made: Any, of: list[ObjectKey], **look: Any) -> Any:
    kept = objects(of, True, **look)  # the caller's, until the task has ended
    task = made.submit_store_task(of, kept)
    return wait(made.get_store_event_fd(), lambda: made.pop_completed_store_tasks())[task]


def look_up(made: Any, of: list[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> list[int]:
    task = made.submit_lookup_and_lock_task(of, {0: layout})
    found = wait(made.get_lookup_and_lock_event_fd(), lambda: made.query_lookup_and_lock_result(task))
    assert made.query_lookup_and_lock_result(task) is None  # once only
    return list(found.get_indices_list())


def load(made: Any, of: list[ObjectKey], **look: Any) -> list[int]:
    """Which are loaded, after a look at their bytes."""
    into = objects(of, False, **look)
    task = made.submit_load_task(of, into)
    loaded = list(wait(made.get_load_event_fd(), lambda: made.query_load_result(task)).get_indices_list())
    assert made.query_load_result(task) is None
    for at in loaded:
        assert torch.equal(into[at].raw_data, content(of[at], len(into[at].raw_data)))
    return loaded


def stats(address: str) -> Any:
    """Of a cache service."""

    async def asked() -> Any:
        client = CacheClient(address)
        try:
            return await client.stats()
        finally:
            await client.close()

    return asyncio.run(asked())


def test_stored_found_and_loaded_by_another(cache: str) -> None:
    given = keys(20) + keys(5, salt="s")
    with adapter(cache) as first, adapter(cache) as second:
        descriptors = {
            each()
            for one in (first, second)
            for each in (one.get_store_event_fd, one.get_lookup_and_lock_event_fd, one.get_load_event_fd)
        }
        assert len(descriptors) == 6
        result = store(first, given)
        assert result.is_successful()
        assert result.bytes_transferred() == 25 * MIB // 4
        assert store(first, given[:3]).bytes_transferred() == 0
        assert look_up(second, [*given, *keys(2, start=90)]) == [*range(25)]
        assert load(second, [*given, *keys(2, start=90)]) == [*range(25)]
        second.submit_unlock(given)


def test_two_threads_share_an_adapter(cache: str) -> None:
    """As LMCache's controllers do: one stores, the other looks up and loads."""
    batches = [keys(8, start=8 * n) for n in range(12)]
    with adapter(cache) as made, ThreadPoolExecutor(1) as storing:
        stored = storing.submit(lambda: [store(made, batch).is_successful() for batch in batches])
        for batch in batches:
            while len(look_up(made, batch)) < len(batch):
                pass
            assert load(made, batch) == [*range(8)]
        assert stored.result() == [True] * 12


def test_others_miss(cache: str) -> None:
    given = keys(3)
    with adapter(cache) as made:
        store(made, given)
        assert look_up(made, given) == [0, 1, 2]
        for layout in (
            MemoryLayoutDesc([SHAPE], [torch.float16]),
            MemoryLayoutDesc([torch.Size([2, 4, 64, 256])], [torch.bfloat16]),
        ):
            assert look_up(made, given, layout) == []
            assert load(made, given, shape=layout.shapes[0], dtype=layout.dtypes[0]) == []
        for others in (keys(3, salt="s"), keys(3, model="n")):
            assert look_up(made, others) == []
        for more in ({"tenant": "t"}, {"weights": "2"}):
            with adapter(cache, **more) as other:
                assert look_up(other, given) == []
                assert load(other, given) == []


def test_bytes_are_counted_by_salt(cache: str) -> None:
    size = MIB // 4
    with adapter(cache) as made:
        store(made, keys(4))
        store(made, keys(4))
        store(made, keys(2, salt="s"))
        assert dict(made.get_usage().bytes_by_cache_salt) == {"": 4 * size, "s": 2 * size}
        made.delete(keys(3) + keys(1, salt="none"))
        assert dict(made.get_usage().bytes_by_cache_salt) == {"": size, "s": 2 * size}
        assert look_up(made, keys(4)) == [3]


def test_a_lock_is_a_lease(cache: str) -> None:
    with adapter(cache) as made:
        store(made, keys(4))
        assert look_up(made, keys(6)) == [0, 1, 2, 3]
        assert look_up(made, keys(1)) == [0]
        assert look_up(made, keys(2, start=50)) == []
        wait_until(lambda: stats(cache).active_leases == 2)
        made.submit_unlock(keys(1))
        wait_until(lambda: stats(cache).active_leases == 1)
        made.submit_unlock(keys(3))
        made.submit_unlock(keys(1, start=60))
        assert load(made, keys(4)) == [0, 1, 2, 3]  # after the unlocks, in the order of their tasks
        assert stats(cache).active_leases == 1
        made.submit_unlock(keys(1, start=3))
        wait_until(lambda: stats(cache).active_leases == 0)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_faults_are_misses_in_time(start: Any, fault: signal.Signals, monkeypatch: Any) -> None:
    """Struck in the middle of loads; afterwards, the service is used again."""
    monkeypatch.setattr(engine_blobs, "_AWAY_SECONDS", 0.1)
    service, given = start(), keys(60)
    with adapter(service.address) as made:
        store(made, given)
        threading.Timer(0.3, lambda: service.process.send_signal(fault)).start()
        loaded, slowest = 60, 0.0
        while loaded == 60:  # `load` compares the bytes of those that are loaded
            began = time.monotonic()
            loaded = len(load(made, given))
            slowest = max(slowest, time.monotonic() - began)
        began = time.monotonic()
        assert look_up(made, given) == []
        assert not store(made, keys(60, start=100)).is_successful()
        made.submit_unlock(given)
        slowest = max(slowest, time.monotonic() - began)
        assert slowest < 2 * SECONDS + 2
        if fault == signal.SIGSTOP:
            service.process.send_signal(signal.SIGCONT)
        else:
            start()
        wait_until(lambda: len(load(made, given)) == 60)
        assert made.report_status()["is_healthy"]


def test_wrong_parameters() -> None:
    with pytest.raises(ValueError, match=r"adapter_params.adress is not one of cache, tenant, weights"):
        create_l2_adapter_from_registry(config("127.0.0.1:1", adress="x"))


@contextmanager
def manager(address: str) -> Iterator[StorageManager]:
    """LMCache's own storage: memory of 32 MiB, and our adapter below it."""
    memory = L1MemoryManagerConfig(32 * MIB, use_lazy=False, shm_name="")
    l2 = L2AdaptersConfig([config(address)])
    made = StorageManager(StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), l2))
    try:
        yield made
    finally:
        made.close()


def test_the_storage_manager_gets_from_us_what_another_stored(cache: str) -> None:
    given = keys(12)
    with manager(cache) as first, adapter(cache) as looking:
        reserved = first.reserve_write(given, LAYOUT)
        for key, each in reserved.items():
            each.raw_data[: each.get_size()].copy_(content(key, each.get_size()))
        first.finish_write(given)
        wait_until(lambda: len(look_up(looking, given)) == 12)
    with manager(cache) as second:
        spec = PrefetchTaskSpec([GroupedObjectKeys([*given, *keys(1, start=50)], 0, LAYOUT)])
        handle = second.submit_prefetch_task(spec)
        assert second.wait_prefetch_status(handle, 30)
        result = second.query_prefetch_status(handle)
        assert result is not None
        assert result.l2_hit_count == 12
        with second.read_prefetched_results(given) as found:
            assert found is not None
            for key, each in zip(given, found, strict=True):
                assert torch.equal(each.raw_data[: each.get_size()], content(key, each.get_size()))
        second.finish_read_prefetched(given)


class Server:
    """LMCache's server, with nothing of its own but memory, and its own client."""

    def __init__(self, address: str, log: Path) -> None:
        port = free_port()
        plugin = {"type": "plugin", **vars(config(address))}
        plugin = {name: value for name, value in plugin.items() if value is not None}
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "lmcache.v1.multiprocess.server", "--port", str(port),
                    "--chunk-size", "16", "--supported-transfer-mode", "engine_driven", "--shm-name", "",
                    "--l1-size-gb", "0.1", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--disable-observability",
                    "--l2-adapter", json.dumps(plugin),
                ],
                stdout=output, stderr=output,
            )  # fmt: skip
        self.client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        layout = RegisterEngineDrivenContextPayload(1, "m", 1, 16, 2, 64, "float32", use_mla=False)
        registered = self.client.register_kv_cache_engine_driven_context(layout)
        wait_until(lambda: registered.wait(0.1) or self.process.poll() is not None)
        assert self.process.poll() is None, log.read_text()

    def kill9(self) -> None:
        self.process.kill()
        self.process.wait()


def test_the_server_is_killed_and_reads_it_back(cache: str, tmp_path: Path) -> None:
    tokens = tuple(range(64))
    key = IPCCacheServerKey("m", 1, 0, tokens, 0, 64, "request", num_kv_readers=1)
    given = [torch.rand(2, 2, 16, 64) for _ in range(4)]
    first = Server(cache, tmp_path / "log")
    try:
        first.client.prepare_store(key, 1).result(timeout=30)
        assert first.client.commit_store(key, 1, pickle.dumps(given)).result(timeout=30)
        wait_until(lambda: stats(cache).puts == 4)
    finally:
        first.kill9()
    second = Server(cache, tmp_path / "log")
    try:
        second.client.lookup(key, 1).result(timeout=30)
        assert second.client.wait_prefetch_status("request", 30.0).result(timeout=60) == 4
        response = second.client.prepare_retrieve(key, 1).result(timeout=30)
        assert response.success
        for found, expected in zip(pickle.loads(response.data), given, strict=True):
            assert torch.equal(found, expected)
    finally:
        second.kill9()
