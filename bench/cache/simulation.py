"""Simulates storage with and without alternative hits: `python -m fusionkv.bench.cache.simulation`.

The workload is that of FusionRAG 5.3.3: 1,000 queries, with 60% of their chunks from the knowledge base, 30% uploaded
and shared, and 10% unique. Store and index are those of the service, without the entries' bytes. The baseline on the
same queries is a prefix cache. Nothing is evicted.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.progress import Progress

from fusionkv.bench import command
from fusionkv.bench.cache.workload import SYSTEM, Workload
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.index.record import HitKind
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.store.writing import reserve
from fusionkv.kvcache_service.tiers.base import Place
from fusionkv.kvcache_service.tiers.extents import ALIGNMENT
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.protos.runtime.checksum import checksum as checksum_of

NAMESPACE = keys.namespace(b"simulation", {}, "")
# The paper does not state these values: with them, its own algorithm comes closest to its four reported figures
# (docs/journal/performance.md).
PAPER = Workload(queries=1000, chunks=6, knowledge=12, shared=200, zipf=0.5)
# A realistic corpus, for the growth of storage with the number of queries.
LARGE = Workload(queries=1000, chunks=10, knowledge=100_000, shared=10_000, zipf=1.0, topics=100, sorted=True)


class WithoutBytes(MemoryTier):
    """A memory tier that allocates space but drops the bytes."""

    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a cache with a workload. All chunks have the same size, so entries measure storage."""

    stored: int
    """Entries at the end: those of the knowledge base, stored before, and those of computed chunks."""
    redundant: int
    """Computations of a chunk that the cache had after other chunks."""
    exact: int
    alternative: int
    missed: int

    @property
    def hit_rate(self) -> float:
        return (self.exact + self.alternative) / (self.exact + self.alternative + self.missed)


class Service:
    """The cache service's store, used like a worker does: one Lookup per query, one Put for each miss.

    A miss is encoded after the system prompt only, as in the worker.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def with_room(cls, entries: int) -> "Service":
        return cls(Store(Config(), [WithoutBytes(entries * ALIGNMENT)]))

    def __len__(self) -> int:
        return len(self.store.entries)

    async def ask(self, path: Sequence[bytes]) -> list[HitKind]:
        found, lease = self.store.lookup(NAMESPACE, path, [()] * len(path), 30.0)
        for i, (kind, _) in enumerate(found):
            if kind is HitKind.MISS:
                await self._put([SYSTEM, path[i]] if i else [SYSTEM])
        self.store.leases.release(lease)
        return [kind for kind, _ in found]

    async def close(self) -> None:
        await self.store.close()

    async def _put(self, path: list[bytes]) -> None:
        data = path[-1]
        checksum = checksum_of(data)
        entry = record.make(NAMESPACE, path, b"", len(data), 512, 0, checksum, offered=True)
        writer = reserve(self.store, entry)
        assert writer is not None
        await writer.write(memoryview(data))
        assert await writer.commit()


class PrefixCache:
    """An unbounded prefix cache like that of vLLM, with the same interface: chunks by their exact path."""

    def __init__(self) -> None:
        self._entries: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._entries)

    async def ask(self, path: Sequence[bytes]) -> list[HitKind]:
        asked = list(keys.path_keys(NAMESPACE, path))
        kinds = [HitKind.EXACT if key in self._entries else HitKind.MISS for key in asked]
        self._entries.update(asked)
        return kinds

    async def close(self) -> None:
        pass


async def simulate(
    workload: Workload, cache: Service | PrefixCache, marks: Sequence[int]
) -> list[tuple[int, Outcome]]:
    """Runs a workload; returns the outcome after each number of queries in `marks`."""
    seen: set[bytes] = set()
    for chunk in workload.corpus():
        await cache.ask([SYSTEM, chunk])
        seen.add(chunk)
    counts, redundant, outcomes = dict.fromkeys(HitKind, 0), 0, []
    for number, path in enumerate(workload, 1):
        kinds = await cache.ask(path)
        for chunk, kind in zip(path[1:], kinds[1:], strict=True):
            counts[kind] += 1
            redundant += kind is HitKind.MISS and chunk in seen
            seen.add(chunk)
        if number in marks:
            stored = len(cache) - 1  # the system prompt
            outcomes.append((number, Outcome(stored, redundant, *(counts[kind] for kind in HitKind))))
    await cache.close()
    return outcomes


async def compare(workload: Workload, marks: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each number of queries in `marks`: the workload, each cache's outcome, and the service's savings."""
    capacity = 1 + workload.knowledge + workload.queries * workload.chunks
    served = await simulate(workload, Service.with_room(capacity), marks)
    cached = await simulate(workload, PrefixCache(), marks)
    rows = []
    for (queries, service), (_, prefix) in zip(served, cached, strict=True):
        saved = {
            "storage": service.stored / prefix.stored - 1,
            "redundant_saved": 1 - service.redundant / max(prefix.redundant, 1),
        }
        rows.append(
            {
                "workload": asdict(replace(workload, queries=queries)),
                "service": {**asdict(service), "hit_rate": service.hit_rate, **saved},
                "prefix": {**asdict(prefix), "hit_rate": prefix.hit_rate},
            }
        )
    return rows


async def measure(seeds: int, queries: int, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    """Simulates the paper's workload with several seeds; then growth, with one seed."""
    task = progress.add_task("workloads", total=seeds + 2)
    paper, growth = [], []
    for seed in range(seeds):
        paper += await compare(replace(PAPER, seed=seed), [PAPER.queries])
        progress.advance(task)
    marks = [n for power in range(2, 7) for n in (10**power, 3 * 10**power) if n < queries] + [queries]
    for point in (PAPER, LARGE):
        growth += await compare(replace(point, queries=queries), marks)
        progress.advance(task)
    return {"paper": paper, "growth": growth}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser_of("cache.simulation", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each workload (default: 3)")
    parser.add_argument(
        "--queries", type=int, default=30_000, help="queries of the growth (default: 30,000; a million takes an hour)"
    )
    options = parser.parse_args(argv)
    start = time.perf_counter()
    with Progress(transient=True) as progress:
        rows = asyncio.run(measure(options.seeds, options.queries, progress))
    _show(rows, time.perf_counter() - start)
    command.write(rows, options.json)
    return 0


def _show(rows: dict[str, list[dict[str, Any]]], seconds: float) -> None:
    title = f"the paper's workload, mean of {len(rows['paper'])} seeds; {seconds:.0f} s"
    columns = ["redundant of prefix cache", "storage", "redundant saved", "hit rate"]
    saved = [f"{_mean(rows['paper'], 'service', what):+.1%}" for what in ("storage", "redundant_saved", "hit_rate")]
    line = (f"{_mean(rows['paper'], 'prefix', 'redundant'):.0f}", *saved)
    command.show(command.table(title, columns, [line]))
    lines = []
    for row in rows["growth"]:
        workload, service, prefix = row["workload"], row["service"], row["prefix"]
        shares = (f"{service['storage']:+.1%}", f"{service['hit_rate']:.1%}", f"{prefix['hit_rate']:.1%}")
        lines.append((workload["knowledge"], workload["queries"], service["stored"], prefix["stored"], *shares))
    columns = ["corpus", "queries", "entries", "of prefix cache", "storage", "hit rate", "of prefix cache"]
    command.show(command.table("growth", columns, lines))


def _mean(rows: list[dict[str, Any]], cache: str, what: str) -> float:
    return statistics.mean(row[cache][what] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
