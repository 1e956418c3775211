"""A long prefill beside streamed answers: what the rows of a mixed step cost the one and the others.

Every stream waits for the step that its next token is in. Small steps keep streams smooth and the prefill late, since
each step reads all weights again and waits for its last row; `max_mixed_tokens` is that choice.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fusionkv.bench.worker.bench import show
from fusionkv.bench.worker.throughput import Traffic, small_model
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import SamplingParams
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.recipes import modifiers
from fusionkv.fusion_worker.request import Piece
from fusionkv.fusion_worker.servicer import FusionServicer

_STREAM_TOKENS = 4096  # of an answer that outlasts the prefill


async def _tokens(servicer: FusionServicer, prompt: Prompt, most: int) -> AsyncIterator[float]:
    """When each token of an answer by full attention came."""
    recipe, params = modifiers.find("full_attention"), SamplingParams(max_tokens=most)
    async with aclosing(servicer.answerer.answer(prompt, recipe, 1.0, params)) as events:
        async for event in events:
            if isinstance(event, Piece):
                yield time.perf_counter()


async def _ttft(servicer: FusionServicer, prompt: Prompt) -> float:
    started = time.perf_counter()
    (first,) = [at async for at in _tokens(servicer, prompt, 1)]
    return first - started


class _Stream:
    """An answer that is streamed beside others."""

    def __init__(self, servicer: FusionServicer, prompt: Prompt) -> None:
        self.times: list[float] = []
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._run(servicer, prompt))

    async def _run(self, servicer: FusionServicer, prompt: Prompt) -> None:
        try:
            async for at in _tokens(servicer, prompt, _STREAM_TOKENS):
                self.times.append(at)
                self.begun.set()
        finally:
            self.begun.set()  # or who waits for it would never learn that it failed

    async def stop(self) -> None:
        if self.task.done():
            raise RuntimeError(f"an answer ended before the prefill did: {self.task.exception()}")
        self.task.cancel()
        await asyncio.wait([self.task])

    def pauses(self, start: float, stop: float) -> list[float]:
        marks = [start, *(at for at in self.times if start < at < stop), stop]
        return [after - before for before, after in itertools.pairwise(marks)]


async def bench(
    model: models.Model, traffic: Traffic, budgets: Sequence[int], streams: int, repeats: int, console: Console
) -> list[dict[str, object]]:
    """One row for each budget of rows: the run of the median time to the first token."""
    rows = []
    with Progress(console=console) as progress:
        task = progress.add_task("mixing", total=len(budgets) * repeats)
        for budget in budgets:
            found = []
            for _ in range(repeats):
                found.append(await _row(model, traffic, budget, streams))
                progress.advance(task)
            rows.append(sorted(found, key=lambda row: float(str(row["ttft_s"])))[len(found) // 2])
    return rows


async def _row(model: models.Model, traffic: Traffic, budget: int, streams: int) -> dict[str, object]:
    long = traffic.prompt(range(traffic.chunks), 0)
    short = [traffic.prompt([traffic.chunks + number], 1 + number) for number in range(streams)]
    tokens = 2 * long.tokens + streams * (short[0].tokens + _STREAM_TOKENS)
    config = WorkerConfig(
        pool_bytes=2 * tokens * model.kv.token_bytes, max_mixed_tokens=budget, max_requests=streams + 1
    )
    servicer = FusionServicer(config, model)
    try:
        alone = await _ttft(servicer, long)
        beside = [_Stream(servicer, prompt) for prompt in short]
        for stream in beside:
            await stream.begun.wait()
        started = time.perf_counter()
        ttft = await _ttft(servicer, long)
        for stream in beside:
            await stream.stop()
    finally:
        await servicer.close()
    pauses = [pause for stream in beside for pause in stream.pauses(started, started + ttft)]
    return {
        "max_mixed_tokens": budget,
        "streams": streams,
        "prefill_tokens": long.tokens,
        "ttft_alone_s": round(alone, 3),
        "ttft_s": round(ttft, 3),
        "stream_tokens": len(pauses) - streams,
        "pause_median_s": round(statistics.median(pauses), 3),
        "pause_longest_s": round(max(pauses), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.bench.worker.mixing", description=__doc__)
    parser.add_argument("--budgets", default="64,128,256,512,1024,4096", help="rows, a comma between (%(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="answers beside it (%(default)s)")
    parser.add_argument("--chunks", type=int, default=16, help="in the long prompt (%(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the median counts (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there as well")
    args = parser.parse_args()
    traffic = Traffic(args.chunks + args.streams, args.chunk_tokens, args.chunks)
    budgets = [int(each) for each in args.budgets.split(",")]
    rows = asyncio.run(bench(small_model(), traffic, budgets, args.streams, args.repeats, Console(stderr=True)))
    show("a prefill beside streamed answers", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
