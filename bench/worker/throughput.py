"""Throughput at rising request rates: recipes against full attention and a prefix cache, on one machine in one run.

A real model answers questions about real passages. Questions arrive at random (Poisson), regardless of unfinished
ones. Each has its own choice and order of chunks, drawn by Zipf's law from passages that the cache service stores;
the worker's pool holds a part of them. Each system has its own worker and cache service; a prefix cache stores
everything that it computes. The rate starts at half of a system's sequential rate, and rises until the p99 of the
time to the first token exceeds a bound: four times that of full attention without load. Capacity is the rate where
that happens.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from fusionkv.bench import command
from fusionkv.bench.worker.bench import PATIENT, cache_service, show
from fusionkv.bench.worker.passages import Passages
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute.scheduler import ScheduledSlice
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import SamplingParams
from fusionkv.fusion_worker.evaluate.command import run as run_command
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.fusion_worker.meters import Summary
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.quality.verdict import PRIMED
from fusionkv.fusion_worker.request import Request
from fusionkv.fusion_worker.servicer import FusionServicer
from fusionkv.protos.answer.v1.answer_pb2 import Token
from fusionkv.protos.contract.recipes import find_recipe

ANSWER = 16
Systems = Sequence[tuple[str, float]]
# Names of recipes, and the share of tokens that each recomputes.
SYSTEMS = (("full_attention", 1.0), ("prefix_cache", 0.0), ("full_reuse", 0.0), (PRIMED.recipe, PRIMED.ratio))
_BOUND = 4.0
# With few requests, a queue stays short at any rate: at each rate, requests arrive for five times the bound.
_LASTING = 5.0
_FIRST, _RISE, _MAX_RATES = 0.5, 1.5, 8


@dataclass(frozen=True, slots=True)
class Traffic:
    """Questions about passages, with `chunks` chunks each."""

    passages: Passages
    chunks: int

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """Questions with different chunks each, drawn by Zipf's law (exponent 1)."""
        chance = random.Random(seed)
        weights = [1 / (n + 1) for n in range(len(self.passages.chunks))]

        def prompt() -> Prompt:
            drawn: dict[int, None] = {}
            while len(drawn) < self.chunks:
                drawn[chance.choices(range(len(weights)), weights)[0]] = None
            numbers = list(drawn)
            chance.shuffle(numbers)
            return self.passages.prompt(numbers, chance.randrange(1 << 30))

        return [prompt() for _ in range(count)]


@dataclass(slots=True)
class Load:
    """The results of a load. ttft: seconds by request. busy: share of the time that the engine computed."""

    ttft: list[float]
    tokens: int
    seconds: float
    busy: float

    def percentile(self, share: float) -> float:
        return statistics.quantiles(self.ttft, n=1000, method="inclusive")[round(1000 * share) - 1]


class Station:
    """A fusion worker under load, which answers by one recipe.

    busy: seconds that the engine has computed so far.
    """

    def __init__(self, servicer: FusionServicer, recipe: str, ratio: float) -> None:
        self._servicer, self._recipe, self._ratio = servicer, find_recipe(recipe), ratio
        self.busy = 0.0
        engine = servicer.engine
        step = engine.step

        def timed(slices: list[ScheduledSlice]) -> None:
            started = time.perf_counter()
            try:
                step(slices)
            finally:
                self.busy += time.perf_counter() - started

        engine.step = timed  # type: ignore[method-assign]

    async def answer(self, prompt: Prompt) -> tuple[float, Summary]:
        """Answers a prompt. Returns the seconds to the first token, and the summary."""
        started, first = time.perf_counter(), 0.0
        request = Request(prompt, self._recipe, self._ratio, SamplingParams(max_tokens=ANSWER))
        async with aclosing(self._servicer.answerer.answer(request)) as events:
            async for event in events:
                if isinstance(event, Token):
                    first = first or time.perf_counter() - started
                elif isinstance(event, Summary):
                    if event.degraded:
                        raise RuntimeError(f"the cache failed: {event.degraded}")
                    return first, event
        raise RuntimeError("no summary")

    async def alone(self, traffic: Traffic) -> tuple[float, float]:
        """Mean seconds to the first and to the last token of single requests, without load.

        As many requests before them are a warm-up.
        """
        warming, measured = (traffic.prompts(4, seed=(1 << 20) + half) for half in range(2))
        for prompt in warming:
            await self.answer(prompt)
        await self._servicer.wait_idle()
        times = []
        for prompt in measured:
            started = time.perf_counter()
            first, _ = await self.answer(prompt)
            times.append((first, time.perf_counter() - started))
        return statistics.mean(first for first, _ in times), statistics.mean(whole for _, whole in times)

    async def load(self, prompts: Sequence[Prompt], rate: float, seed: int) -> Load:
        """Asks all questions at `rate` per second on average."""
        chance = random.Random(seed)
        arrivals = list(itertools.accumulate(chance.expovariate(rate) for _ in prompts))
        started, busy = time.perf_counter(), self.busy

        async def one(prompt: Prompt, at: float) -> tuple[float, Summary]:
            await asyncio.sleep(started + at - time.perf_counter())
            return await self.answer(prompt)

        done = await asyncio.gather(*map(one, prompts, arrivals))
        seconds = time.perf_counter() - started
        tokens = sum(summary.generated for _, summary in done)
        return Load([first for first, _ in done], tokens, seconds, (self.busy - busy) / seconds)


async def bench(
    model: models.Model, traffic: Traffic, systems: Systems, requests: int, console: Console
) -> list[dict[str, object]]:
    """Measures a row for each system and rate. The bound comes from the first system without load."""
    rows: list[dict[str, object]] = []
    bound = 0.0
    with Progress(console=console) as progress:
        task = progress.add_task("throughput", total=len(systems))
        for name, ratio in systems:
            async with worker(model, traffic.passages) as servicer:
                if name == "prefix_cache":
                    store_at_once(servicer)
                station = Station(servicer, name, ratio)
                alone = await station.alone(traffic)
                bound = bound or _BOUND * alone[0]
                for number in range(_MAX_RATES):
                    rate = _FIRST * _RISE**number / alone[1]
                    prompts = traffic.prompts(max(requests, round(rate * _LASTING * bound)), number)
                    load = await station.load(prompts, rate, number)
                    context = round(statistics.mean(prompt.context_tokens for prompt in prompts))
                    rows.append({**_row(name, ratio, rate, load, bound), "context": context})
                    progress.console.print(rows[-1])
                    if load.percentile(0.99) > bound:
                        break
            progress.advance(task)
    return rows


@asynccontextmanager
async def worker(model: models.Model, passages: Passages) -> AsyncIterator[FusionServicer]:
    """Runs a worker with its own cache service, which stores the passages."""
    base_bytes = passages.tokens * model.kv.token_bytes
    # Half of the knowledge base's KV, and room for requests in flight.
    pool_bytes = max(1 << 20, base_bytes)
    with cache_service(3 * pool_bytes) as address:
        config = WorkerConfig(cache=address, pool_bytes=pool_bytes, max_requests=8, max_queue=1 << 20, **PATIENT)
        servicer = FusionServicer(config, model)
        try:
            await passages.store(servicer)
            yield servicer
        finally:
            await servicer.close()


def store_at_once(servicer: FusionServicer) -> None:
    """Stores everything that the worker computes, as a prefix cache does.

    By default, the cache service stores a second replica of a chunk only when its path is looked up again.
    """
    assert servicer.cache is not None
    put = servicer.cache.put

    async def stored(**entry: Any) -> tuple[bytes, bool]:
        return await put(**{**entry, "offered": False})

    servicer.cache.put = stored  # type: ignore[method-assign]


def _row(name: str, ratio: float, rate: float, load: Load, bound: float) -> dict[str, object]:
    return {
        "name": name,
        "r": ratio,
        "requests_per_s": round(rate, 3),
        "ttft_p50_s": round(load.percentile(0.5), 3),
        "ttft_p99_s": round(load.percentile(0.99), 3),
        "tokens_per_s": round(load.tokens / load.seconds, 1),
        "engine_idle": round(1 - load.busy, 3),
        "bound_s": round(bound, 3),
    }


def capacity(rows: Sequence[dict[str, object]], name: str) -> tuple[float, bool]:
    """Requests per second within the bound, interpolated linearly, and whether the capacity may be higher."""
    known = [(0.0, 0.0)]
    for row in rows:
        if row["name"] == name:
            rate, late = float(str(row["requests_per_s"])), float(str(row["ttft_p99_s"]))
            bound = float(str(row["bound_s"]))
            if late > bound:
                low, early = known[-1]
                return low + (rate - low) * (bound - early) / (late - early), False
            known.append((rate, late))
    return known[-1][0], True


def _capacities(rows: Sequence[dict[str, object]]) -> Iterator[tuple[str, ...]]:
    base, _ = capacity(rows, str(rows[0]["name"]))
    for name in dict.fromkeys(str(row["name"]) for row in rows):
        rate, more = capacity(rows, name)
        yield name, f"{'>= ' * more}{rate:.2f}", f"{rate / base:.2f}x"


def main() -> None:
    parser = command.parser_of("worker.throughput", __doc__)
    command.add_model(parser)
    command.add_data(parser)
    parser.add_argument("--requests", type=int, default=40, help="minimum requests at each rate (%(default)s)")
    parser.add_argument("--base", type=int, default=64, help="passages of the knowledge base (%(default)s)")
    parser.add_argument("--chunks", type=int, default=8, help="chunks in each prompt (%(default)s)")
    names = [name for name, _ in SYSTEMS[1:]]
    about = "systems to compare with full attention (default: all)"
    parser.add_argument("--against", nargs="+", choices=names, default=names, help=about)
    args = parser.parse_args()
    if not 1 <= args.chunks <= args.base:
        parser.error("--chunks must be between 1 and --base")
    systems = [SYSTEMS[0], *(system for system in SYSTEMS if system[0] in args.against)]
    rows = asyncio.run(_run(args, systems))
    show(f"TTFT and tokens a second under load, {args.model}", rows, args.json)
    title = f"questions a second with p99 TTFT within {rows[0]['bound_s']} s"
    command.show(command.table(title, ("name", "capacity", "to full attention"), _capacities(rows)))


async def _run(args: argparse.Namespace, systems: Systems) -> list[dict[str, object]]:
    model = models.load(resolve(args.model), "cpu")
    traffic = Traffic(await Passages.of(model, args.data, args.base), args.chunks)
    return await bench(model, traffic, systems, args.requests, Console(stderr=True))


if __name__ == "__main__":
    sys.exit(run_command("throughput", main, RuntimeError))
