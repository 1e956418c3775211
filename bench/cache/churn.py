"""Simulates hours of new questions over tiers that are too small: `python -m fusionkv.bench.cache.churn`.

Each question has eight chunks, drawn by Zipf's law from a corpus of ten times what the tiers hold; a tenth are asked
for once. In rows with scans, a batch job asks once for as many others as the tiers hold, after every 50th question.
Index, store and tiers are the service's, with small entries and a clock that is moved. Nothing is encoded ahead.

The speed-up is estimated: the default takes the README's seconds to the first token of SmolLM2 over 1,395 tokens, and
full attention's for the chunks that were not found. A worker's pool would find some of these.
"""

import asyncio
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fusionkv.bench import command
from fusionkv.bench.cache.simulation import NAMESPACE, Service
from fusionkv.bench.cache.workload import SYSTEM, Workload
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.extents import ALIGNMENT
from fusionkv.kvcache_service.tiers.memory import MemoryTier

CHUNKS, GAP_SECONDS, WINDOW, SCAN_EVERY = 8, 20.0, 100, 50
# Entries that the disk holds, and among them the memory.
DISK, MEMORY = 300, 75
_FULL, _DEFAULT = 3.94, 1.31


@dataclass(frozen=True, slots=True)
class Row:
    """Shares of the chunks of a hundred questions that were found, and the speed-up over full attention.

    fixed: the share that would be found if the tiers always held the chunks that are asked for most.
    """

    zipf: float
    scans: bool
    questions: str
    found: float
    memory: float
    fixed: float
    speed_up: float


async def simulate(workload: Workload, scans: bool) -> list[Row]:
    """The first, the middle and the last hundred questions."""
    paths, now, tiers = list(workload), 0.0, list[list[str]]()
    with tempfile.TemporaryDirectory() as directory:
        both = [MemoryTier(MEMORY * ALIGNMENT), DiskTier(Path(directory), DISK * ALIGNMENT)]
        cache = Service(Store(Config(), both, clock=lambda: now))
        residents = cache.store.residents
        for number, path in enumerate(paths, 1):
            entries = [residents.entries.get(keys.entry_key(NAMESPACE, [SYSTEM, chunk])) for chunk in path[1:]]
            tiers.append([residents.fastest(entry).name if entry else "" for entry in entries])
            await cache.ask(path)
            for entry in filter(None, entries):  # as a Fetch would
                await cache.store.reader.promote(entry)
            now += GAP_SECONDS
            for at in range(0, DISK if scans and number % SCAN_EVERY == 0 else 0, CHUNKS):
                await cache.ask([SYSTEM, *(keys.chunk_digest([number, at + n]) for n in range(CHUNKS))])
        cache.store.check_integrity()
        await cache.close()
    often = Counter(chunk for path in paths for chunk in path[1:]).most_common(DISK)
    best, middle, last = {chunk for chunk, _ in often}, (len(paths) - WINDOW) // 2, len(paths) - WINDOW
    return [_row(workload, scans, start, paths, tiers, best) for start in (0, middle, last)]


def _row(
    workload: Workload, scans: bool, start: int, paths: list[list[bytes]], tiers: list[list[str]], best: set[bytes]
) -> Row:
    window = slice(start, start + WINDOW)
    counts, chunks = Counter(tier for each in tiers[window] for tier in each), WINDOW * CHUNKS
    fixed = sum(chunk in best for path in paths[window] for chunk in path[1:]) / chunks
    seconds = statistics.mean(_DEFAULT + _FULL * each.count("") / CHUNKS for each in tiers[window])
    shares = (1 - counts[""] / chunks, counts["memory"] / chunks, fixed)
    return Row(workload.zipf, scans, f"{start + 1} to {start + WINDOW}", *shares, _FULL / seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser_of("cache.churn", __doc__)
    parser.add_argument("--questions", type=int, default=1000, help="at least 300 (default: %(default)s)")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for zipf, scans in ((0.8, False), (0.8, True), (1.1, False), (1.1, True)):
        workload = Workload(options.questions, CHUNKS, knowledge=2000, shared=1000, zipf=zipf)
        rows += asyncio.run(simulate(workload, scans))
    columns = ["Zipf", "scans", "questions", "found", "in memory", "best fixed choice", "speed-up, estimated"]
    shares = ([f"{share:.0%}" for share in (row.found, row.memory, row.fixed)] for row in rows)
    lines = [
        (row.zipf, "yes" if row.scans else "no", row.questions, *each, f"{row.speed_up:.2f}")
        for row, each in zip(rows, shares, strict=True)
    ]
    hours = options.questions * GAP_SECONDS / 3600
    command.show(command.table(f"{options.questions:,} questions in {hours:.1f} simulated hours", columns, lines))
    command.write([asdict(row) for row in rows], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
