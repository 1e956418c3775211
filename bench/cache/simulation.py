"""Simulates storage with and without alternative hits: `python -m fusionkv.bench.cache.simulation`.

The workload is that of FusionRAG 5.3.3: 1,000 queries, with 60% of their chunks from the knowledge base, 30% uploaded
and shared, and 10% unique. Store and index are those of the service, without the entries' bytes. Baselines on the
same queries are a standard prefix cache, and one with the backtracking that the paper describes. Nothing is evicted.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
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
# Values for which the paper's algorithm comes closest to its four reported figures; the paper does not state them.
PAPER = Workload(queries=1000, chunks=6, knowledge=12, shared=200, zipf=0.5)
SWEEP: list[dict[str, Any]] = [
    *({"chunks": n} for n in (4, 5, 8, 10)),
    *({"knowledge": n} for n in (100, 1000, 10_000)),
    *({"shared": n} for n in (50, 100, 400, 1000)),
    *({"zipf": exponent} for exponent in (0.0, 1.0, 1.5)),
    {"sorted": True},
    *({"knowledge": 1000, "shared": 1000, "topics": n, "sorted": True} for n in (1, 10, 50)),
]
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

    A miss is encoded after the system prompt only, as in the worker, or, with `in_place`, after the whole path.
    """

    def __init__(self, store: Store, *, in_place: bool = False) -> None:
        self.store = store
        self._in_place = in_place

    @classmethod
    def with_room(cls, entries: int, *, in_place: bool = False) -> "Service":
        return cls(Store(Config(), [WithoutBytes(entries * ALIGNMENT)]), in_place=in_place)

    def __len__(self) -> int:
        return len(self.store.entries)

    async def ask(self, path: Sequence[bytes]) -> list[HitKind]:
        found, lease = self.store.lookup(NAMESPACE, path, [()] * len(path), 30.0)
        for i, (kind, _) in enumerate(found):
            if kind is HitKind.MISS:
                alone = i and not self._in_place
                await self._put([SYSTEM, path[i]] if alone else list(path[: i + 1]))
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


class Baseline:
    """An unbounded prefix cache like that of vLLM, with the same interface: chunks by their exact path.

    With `backtrack` it also tries shorter paths, as FusionRAG 4.1 describes: the chunks after the system prompt are
    dropped one at a time until an entry is found.
    """

    def __init__(self, backtrack: bool) -> None:
        self._backtrack = backtrack
        self._entries: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._entries)

    async def ask(self, path: Sequence[bytes]) -> list[HitKind]:
        kinds = []
        for at, key in enumerate(keys.path_keys(NAMESPACE, path)):
            shorter = ([path[0], *path[drop : at + 1]] for drop in range(2, at + 1) if self._backtrack)
            if key in self._entries:
                kinds.append(HitKind.EXACT)
            elif any(keys.entry_key(NAMESPACE, way) in self._entries for way in shorter):
                kinds.append(HitKind.ALTERNATIVE)
            else:
                kinds.append(HitKind.MISS)
                self._entries.add(key)
        return kinds

    async def close(self) -> None:
        pass


async def simulate(workload: Workload, cache: Service | Baseline, marks: Sequence[int]) -> list[tuple[int, Outcome]]:
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


async def compare(workload: Workload, marks: Sequence[int], backtracking: bool) -> list[dict[str, Any]]:
    """A row for each number of queries in `marks`: the workload, each cache's outcome, and the service's savings."""
    capacity = 1 + workload.knowledge + workload.queries * workload.chunks
    caches: dict[str, Service | Baseline] = {
        "service": Service.with_room(capacity),
        "prefix": Baseline(backtrack=False),
    }
    if backtracking:
        caches["in_place"] = Service.with_room(capacity, in_place=True)
        caches["backtracking"] = Baseline(backtrack=True)
    outcomes = {name: await simulate(workload, cache, marks) for name, cache in caches.items()}
    rows = []
    for i, queries in enumerate(marks):
        row = {"workload": asdict(replace(workload, queries=queries))}
        prefix = outcomes["prefix"][i][1]
        for name in caches:
            outcome = outcomes[name][i][1]
            row[name] = {**asdict(outcome), "hit_rate": outcome.hit_rate}
            if name != "prefix":
                row[name]["storage"] = outcome.stored / prefix.stored - 1
                row[name]["redundant_saved"] = 1 - outcome.redundant / max(prefix.redundant, 1)
        rows.append(row)
    return rows


async def measure(seeds: int, queries: int, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    """Simulates the paper's workload and variations of it, with several seeds; then growth, with one seed."""
    points = [PAPER, *(replace(PAPER, **changes) for changes in SWEEP)]
    task = progress.add_task("workloads", total=len(points) * seeds + 2)
    sweep, growth = [], []
    for point in points:
        for seed in range(seeds):
            sweep += await compare(replace(point, seed=seed), [point.queries], backtracking=True)
            progress.advance(task)
    marks = [n for power in range(2, 7) for n in (10**power, 3 * 10**power) if n < queries] + [queries]
    for point in (PAPER, LARGE):
        growth += await compare(replace(point, queries=queries), marks, backtracking=False)
        progress.advance(task)
    return {"sweep": sweep, "growth": growth}


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
    by_point: dict[str, list[dict[str, Any]]] = {}
    for row in rows["sweep"]:
        by_point.setdefault(_differs(row["workload"]), []).append(row)
    lines: list[tuple[Any, ...]] = []
    for name, same in by_point.items():
        cells = [
            f"{_mean(same, 'service', what):+.1%} ({_mean(same, 'backtracking', what):+.1%})"
            for what in ("storage", "redundant_saved", "hit_rate")
        ]
        lines.append((name, f"{_mean(same, 'prefix', 'redundant'):.0f}", *cells))
    columns = ["workload", "redundant of prefix cache", "storage", "redundant saved", "hit rate"]
    title = f"service (as the paper describes), mean of the seeds; {seconds:.0f} s"
    command.show(command.table(title, columns, lines, texts=1))
    lines = []
    for row in rows["growth"]:
        workload, service, prefix = row["workload"], row["service"], row["prefix"]
        shares = (f"{service['storage']:+.1%}", f"{service['hit_rate']:.1%}", f"{prefix['hit_rate']:.1%}")
        lines.append((workload["knowledge"], workload["queries"], service["stored"], prefix["stored"], *shares))
    columns = ["corpus", "queries", "entries", "of prefix cache", "storage", "hit rate", "of prefix cache"]
    command.show(command.table("growth", columns, lines))


def _differs(workload: dict[str, Any]) -> str:
    """The parameters of a workload that differ from the paper's."""
    names = [field.name for field in fields(Workload) if field.name != "seed"]
    changed = [f"{n} {workload[n]}" for n in names if workload[n] != getattr(PAPER, n)]
    return ", ".join(changed) or "the paper's workload"


def _mean(rows: list[dict[str, Any]], cache: str, what: str) -> float:
    return statistics.mean(row[cache][what] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
