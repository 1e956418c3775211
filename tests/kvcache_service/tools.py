"""A store over real tiers, and a real server over it, in the test's own process; what is put into it."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.index.record import Record, make
from fusionkv.kvcache_service.remote.sharing import Sharing
from fusionkv.kvcache_service.remote.tier import Engine, RemoteTier
from fusionkv.kvcache_service.servicer import KVCacheServicer, handler
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.base import Tier
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.protos.runtime.checksum import checksum
from tests.waiting import until

KIB, MIB = 1 << 10, 1 << 20


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def path(names: str) -> list[bytes]:
    """Digests by names of one letter: the system prompt S, then chunks."""
    return [name.encode() * 32 for name in names]


def payload(seed: object, size: int) -> bytes:
    return random.Random(repr(seed)).randbytes(size)


@dataclass
class Clock:
    """A clock that stands still until it is told to move."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Service:
    """A store and a server over it; the clocks are the test's."""

    config: Config
    store: Store
    address: str
    client: CacheClient
    clock: Clock
    sharing: Sharing | None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def put(self, path: list[bytes], data: bytes, **more: Any) -> tuple[bytes, bool]:
        fields = {"namespace": digest("namespace"), "tokens": 7, "base": 3, "timeout": 30.0, **more}
        return await self.client.put(path=path, data=memoryview(data), **fields)

    async def find(self, *path: bytes | tuple[bytes, list[bytes]], **more: Any) -> Any:
        elements = [part if isinstance(part, tuple) else (part, []) for part in path]
        return await self.client.lookup(digest("namespace"), elements, **{"timeout": 10.0, **more})

    async def fetch(self, entry: Any) -> bytes:
        buffer = bytearray(entry.size)
        await self.client.fetch(entry, memoryview(buffer), timeout=30)
        return bytes(buffer)

    async def settled(self) -> None:
        """Waits until nothing is under way, then asserts that everything agrees."""
        residents = self.store.residents
        store = self.store
        await until(lambda: not (store.tasks or store.loading or store.prefetching or residents._reserved))
        await until(lambda: all(entry.pins == 0 for entry in residents.all()))
        self.store.check_integrity()
        residents.check_idle()


def make_tiers(directory: Path, memory: int, disk: int) -> list[Tier]:
    return [MemoryTier(memory), *([DiskTier(directory, disk)] if disk else [])]


@asynccontextmanager
async def serving(
    directory: Path,
    memory: int = 4 * MIB,
    disk: int = 16 * MIB,
    engine: Engine | None = None,
    opened: bool = True,
    **more: Any,
) -> AsyncIterator[Service]:
    """engine: what its remote tier stands on, if it is to have one. opened: its index is loaded before it serves."""
    clock = Clock()
    remote = {"remote_lookup_ms": 5000, "remote_ttl_seconds": 0.4}
    config = Config(memory_bytes=memory, disk_bytes=disk, data_dir=directory, **{**remote, **more})
    store = Store(config, make_tiers(directory, memory, disk), clock=clock, wall=clock)
    loading = asyncio.create_task(store.open())
    if opened:
        await loading
    sharing = Sharing(store, RemoteTier(engine)) if engine is not None else None
    writing = asyncio.create_task(sharing.run()) if sharing is not None else None
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(KVCacheServicer(store, config, sharing)),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = CacheClient(f"127.0.0.1:{port}")
    service = Service(config, store, f"127.0.0.1:{port}", client, clock, sharing)
    try:
        yield service
        await service.settled()
    finally:
        await client.close()
        await server.stop(1)
        if sharing is not None and writing is not None:
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing
            await sharing.close()
        await loading
        await store.close()


def record(path: list[bytes], data: bytes, variant: bytes = b"") -> Record:
    """Of an entry of the tests' namespace."""
    return make(digest("namespace"), path, variant, len(data), 7, 3, checksum(data))
