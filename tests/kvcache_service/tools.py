"""A store over real tiers, and a real server over it, in the test's own process; what is put into it."""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.__main__ import start_file_servers
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.data_plane.listener import DataPlane
from fusionkv.kvcache_service.index.index import Index
from fusionkv.kvcache_service.index.record import EntryRecord, make
from fusionkv.kvcache_service.remote.sharing import Sharing
from fusionkv.kvcache_service.remote.tier import RemoteEngine, RemoteTier
from fusionkv.kvcache_service.servicer import KVCacheServicer, handler
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.base import Place, Tier
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.sealed_disk import DiskKeys, SealedDiskTier
from fusionkv.protos.kvcache.v1 import kvcache_pb2_grpc
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.checksum import checksum
from fusionkv.protos.runtime.tls import ClientTLS, ServerTLS
from tests.conftest import Authority
from tests.services import listening
from tests.system.cache_process import MIB as MIB
from tests.system.cache_process import NAMESPACE as NAMESPACE
from tests.system.cache_process import payload as payload
from tests.waiting import until


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def named(part: str | bytes) -> bytes:
    """A digest, or that of a name."""
    return digest(part) if isinstance(part, str) else part


def path(names: str) -> list[bytes]:
    """Digests by names of one letter: the system prompt S, then chunks."""
    return [name.encode() * 32 for name in names]


@dataclass
class Clock:
    """A clock that stands still until it is told to move."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Caller:
    """A caller of a cache service. Elements of paths are names or digests."""

    client: CacheClient

    async def put(self, path: Sequence[str | bytes], data: bytes, **more: Any) -> tuple[bytes, bool]:
        fields = {"namespace": NAMESPACE, "tokens": 7, "base": 3, "timeout": 30.0, **more}
        return await self.client.put(path=[named(part) for part in path], data=memoryview(data), **fields)

    async def find(self, *path: str | bytes | tuple[str | bytes, list[bytes]], **more: Any) -> Any:
        elements = [part if isinstance(part, tuple) else (part, []) for part in path]
        asked = [(named(part), variants) for part, variants in elements]
        return await self.client.lookup(NAMESPACE, asked, **{"timeout": 10.0, **more})

    async def entry(self, *path: str | bytes, **more: Any) -> Any:
        """What is found of the last element; None if nothing is."""
        return (await self.find(*path, **more)).hits[-1].entry

    async def fetch(self, entry: Any) -> bytes:
        buffer = bytearray(entry.size)
        await self.client.fetch(entry, memoryview(buffer), timeout=30)
        return bytes(buffer)

    async def get(self, *path: str | bytes) -> bytes:
        return await self.fetch(await self.entry(*path))

    async def fetched(self, entry: Any) -> tuple[bytes, int]:
        """The bytes of an entry, and how many of them the service streamed."""
        before = (await self.client.stats()).bytes_fetched
        return await self.fetch(entry), (await self.client.stats()).bytes_fetched - before


@dataclass
class Service(Caller):
    """A store and a server over it, with a caller and gRPC's own client; the clocks are the test's."""

    stub: kvcache_pb2_grpc.KVCacheServiceStub
    config: Config
    store: Store
    clock: Clock
    sharing: Sharing | None
    plane: DataPlane
    tls: ClientTLS | None

    def chunks(self, tier: str) -> set[bytes]:
        """The chunks of the entries that are in a tier."""
        return {entry.record.chunk for entry in self.store.entries if tier in entry.places}

    def count(self, name: str, tier: str = "memory") -> int:
        return self.store.counters.get(name, tier)

    async def settled(self) -> None:
        """Waits until nothing is under way, then asserts that everything agrees."""
        store = self.store
        await until(
            lambda: not (store.work.tasks or store.reader.reads or store.reader.prefetching or reserved(store))
        )
        await until(lambda: all(entry.pins == 0 for entry in (*store.entries, *store.entries.withdrawn)))
        self.store.check_integrity(idle=True)


def make_tiers(directory: Path, memory: int, disk: int, keys: DiskKeys | None = None) -> list[Tier]:
    disks = [SealedDiskTier(directory, disk, keys) if keys else DiskTier(directory, disk)] if disk else []
    return [MemoryTier(memory), *disks]


@asynccontextmanager
async def data_plane(
    servicer: KVCacheServicer, address: str, tls: ServerTLS | None = None
) -> AsyncIterator[DataPlane]:
    """Serves the data plane of a service at this address."""
    plane = DataPlane("data", servicer, [address], tls=tls)
    servicer.admit = plane.admit
    await plane.start()
    try:
        yield plane
    finally:
        await plane.stop(5.0)


@asynccontextmanager
async def serving(
    directory: Path,
    memory: int = 4 * MIB,
    disk: int = 16 * MIB,
    engine: RemoteEngine | None = None,
    opened: bool = True,
    authority: Authority | None = None,
    keys: DiskKeys | None = None,
    **more: Any,
) -> AsyncIterator[Service]:
    """engine: what its remote tier stands on, if it is to have one. opened: its index is loaded before it serves.

    authority: of its certificate, if it has TLS.

    keys: encrypt its disk tier.
    """
    clock = Clock()
    remote = {"remote_lookup_ms": 5000, "remote_ttl_seconds": 0.4}
    config = Config(memory_bytes=memory, disk_bytes=disk, data_dir=directory, **{**remote, **more})
    store = Store(config, make_tiers(directory, memory, disk, keys), clock=clock, wall=clock)
    loading = asyncio.create_task(store.open())
    if opened:
        await loading
    sharing = Sharing(store, RemoteTier(engine)) if engine is not None else None
    writing = asyncio.create_task(sharing.run()) if sharing is not None else None
    try:
        servicer = KVCacheServicer(store, sharing)
        tls, trust = (ServerTLS(*authority.issue("service")), ClientTLS(authority.ca)) if authority else (None, None)
        async with (
            listening(handler(servicer), tls=tls) as at,
            data_plane(servicer, at, tls) as plane,
            rpc.dial(at, tls=trust, traced=False) as channel,
        ):
            client, stub = CacheClient(at, trust), kvcache_pb2_grpc.KVCacheServiceStub(channel)
            try:
                yield (service := Service(client, stub, config, store, clock, sharing, plane, trust))
                await service.settled()
            finally:
                await client.close()
    finally:
        if sharing is not None and writing is not None:
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing
            await sharing.close()
        await loading
        await store.close()


def write(tier: Tier, data: bytes) -> Place:
    """Reserves room for bytes without taking any from others, and writes them."""
    place, freed = tier.reserve(len(data))
    assert freed == []
    tier.write(place, 0, [memoryview(data)])
    return place


def disk_keys(file: Path, *raw: bytes) -> DiskKeys:
    """Keys that are written to a file."""
    file.write_text("\n".join(key.hex() for key in raw) + "\n")
    return DiskKeys(file)


def record(
    of: str | list[bytes], data: bytes = b"data", variant: bytes = b"", namespace: bytes = NAMESPACE, **more: Any
) -> EntryRecord:
    """Of an entry with these bytes; `of`: its path, or the path's names of one letter."""
    elements = path(of) if isinstance(of, str) else of
    return make(namespace, elements, variant, len(data), 7, 3, checksum(data), **more)


@asynccontextmanager
async def nearby(service: Service, socket: Path, *, send_file: bool = True) -> AsyncIterator[Caller]:
    """Serves an open service on a unix socket too, with memory and files handed over beside it; a caller there."""
    address = f"unix:{socket}"
    servicer = KVCacheServicer(service.store, service.sharing)
    async with listening(handler(servicer), address), data_plane(servicer, address):
        doors = start_file_servers(replace(service.config, listen=(address,)), service.store) if send_file else []
        client = CacheClient(address)
        try:
            yield Caller(client)
        finally:
            await client.close()
            for door in doors:
                door.close()


def hanging(service: Service, call: str, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Lets no call of this name to the data plane end; an event that such a call sets."""
    asked = asyncio.Event()

    async def hang(request: Any, *, near: bool, waiting: Any = nullcontext) -> Any:
        asked.set()
        with waiting():
            await asyncio.sleep(60)

    monkeypatch.setattr(service.plane._service.lookups, call, hang)
    return asked


def index_of(*entries: EntryRecord) -> Index:
    index = Index()
    for one in entries:
        index.add(one)
    index.check_integrity()
    return index


def common(one: str, other: str) -> int:
    """The length of the longest common suffix."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])


def reserved(store: Store) -> int:
    """Number of reserved places."""
    return sum(len(contents.reserved) for contents in store.residents.contents.values())


def stored(store: Store) -> set[str]:
    """Paths of a store's entries, of names of one letter."""
    trails = (entry.record.trail for entry in store.entries)
    return {"".join(chr(byte) for byte in trail[::-32]) for trail in trails}
