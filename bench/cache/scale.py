"""Measures the cost of an index of many chunks: `python -m fusionkv.bench.cache.scale`.

For each number of chunks, a new process writes the files of a disk tier, opens a store on them, looks up paths of 20
chunks, and adds chunks. The segment files are sparse: entries have places but no bytes. Of 1,000 chunks, 979 are
encoded right after the system prompt, 20 after each other as one path, and one has a second replica. Times are CPU
times, which other load on the machine hardly affects.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fusionkv.bench import command
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.index.record import HitKind
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.disk_index import DiskIndex
from fusionkv.kvcache_service.tiers.extents import ALIGNMENT
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.segments import SEGMENT_BYTES

NAMESPACE = keys.namespace(b"scale", {}, "")
SYSTEM = keys.chunk_digest([0])
PATH = 20  # chunks of a looked-up path
GROUP = 1000
LOOKUPS = 5000
ADDED = 5000


@dataclass(frozen=True, slots=True)
class Row:
    """The results for one number of chunks. Lookups are calls of the store with lease and heat, without gRPC."""

    chunks: int
    bytes_per_chunk: float
    """Anonymous memory of the process; the disk tier's index is a mapped file and not included."""
    index_file_bytes_per_chunk: float
    add_us: float
    """Microseconds to make a chunk visible: place, record of the disk tier, index and key."""
    lookup_us: dict[str, tuple[float, float]]
    """Microseconds by kind of hit, median and 99th percentile. An alternative path's first chunk is an exact hit."""
    restart_seconds: float
    """From opening the store until all entries are loaded."""


def path_of(group: int) -> list[bytes]:
    """A path of chunks that are stored after each other."""
    return [SYSTEM, *(chunk(group * GROUP + i) for i in range(PATH))]


def chunk(number: int) -> bytes:
    return keys.chunk_digest([1, number])


def record_at(number: int) -> record.EntryRecord:
    group, i = divmod(number, GROUP)
    if i < PATH:
        path = path_of(group)[: 2 + i]
    elif i < GROUP - 1:
        path = [SYSTEM, chunk(number)]
    else:
        path = [SYSTEM, chunk(group * GROUP + PATH), chunk(group * GROUP + PATH + 1)]
    checksum = number.to_bytes(record.CHECKSUM_BYTES)
    return record.make(NAMESPACE, path, b"", ALIGNMENT - number % 100, 512, 0, checksum)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def capacity(chunks: int) -> int:
    return (chunks + ADDED) * ALIGNMENT + SEGMENT_BYTES


def write_files(directory: Path, chunks: int) -> None:
    """Writes the files of a disk tier, with records in the order of their keys, so that each page is written once."""
    (directory / "segments").mkdir(parents=True)
    for segment in range(capacity(chunks) // SEGMENT_BYTES + 1):
        with open(directory / "segments" / f"{segment:06d}.kv", "wb") as file:
            file.truncate(SEGMENT_BYTES)
    firsts = array("Q", (int.from_bytes(record_at(number).key[:8]) for number in range(chunks)))
    order = np.argsort(np.frombuffer(firsts, np.uint64))
    disk_index = DiskIndex(directory / "index", 2 * capacity(chunks), sync=False)
    for at in range(0, chunks, GROUP):
        numbers = order[at : at + GROUP].tolist()
        disk_index.put((record_at(number), number * ALIGNMENT, float(number)) for number in numbers)
    disk_index.close()


def make_store(directory: Path, chunks: int) -> Store:
    tiers = [MemoryTier(1 << 20), DiskTier(directory, capacity(chunks))]
    return Store(Config(disk_bytes=capacity(chunks)), tiers)


def add(store: Store, chunks: int) -> float:
    """Adds entries as a Put does, without bytes; returns microseconds per entry."""
    residents = store.residents
    home = residents.home
    start = time.process_time()
    for number in range(chunks, chunks + ADDED):
        entry = StoredEntry(record_at(number), float(number))
        place, _ = residents.reserve(home, entry.record)
        home.commit(entry.record, place, entry.heat)
        residents.add_copy(entry, home, place)
        residents.publish(entry)
    return (time.process_time() - start) / ADDED * 1e6


def ask(store: Store, chunks: int) -> dict[str, tuple[float, float]]:
    draw, took = random.Random(1), {}
    for kind in HitKind:
        seconds = []
        for _ in range(LOOKUPS):
            group = draw.randrange(chunks // GROUP)
            path = path_of(group)
            if kind is HitKind.ALTERNATIVE:
                alone = (draw.randrange(chunks // GROUP) * GROUP + draw.randrange(PATH, GROUP - 1) for _ in path[1:])
                path = [SYSTEM, *map(chunk, alone)]
            elif kind is HitKind.MISS:
                path = [SYSTEM, *(draw.randbytes(keys.DIGEST_BYTES) for _ in path[1:])]
            start = time.process_time()
            found, lease = store.lookup(NAMESPACE, path, [()] * len(path), 30.0)
            store.leases.release(lease)
            seconds.append(time.process_time() - start)
            first = HitKind.MISS if kind is HitKind.MISS else HitKind.EXACT
            assert [k for k, _ in found[1:]] == [first] + [kind] * (PATH - 1)
        seconds.sort()
        took[kind.value] = (statistics.median(seconds) * 1e6, seconds[len(seconds) * 99 // 100] * 1e6)
    return took


async def measure(directory: Path, chunks: int) -> Row:
    write_files(directory, chunks)
    index_file = (directory / "index" / "data.mdb").stat().st_blocks * 512
    gc.collect()
    before, store = anonymous_bytes(), make_store(directory, chunks)
    start = time.process_time()
    await store.open()
    restart = time.process_time() - start
    assert len(store.entries) == chunks
    gc.collect()
    memory = anonymous_bytes() - before
    took = ask(store, chunks)
    added = add(store, chunks)
    await store.close()
    return Row(chunks, memory / chunks, index_file / chunks, added, took, restart)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser_of("cache.scale", __doc__)
    parser.add_argument(
        "--chunks", type=int, default=1_000_000, help="maximum number of chunks, from 10,000 in factors of 10"
    )
    parser.add_argument(
        "--directory", type=Path, help="directory for the disk tiers (default: a temporary directory)"
    )
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.only:
        row = asyncio.run(measure(options.directory, options.only))
        print(json.dumps(asdict(row)))
        return 0
    rows = []
    for chunks in (10**power for power in range(4, 10) if 10**power <= options.chunks):
        with tempfile.TemporaryDirectory(prefix="fusionkv-scale", dir=options.directory) as directory:
            module = [sys.executable, "-P", "-m", "fusionkv.bench.cache.scale"]
            flags = ["--only", str(chunks), "--directory", directory]
            rows.append(json.loads(subprocess.run(module + flags, check=True, stdout=subprocess.PIPE).stdout))
    _show(rows)
    command.write(rows, options.json)
    return 0


def _show(rows: list[dict[str, object]]) -> None:
    kinds = [kind.value for kind in HitKind]
    lines = []
    for values in rows:
        row = Row(**values)  # type: ignore[arg-type]  # what asdict wrote
        lines.append((
            f"{row.chunks:,}", f"{row.bytes_per_chunk:.0f}", f"{row.index_file_bytes_per_chunk:.0f}",
            f"{row.add_us:.0f}", *("{:.0f} / {:.0f}".format(*row.lookup_us[kind]) for kind in kinds),
            f"{row.restart_seconds:.1f}",
        ))  # fmt: skip
    title = f"lookups of {PATH} chunks in microseconds, median / 99th percentile"
    columns = ("chunks", "bytes a chunk", "index file", "add, us", *kinds, "restart, s")
    command.show(command.table(title, columns, lines))


if __name__ == "__main__":
    sys.exit(main())
