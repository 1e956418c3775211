"""Measures the speed of the cache service against its limits: `python -m fusionkv.bench.cache.bench`.

Every row is measured next to a bare gRPC server in a separate process, which streams the same frames from a buffer
and drops received ones: no checksums, no tiers, no OpenTelemetry. memcpy of the same size is the physical limit. The
disk tier's files are in the page cache. "fetch shared" copies from the service's memory without a stream. "fetch
extent" reads the disk tier's files; its limit is preadv of the same bytes, one entry after another. These two and
their limits never wait, and are given in CPU time, which depends little on other load. "fetch cold" is "fetch extent"
of files that are not in the page cache, in wall time.
"""

import argparse
import asyncio
import hashlib
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from fusionkv.bench import command
from fusionkv.bench.cache.bench_floor import FloorClient, drop_pages, memcpy, preadv, serve
from fusionkv.bench.cache.peers import Process
from fusionkv.bench.services.process import cpu_seconds
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.checksum import checksum

KIB, MIB = 1 << 10, 1 << 20
SYSTEM = hashlib.sha256(b"system prompt").digest()
NAMESPACE = hashlib.sha256(b"bench").digest()
# Bytes of an entry, and number of concurrent calls.
SIZES = [(64 * MIB, 1), (8 * MIB, 1), (8 * MIB, 16), (100 * KIB, 1), (100 * KIB, 16)]
# Ways to fetch without a stream, and the tier of the entries.
_HERE = {"shared": "memory", "extent": "disk", "cold": "disk"}


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement. Speeds are GB/s over the wall time of all calls of a round, median of the rounds."""

    operation: str
    transport: str
    entry_bytes: int
    at_once: int
    gb_per_s: float
    grpc_gb_per_s: float
    """Speed of the bare gRPC server with the same transport, size and concurrency."""
    memcpy_gb_per_s: float
    """Speed of memcpy; for `fetch extent` and `fetch cold`, of preadv."""
    cpu_s_per_gb: float
    """CPU time of the service per GB, which hardly depends on other load, unlike the speeds."""
    grpc_cpu_s_per_gb: float


class Bench:
    """The measurements of one transport, with two services and the bare server.

    The service for rows of the disk tier has 1 MiB of memory, which a hot entry fills.
    """

    def __init__(
        self, transport: str, addresses: Sequence[str], pids: Sequence[int], folder: Path, rounds: int
    ) -> None:
        """folder: directory of the second service's files."""
        self.transport, self.folder, self.pids, self.rounds = transport, folder, pids, rounds
        self.service, self.disk_service = map(CacheClient, addresses[:2])
        self.floor = FloorClient(addresses[2])
        self.source = memoryview(os.urandom(64 * MIB))
        self.count = 0
        self.lease = 0

    async def close(self) -> None:
        await self.service.close()
        await self.disk_service.close()
        await self.floor.close()

    async def warm_up(self) -> None:
        """Writes all space that the rows use once: new pages of memory and files cost 0.6 and 2 s/GB more."""
        for client in (self.disk_service, self.service):
            self.client = client
            for _ in range(2 + self.rounds):
                await self._put(64 * MIB)
            await self.client.delete(namespace=NAMESPACE)

    async def row(self, operation: str, size: int, at_once: int, tier: str = "") -> Row:
        """Measures an operation. Service and bare server alternate, so that both see the same load."""
        into = [memoryview(bytearray(size)) for _ in range(at_once)]
        on_disk, from_file = _HERE.get(tier, tier) == "disk", _HERE.get(tier) == "disk"
        # Wall time where reads wait for a device.
        clock = time.process_time if tier in _HERE and tier != "cold" else time.perf_counter
        self.client = self.disk_service if on_disk else self.service
        await self.client.delete(namespace=NAMESPACE)
        run = self._put if operation == "put" else self._fetch
        entries = [] if operation == "put" else await self._entries(size, at_once, tier)
        pid, floor_pid = self.pids[on_disk], self.pids[2]
        speeds, floor_speeds, copies, cpu, floor_cpu = [], [], [], 0.0, 0.0
        files = self._open_extents(entries) if from_file else []

        def copy() -> None:
            if tier == "cold":
                self._cool()
            copies.append(preadv(into, files, clock) if from_file else memcpy(into, self.source))

        for i in range(self.rounds + 1):
            before, floor_before = cpu_seconds(pid), cpu_seconds(floor_pid)
            work = (run(size, into[n], entries[n] if entries else None) for n in range(at_once))
            # A virtual disk may cache what was just read, so the order alternates between rounds.
            if tier == "cold" and i % 2:
                copy()
            if tier == "cold":
                self._cool()
            took = await self._timed(work, clock)
            floor_took = await self._timed(
                self.floor.put(self.source[:size]) if operation == "put" else self.floor.get(buffer)
                for buffer in into
            )
            if i:  # the first round warms up
                speeds.append(size * at_once / took / 1e9)
                floor_speeds.append(size * at_once / floor_took / 1e9)
                if tier != "cold" or i % 2 == 0:
                    copy()
                cpu += cpu_seconds(pid) - before
                floor_cpu += cpu_seconds(floor_pid) - floor_before
        for file, _ in files:
            os.close(file)
        gb, floor_gb, memcpy_gb = map(statistics.median, (speeds, floor_speeds, copies))
        if self.lease:
            await self.client.release(self.lease)
        moved = size * at_once * self.rounds / 1e9
        name = f"{operation} {tier}".strip()
        cpus = cpu / moved, floor_cpu / moved
        return Row(name, self.transport, size, at_once, gb, floor_gb, memcpy_gb, *cpus)

    async def _timed(self, work: Any, clock: Callable[[], float] = time.perf_counter) -> float:
        tasks = list(work)
        start = clock()
        await asyncio.gather(*tasks)
        return clock() - start

    async def _entries(self, size: int, count: int, tier: str) -> list[Entry]:
        """Stores `count` entries and looks them up, in the given tier."""
        expected = _HERE.get(tier, tier)
        if expected == "disk":
            filler = await self._put(MIB)
            for _ in range(100):
                await self._find([filler])
            await self._fetch(MIB, memoryview(bytearray(MIB)), (await self._find([filler]))[0])
        # In-place copies and reads need a lease that lasts; a lease of 1 ms has expired, so the bytes are streamed.
        lease_ms = 600_000 if tier in _HERE else 1
        entries = await self._find([await self._put(size) for _ in range(count)], lease_ms)
        wrong = [entry.tier for entry in entries if entry.tier != expected]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {count} entries are in {wrong[0]}, not in {expected}")
        return entries

    def _open_extents(self, entries: Sequence[Entry]) -> list[tuple[int, int]]:
        """File descriptors and offsets of the entries; the caller closes the files."""
        places = []
        for segment, offset in (entry.extent for entry in entries if entry.extent is not None):
            (path,) = self.folder.rglob(f"segments/{segment:06d}.*")
            places.append((os.open(path, os.O_RDONLY), offset))
        return places

    def _cool(self) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    drop_pages(file.fileno())

    async def _find(self, names: Sequence[bytes], lease_ms: int = 1) -> list[Entry]:
        path: list[tuple[bytes, Sequence[bytes]]] = [(SYSTEM, ()), *((name, ()) for name in names)]
        found = await self.client.lookup(NAMESPACE, path, lease_ms=lease_ms, timeout=30)
        self.lease = found.lease
        return [hit.entry for hit in found.hits[1:] if hit.entry is not None]

    async def _put(self, size: int, _: object = None, __: object = None) -> bytes:
        self.count += 1
        name = hashlib.sha256(f"{self.transport} {self.count}".encode()).digest()
        await self.client.put(
            namespace=NAMESPACE, path=[SYSTEM, name], tokens=1, base=0, data=self.source[:size], timeout=60
        )
        return name

    async def _fetch(self, size: int, into: memoryview, entry: Entry | None) -> None:
        assert entry is not None
        await self.client.fetch(entry, into, timeout=60)


async def measure(
    addresses: dict[str, tuple[str, ...]], pids: Sequence[int], folder: Path, rounds: int, done: Callable[[], None]
) -> list[Row]:
    """Measures a row for every size, transport and operation. folder: directory of the second service's files."""
    rows = []
    for transport, at in addresses.items():
        bench = Bench(transport, at, pids, folder, rounds)
        try:
            await bench.warm_up()
            for size, at_once in SIZES:
                here = _HERE if transport == "unix" else ()
                for operation, tier in [("put", ""), *(("fetch", tier) for tier in ("memory", "disk", *here))]:
                    rows.append(await bench.row(operation, size, at_once, tier))
                    done()
        finally:
            await bench.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser_of("cache.bench", __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each row, median reported (default: 8)")
    parser.add_argument("--serve-floor", nargs="+", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve_floor:
        asyncio.run(serve(options.serve_floor))
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="fusionkv-bench") as directory,
        Progress(transient=True) as progress,
        ExitStack() as stack,
    ):
        task = progress.add_task("rows", total=9 * len(SIZES))
        processes = []
        for name, memory in [("service", "256MiB"), ("disk", "1MiB"), ("floor", "")]:
            listen = ["127.0.0.1:0", f"unix:{directory}/{name}.sock"]
            module = ["fusionkv.bench.cache.bench", "--serve-floor", *listen] if name == "floor" else [
                "fusionkv.kvcache_service", "--data-dir", f"{directory}/{name}", "--memory-bytes", memory,
                "--disk-bytes", "1GiB", "--listen", ",".join(listen),
            ]  # fmt: skip
            process = Process(Path(directory), sys.executable, "-P", "-m", *module)
            stack.callback(process.stop)
            processes.append(process)
        tcp, unix = zip(*(process.addresses for process in processes), strict=True)
        pids, folder = [process.pid for process in processes], Path(directory, "disk")
        transports = {"tcp": tcp, "unix": unix}
        rows = asyncio.run(measure(transports, pids, folder, options.rounds, lambda: progress.advance(task)))
    _show(rows)
    command.write([asdict(row) for row in rows], options.json)
    return 0


def _show(rows: Sequence[Row]) -> None:
    hashing = 64 * MIB / statistics.median(timeit.repeat(partial(checksum, bytearray(64 * MIB)), number=1)) / 1e9
    numbers = ("entry", "at once", "GB/s", "bare gRPC", "of it", "memcpy", "of it", "CPU s/GB", "bare")
    lines = []
    for row in rows:
        size = f"{row.entry_bytes // MIB} MiB" if row.entry_bytes >= MIB else f"{row.entry_bytes // KIB} KiB"
        lines.append((
            row.operation, row.transport, size, row.at_once, f"{row.gb_per_s:.2f}",
            f"{row.grpc_gb_per_s:.2f}", f"{row.gb_per_s / row.grpc_gb_per_s:.0%}", f"{row.memcpy_gb_per_s:.1f}",
            f"{row.gb_per_s / row.memcpy_gb_per_s:.0%}",
            f"{row.cpu_s_per_gb:.2f}", f"{row.grpc_cpu_s_per_gb:.2f}",
        ))  # fmt: skip
    title = f"{os.cpu_count()} CPUs; checksums {hashing:.1f} GB/s"
    command.show(command.table(title, ("operation", "over", *numbers), lines, texts=2))


if __name__ == "__main__":
    sys.exit(main())
