"""What tests of a cache service process share: its flags, entries put and got, and a look at what it left."""

import hashlib
import random
from pathlib import Path
from typing import Any

from fusionkv.kvcache_service.__main__ import make_store
from fusionkv.kvcache_service.client import CacheClient, Hit
from fusionkv.kvcache_service.config import Config
from tests.conftest import Service

MODULE = "fusionkv.kvcache_service"
MIB = 1 << 20
NAMESPACE = hashlib.sha256(b"namespace").digest()
SYSTEM = hashlib.sha256(b"S").digest()


def chunk(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def path_to(name: object) -> list[bytes]:
    return [SYSTEM, chunk(name)]


def payload(name: object, size: int) -> bytes:
    return random.Random(repr(name)).randbytes(size)


def flags(data: Path, *more: str, memory: str = "4MiB", disk: str = "256MiB") -> list[str]:
    return [
        MODULE, "--data-dir", str(data), "--listen", "127.0.0.1:0",
        "--memory-bytes", memory, "--disk-bytes", disk, *more,
    ]  # fmt: skip


async def put(client: CacheClient, name: object, data: bytes, timeout: float = 30) -> bool:
    fields = {"namespace": NAMESPACE, "path": path_to(name), "tokens": 1, "base": 0, "timeout": timeout}
    return (await client.put(**fields, data=memoryview(data)))[1]  # type: ignore[arg-type]


async def find(client: CacheClient, name: object, timeout: float = 10, lease_ms: int = 1) -> Hit:
    path = [(part, ()) for part in path_to(name)]
    return (await client.lookup(NAMESPACE, path, lease_ms=lease_ms, timeout=timeout)).hits[1]


async def get(client: CacheClient, name: object, **more: Any) -> bytes | None:
    """The bytes of an entry, None where there is none."""
    entry = (await find(client, name, **more)).entry
    if entry is None:
        return None
    buffer = bytearray(entry.size)
    await client.fetch(entry, memoryview(buffer), timeout=30)
    return bytes(buffer)


def check_refused(service: Service, reason: str) -> None:
    """Waits for a process that can't serve; the last line of its log says why."""
    try:
        assert service.wait() == 1, service.log
        assert "Traceback" not in service.log, service.log
        assert reason in service.log.splitlines()[-1], service.log
    finally:
        service.kill9()


async def check_stopped(data: Path, disk: int = 256 * MIB) -> int:
    """Opens what a stopped process left, asserts that all of it agrees; gives the number of entries."""
    store = make_store(Config(data_dir=data, disk_bytes=disk, memory_bytes=MIB))
    await store.open()
    try:
        store.check_integrity(idle=True)
        return len(store.entries)
    finally:
        await store.close()
