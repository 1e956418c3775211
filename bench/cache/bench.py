"""Measures what a client on the cache service's machine fetches: `python -m fusionkv.bench.cache.bench`.

"fetch shared" copies from the service's memory; its limit is memcpy of the same size. "fetch extent" reads the
disk tier's files, which are in the page cache; its limit is preadv of the same bytes, one entry after another.
Neither waits, and times are CPU time, which depends little on other load. "fetch cold" is "fetch extent" of
files that are not in the page cache, in wall time. `fusionkv.bench.cache.peers` measures puts, and fetches over
a stream.
"""

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

from rich.progress import Progress

from fusionkv.bench import command
from fusionkv.bench.services.process import Process
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.checksum import checksum

KIB, MIB = 1 << 10, 1 << 20
SYSTEM = hashlib.sha256(b"system prompt").digest()
NAMESPACE = hashlib.sha256(b"bench").digest()
# Bytes of an entry, and number of concurrent calls.
SIZES = [(64 * MIB, 1), (8 * MIB, 1), (8 * MIB, 16), (100 * KIB, 1), (100 * KIB, 16)]
WAYS = ("shared", "extent", "cold")
# In place of the default: the memory tier of the service whose entries are fetched from disk, which a hot one fills.
_TINY = MIB


@dataclass(frozen=True, slots=True)
class Row:
    """A way to fetch. Speeds are GB/s over all calls of a round, median of the rounds.

    Attributes:
        limit_gb_per_s: of memcpy for "shared", of preadv for others.
    """

    way: str
    entry_bytes: int
    at_once: int
    gb_per_s: float
    limit_gb_per_s: float


class Bench:
    """The measurements of one service."""

    def __init__(self, address: str, folder: Path, rounds: int) -> None:
        """folder: directory of the service's files."""
        self.client, self.folder, self.rounds = CacheClient(address), folder, rounds
        self.source = memoryview(os.urandom(64 * MIB))
        self.count = 0

    async def warm_up(self) -> None:
        """Writes all space that the rows use once: new pages of memory and files cost 0.6 and 2 s/GB more."""
        for _ in range(2 + self.rounds):
            await self._put(64 * MIB)
        await self.client.delete(namespace=NAMESPACE)

    async def row(self, way: str, size: int, at_once: int) -> Row:
        """Measures a way to fetch. It alternates with its limit, so that both see the same load."""
        into = [memoryview(bytearray(size)) for _ in range(at_once)]
        cold, clock = way == "cold", time.perf_counter if way == "cold" else time.process_time
        await self.client.delete(namespace=NAMESPACE)
        entries, lease = await self._entries(size, at_once, way)
        limit: Callable[[], object] = partial(self._copy, into)
        files = [] if way == "shared" else self._open_extents(entries)
        if files:
            limit = partial(_read, into, files)
        took, limits = [], []
        for i in range(self.rounds + 1):
            # A virtual disk may cache what was just read, so the order alternates between rounds.
            if cold and i % 2:
                limits.append(self._timed(limit, clock, cold))
            if cold:
                self._cool()
            start = clock()
            await asyncio.gather(*(self.client.fetch(e, b, timeout=60) for e, b in zip(entries, into, strict=True)))
            if i:  # the first round warms up
                took.append(clock() - start)
                if not (cold and i % 2):
                    limits.append(self._timed(limit, clock, cold))
        for file, _ in files:
            os.close(file)
        await self.client.release(lease)
        speeds = (size * at_once / 1e9 / statistics.median(seconds) for seconds in (took, limits))
        return Row(way, size, at_once, *speeds)

    def _timed(self, limit: Callable[[], object], clock: Callable[[], float], cold: bool) -> float:
        if cold:
            self._cool()
        start = clock()
        limit()
        return clock() - start

    def _copy(self, into: Sequence[memoryview]) -> None:
        """Fills buffers by plain copies, each from different bytes as far as possible."""
        for n, buffer in enumerate(into):
            at = n * len(buffer) % (len(self.source) - len(buffer) + 1)
            buffer[:] = self.source[at : at + len(buffer)]

    def _cool(self) -> None:
        """Drops the service's files from the page cache, so that the next read goes to their device."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    async def _entries(self, size: int, count: int, way: str) -> tuple[list[Entry], int]:
        """Stores `count` entries and looks them up, in memory for "shared", else on disk; and their lease."""
        tier = "memory" if way == "shared" else "disk"
        if tier == "disk":
            filler = await self._put(_TINY)
            for _ in range(100):
                (entry,), lease = await self._find([filler])
                await self.client.release(lease)
            await self.client.fetch(entry, memoryview(bytearray(_TINY)), timeout=60)
        entries, lease = await self._find([await self._put(size) for _ in range(count)])
        if wrong := [entry.tier for entry in entries if entry.tier != tier]:
            raise RuntimeError(f"{len(wrong)} of {count} entries are in {wrong[0]}, not in {tier}")
        return entries, lease

    def _open_extents(self, entries: Sequence[Entry]) -> list[tuple[int, int]]:
        """File descriptors and offsets of the entries; the caller closes the files."""
        places = []
        for segment, offset in (entry.extent for entry in entries if entry.extent is not None):
            (path,) = self.folder.rglob(f"segments/{segment:06d}.*")
            places.append((os.open(path, os.O_RDONLY), offset))
        return places

    async def _find(self, names: Sequence[bytes]) -> tuple[list[Entry], int]:
        path: list[tuple[bytes, Sequence[bytes]]] = [(SYSTEM, ()), *((name, ()) for name in names)]
        found = await self.client.lookup(NAMESPACE, path, lease_ms=600_000, timeout=30)
        return [hit.entry for hit in found.hits[1:] if hit.entry is not None], found.lease

    async def _put(self, size: int) -> bytes:
        self.count += 1
        name = hashlib.sha256(b"%d" % self.count).digest()
        data = self.source[:size]
        await self.client.put(namespace=NAMESPACE, path=[SYSTEM, name], tokens=1, base=0, data=data, timeout=60)
        return name


def _read(into: Sequence[memoryview], places: Sequence[tuple[int, int]]) -> None:
    """Fills buffers one after another, each from a file descriptor and an offset."""
    for buffer, (file, offset) in zip(into, places, strict=True):
        os.preadv(file, [buffer], offset)


async def measure(
    address: str, folder: Path, ways: Sequence[str], rounds: int, step: Callable[[], None]
) -> list[Row]:
    """Measures a row for every size and way with one service. folder: directory of its files."""
    bench, rows = Bench(address, folder, rounds), []
    try:
        await bench.warm_up()
        for size, at_once in SIZES:
            for way in ways:
                rows.append(await bench.row(way, size, at_once))
                step()
    finally:
        await bench.client.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser_of("cache.bench", __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each row, median reported (default: 8)")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="fusionkv-bench") as directory,
        Progress(transient=True) as progress,
        ExitStack() as stack,
    ):
        task = progress.add_task("rows", total=len(WAYS) * len(SIZES))
        for memory, ways in ((256 * MIB, WAYS[:1]), (_TINY, WAYS[1:])):
            folder = Path(directory, ways[0])
            flags = ("--data-dir", str(folder), "--memory-bytes", str(memory), "--disk-bytes", "1GiB")
            listen = ("--listen", f"unix:{directory}/{ways[0]}.sock")
            module = (sys.executable, "-P", "-m", "fusionkv.kvcache_service")
            process = Process(Path(directory), *module, *flags, *listen)
            stack.callback(process.stop)
            measured = measure(process.addresses[0], folder, ways, options.rounds, partial(progress.advance, task))
            rows += asyncio.run(measured)
    _show(rows)
    command.write([asdict(row) for row in rows], options.json)
    return 0


def _show(rows: Sequence[Row]) -> None:
    hashing = 64 * MIB / statistics.median(timeit.repeat(partial(checksum, bytearray(64 * MIB)), number=1)) / 1e9
    lines = []
    for row in rows:
        size = f"{row.entry_bytes // MIB} MiB" if row.entry_bytes >= MIB else f"{row.entry_bytes // KIB} KiB"
        figures = (f"{row.gb_per_s:.2f}", f"{row.limit_gb_per_s:.2f}", f"{row.gb_per_s / row.limit_gb_per_s:.0%}")
        lines.append((f"fetch {row.way}", size, row.at_once, *figures))
    title = f"{os.cpu_count()} CPUs; checksums {hashing:.1f} GB/s"
    command.show(command.table(title, ("operation", "entry", "at once", "GB/s", "limit", "of it"), lines, texts=1))


if __name__ == "__main__":
    sys.exit(main())
