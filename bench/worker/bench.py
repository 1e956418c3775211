"""TTFT by prompt length: recipes against full attention in the same run, and the ideal by tokens computed.

A real model answers over real passages; `--model shape` and `--model shape-7b` use random weights of the shapes of
Qwen2.5-0.5B and Qwen2.5-7B, and random tokens, instead. Chunks come from a real cache service over a unix socket, and
the pool is emptied before every timed request, but for `resident_s`, a single run with all chunks in the pool. On a
GPU, the default's `busy_ms` is what it computes, by stage.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import Progress

from fusionkv.bench import command
from fusionkv.bench.kernels.clock import busy_ms
from fusionkv.bench.services.process import Process
from fusionkv.bench.worker.passages import Passages
from fusionkv.bench.worker.shapes import SHAPES, build
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute.jobs import AttentionScores
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
from fusionkv.protos.contract.recipes import find_recipe

CHUNK = 512
COLUMNS = ("name", "context", "r", "baseline_s", "value_s", "resident_s", "ratio", "ideal")
# On a busy machine, a slow cache must not count as a failed one.
PATIENT: dict[str, Any] = {"lookup_timeout": 60.0, "fetch_timeout": 60.0, "cache_seconds": 120.0}
# Recipe and ratio of each row; full_attention is the baseline of the same run.
_DEFAULT = (PRIMED.recipe, PRIMED.ratio)
ROWS = (("full_reuse", 0.0), ("epic", 0.15), ("cacheblend", 0.15), ("prophetkv", 0.15), _DEFAULT)


@contextmanager
def cache_service(memory_bytes: int) -> Iterator[str]:
    """Runs a cache service with a memory tier of this size, and a disk tier; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        tiers = ("--memory-bytes", str(memory_bytes), "--disk-bytes", "8GiB", "--data-dir", f"{folder}/kv")
        command = (sys.executable, "-P", "-m", "fusionkv.kvcache_service", "--listen", f"unix:{folder}/cache.sock")
        process = Process(Path(folder), *command, *tiers)
        try:
            yield process.addresses[0]
        finally:
            process.stop()


async def bench(
    model: models.Model,
    passages: Passages,
    contexts: list[int],
    repeats: int,
    console: Console,
    recipes: Sequence[tuple[str, float]] = ROWS,
    done: Callable[[list[dict[str, object]]], None] = lambda _: None,
) -> list[dict[str, object]]:
    """One row for each context length and recipe; `done` gets all rows so far after each context.

    recipes: their names and ratios.
    """
    rows: list[dict[str, object]] = []
    pool_bytes = 3 * max(contexts) * model.kv.token_bytes
    stored = 3 * passages.tokens * model.kv.token_bytes
    with cache_service(max(stored, 1 << 20)) as address, Progress(console=console) as progress:
        async with _servicer(model, address, pool_bytes) as servicer:
            task = progress.add_task("ttft", total=len(contexts) * (1 + repeats * (1 + len(recipes))))
            await passages.store(servicer)
            for context in contexts:
                prompt = _prompt(passages, context, 0)
                resident = {row: await first_token(servicer, prompt, *row) for row in recipes}
                progress.advance(task)
                pairs: dict[tuple[str, float], list[_Pair]] = {row: [] for row in recipes}
                for _ in range(repeats):
                    baseline = await _ttft(servicer, prompt, "full_attention", 1.0)
                    progress.advance(task)
                    for row in recipes:
                        pairs[row].append(_Pair(baseline, await _ttft(servicer, prompt, *row)))
                        progress.advance(task)
                made = {row: _row(prompt, _middle(pairs[row]), resident[row], row) for row in recipes}
                if servicer.pool.kv.is_cuda and _DEFAULT in made:
                    made[_DEFAULT]["busy_ms"] = await _busy(servicer, prompt)
                rows += made.values()
                done(rows)
    return rows


class _Pair(NamedTuple):
    """A recipe's run, and the run of full attention just before it."""

    baseline: Summary
    run: Summary

    @property
    def ratio(self) -> float:
        return self.baseline.seconds["ttft"] / self.run.seconds["ttft"]


def _middle(pairs: Sequence[_Pair]) -> _Pair:
    """The pair of the median ratio: the speed of a shared machine changes from minute to minute."""
    return sorted(pairs, key=lambda pair: pair.ratio)[(len(pairs) - 1) // 2]


def _row(prompt: Prompt, pair: _Pair, warm: Summary, row: tuple[str, float]) -> dict[str, object]:
    summary, seconds, (name, ratio) = pair.run, pair.run.seconds, row
    return {
        "name": name,
        "context": prompt.context_tokens,
        "r": ratio,
        "baseline_s": round(pair.baseline.seconds["ttft"], 4),
        "value_s": round(seconds["ttft"], 4),
        "resident_s": round(warm.seconds["ttft"], 4),
        "ratio": round(pair.ratio, 2),
        "ideal": round(prompt.tokens / (summary.prefill.recomputed + len(prompt.question)), 2),
        "stages_s": {stage: round(seconds.get(stage, 0.0), 4) for stage in ("lookup", "load", "select", "prefill")},
        "bytes_fetched": summary.prefill.loaded.bytes_fetched,
        "tokens_recomputed": summary.prefill.recomputed,
    }


async def _ttft(servicer: FusionServicer, prompt: Prompt, name: str, ratio: float) -> Summary:
    servicer.pool.clear()
    return await first_token(servicer, prompt, name, ratio)


async def first_token(servicer: FusionServicer, prompt: Prompt, name: str, ratio: float) -> Summary:
    """The summary of an answer of one token. Raises RuntimeError if the cache failed."""
    request = Request(prompt, find_recipe(name), ratio, SamplingParams(max_tokens=1))
    async with aclosing(servicer.answerer.answer(request)) as events:
        async for event in events:
            if isinstance(event, Summary):
                if event.degraded:
                    raise RuntimeError(f"the cache failed: {event.degraded}")
                return event
    raise RuntimeError("no summary")


async def _busy(servicer: FusionServicer, prompt: Prompt) -> dict[str, float]:
    """Milliseconds that the GPU computes for a first token of the default, in the steps that choose and in others."""
    found, step = {"select": 0.0, "prefill": 0.0}, servicer.engine.step

    def measured(slices: list[ScheduledSlice]) -> None:
        chooses = isinstance(slices[0].job.output, AttentionScores)
        found["select" if chooses else "prefill"] += busy_ms(partial(step, slices))

    with patch.object(servicer.engine, "step", measured):
        await _ttft(servicer, prompt, *_DEFAULT)
    return found


def _prompt(passages: Passages, context: int, seed: int) -> Prompt:
    """Whole chunks in the random order of `seed`, of at least `context` tokens, and the first question."""
    order = list(range(len(passages.chunks)))
    random.Random(seed).shuffle(order)
    lengths = itertools.accumulate(len(passages.chunks[n].ids) for n in order)
    count = next(i for i, tokens in enumerate(lengths, 1) if tokens >= context)
    return passages.prompt(order[:count], 0)


@asynccontextmanager
async def _servicer(model: models.Model, address: str, pool_bytes: int) -> AsyncIterator[FusionServicer]:
    config = WorkerConfig(cache=address, pool_bytes=pool_bytes, max_step_tokens=1 << 20, **PATIENT)
    servicer = FusionServicer(config, model)
    try:
        yield servicer
    finally:
        await servicer.close()


def _lines(rows: list[dict[str, object]]) -> Iterator[list[object]]:
    for row in rows:
        stages = row["stages_s"]
        assert isinstance(stages, dict)
        yield [*(row[column] for column in COLUMNS), *(f"{seconds:.3f}" for seconds in stages.values())]


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds --model, which may be one of `SHAPES`, and --device."""
    command.add_model(parser, f", or {', '.join(SHAPES)}: random weights")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda[:N] (default: %(default)s)")


def load(name: str, device: str, dtype: str = "auto") -> models.Model:
    """Loads a model, or makes one with random weights of one of `SHAPES`, which compute in bfloat16 by default."""
    if name not in SHAPES:
        return models.load(resolve(name), device, dtype)
    kind = torch.bfloat16 if dtype == "auto" else models.DTYPES[dtype]
    return build(SHAPES[name], kind, models.device_of(device))


def processor(device: str) -> str:
    """The GPU that computes on a device, or the number of CPU cores."""
    found = models.device_of(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else command.machine()


def show(title: str, rows: list[dict[str, object]], path: Path | None, device: str = "cpu") -> None:
    """Prints a bench's rows as a table, and writes them to `path`."""
    title = f"{title}; {processor(device)}"
    command.show(command.table(title, [*rows[0]], (list(row.values()) for row in rows)))
    command.write(rows, path)


def main() -> None:
    parser = command.parser_of("worker.bench", __doc__)
    add_model(parser)
    command.add_data(parser)
    parser.add_argument("--contexts", default="1024,2048,4096", help="tokens of passages (%(default)s)")
    about = "runs per recipe; the median ratio's is reported (%(default)s)"
    parser.add_argument("--repeats", type=int, default=3, help=about)
    parser.add_argument("--dtype", choices=("auto", *sorted(models.DTYPES)), default="auto")
    args = parser.parse_args()
    started = time.perf_counter()
    rows = asyncio.run(_run(args))
    seconds = time.perf_counter() - started
    columns = (*COLUMNS, "lookup", "load", "select", "prefill")
    title = f"TTFT, {args.model}, {processor(args.device)} ({seconds:.0f} s)"
    command.show(command.table(title, columns, _lines(rows)))


async def _run(args: argparse.Namespace) -> list[dict[str, object]]:
    contexts = [int(part) for part in args.contexts.split(",")]
    model = load(args.model, args.device, args.dtype)
    if args.model in SHAPES:
        passages = Passages.random(max(contexts) // CHUNK, CHUNK)
    else:
        passages = await Passages.of(model, args.data, max(contexts) // 100)
    where: dict[str, object] = {"machine": processor(args.device), "model": args.model}
    return await bench(
        *(model, passages, contexts, args.repeats, Console(stderr=True)),
        done=lambda rows: command.write([where | row for row in rows], args.json),
    )


if __name__ == "__main__":
    sys.exit(run_command("ttft", main))
