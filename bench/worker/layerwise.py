"""Loading layer by layer beside loading whole requests: time to the first token, and what a stream beside it feels.

A worker computes a request once all its KV is in the pool (FusionRAG 4.2: whole requests). The other way is to begin
at once and to let every layer wait for its own KV. Both are measured over a storage device of any speed: a thread
that waits as long as the bytes would take there, and then moves them from memory to their place. Of the runs of each
the median counts.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from fusionkv.bench.worker.bench import PATIENT, cache_process, show
from fusionkv.bench.worker.throughput import Traffic, fill, small_model
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import SamplingParams
from fusionkv.fusion_worker.load.placement import LoadedChunk, Stages
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.recipes import modifiers
from fusionkv.fusion_worker.request import Piece
from fusionkv.fusion_worker.servicer import FusionServicer

RECIPES = (("full_reuse", 0.0), ("epic", 0.15), ("prophetkv", 0.15))
# Seconds that the device takes for a prompt, over those that the worker computes for it.
SHARES = (0.1, 0.3, 1.0, 3.0)
_STREAM_TOKENS = 2048  # of an answer that outlasts every other


class Device:
    """A storage device in the place of the cache service: of `rate` bytes a second.

    layered: whether chunks are ready at once and the model's layers wait; otherwise chunks wait.
    """

    def __init__(self, servicer: FusionServicer, model: models.Model) -> None:
        self._storage, self._real = servicer.loader.storage, servicer.loader.fetch
        self._pool = servicer.pool
        self._kept: dict[bytes, torch.Tensor] = {}
        self._turn = asyncio.Lock()
        self._coming: list[LoadedChunk] = []
        self._arrived: list[threading.Event] = []
        self.rate, self.layered = float("inf"), False
        servicer.loader.fetch = self.fetch  # type: ignore[method-assign]
        self._layers = list(model.network.model.layers)
        for number, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._wait(number))

    async def fetch(self, part: LoadedChunk, stages: Stages) -> None:
        """Brings a part; from the cache service the first time."""
        key, resident = part.wanted.key, part.resident
        if key not in self._kept:
            await self._real(part, stages)
            self._kept[key] = self._storage.read(resident.runs, resident.tokens)
        elif not self.layered:
            data = self._kept[key]
            async with self._turn:
                await asyncio.sleep(len(data) / self.rate)
            await asyncio.to_thread(self._storage.write, resident.runs, resident.tokens, data)
        else:
            if not self._coming:
                self._arrived = [threading.Event() for _ in self._layers]
                # All parts of a prompt are asked for in the same turn of the loop.
                asyncio.get_running_loop().call_soon(self._start)
            self._coming.append(part)

    def _start(self) -> None:
        parts, self._coming = self._coming, []
        threading.Thread(target=self._bring, args=(parts, self._arrived), daemon=True).start()

    def _bring(self, parts: list[LoadedChunk], arrived: list[threading.Event]) -> None:
        """All parts, a layer at a time."""
        total = sum(len(self._kept[part.wanted.key]) for part in parts)
        started = time.perf_counter()
        for number, event in enumerate(arrived):
            due = started + (number + 1) / len(arrived) * total / self.rate
            time.sleep(max(0.0, due - time.perf_counter()))
            for part in parts:
                self._put(part, number)
            event.set()

    def _put(self, part: LoadedChunk, layer: int) -> None:
        kv = self._pool.kv
        numbers = self._kept[part.wanted.key].view(kv.dtype).view(len(kv), 2, -1, *kv.shape[3:])
        at = 0
        for run in part.resident.runs:
            count = min(run.length, part.resident.tokens - at)
            kv[layer, :, run.start : run.start + count] = numbers[layer, :, at : at + count]
            at += count

    def _wait(self, layer: int) -> None:
        if self._arrived:
            self._arrived[layer].wait()


class Stand:
    """A worker whose KV comes from a device, asked for prompts of which its pool holds nothing."""

    def __init__(self, servicer: FusionServicer, model: models.Model, traffic: Traffic) -> None:
        self._servicer = servicer
        self._asked, self._other = (traffic.prompt(range(n, n + traffic.chunks), n) for n in (0, traffic.chunks))
        self.device = Device(servicer, model)
        self.bytes = servicer.loader.storage.size(len(self._asked.system) + self._asked.context_tokens)

    async def ttft(self, recipe: str, ratio: float) -> float:
        """Seconds to the first token."""
        self._servicer.pool.clear()
        started = time.perf_counter()
        times = [time.perf_counter() async for _ in self._tokens(self._asked, recipe, ratio, 1)]
        return times[0] - started

    async def gap(self, recipe: str, ratio: float) -> float:
        """The longest that another answer, which is streamed meanwhile, waits for a token."""
        times: list[float] = []
        streaming = asyncio.Event()

        async def stream() -> None:
            try:
                async for _ in self._tokens(self._other, "full_reuse", 0.0, _STREAM_TOKENS):
                    times.append(time.perf_counter())
                    streaming.set()
            finally:
                streaming.set()  # or who waits for it would never learn that it failed

        rate, self.device.rate = self.device.rate, float("inf")
        task = asyncio.create_task(stream())
        await streaming.wait()
        self.device.rate = rate
        try:
            asked = time.perf_counter()
            await self.ttft(recipe, ratio)
            if task.done():
                raise RuntimeError(f"the answer beside it ended before {_STREAM_TOKENS} tokens: {task.exception()}")
            marks = [asked, *(at for at in times if at > asked), time.perf_counter()]
            return max(b - a for a, b in itertools.pairwise(marks))
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _tokens(self, prompt: Prompt, recipe: str, ratio: float, most: int) -> AsyncIterator[Piece]:
        answering = self._servicer.answerer.answer(
            prompt, modifiers.find(recipe), ratio, SamplingParams(max_tokens=most)
        )
        async with aclosing(answering) as events:
            async for event in events:
                if isinstance(event, Piece):
                    yield event


async def bench(model: models.Model, traffic: Traffic, repeats: int, console: Console) -> list[dict[str, object]]:
    """One row for each recipe and speed of the device: medians of `repeats` runs."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        pool_bytes = (4 * traffic.chunks * traffic.chunk_tokens + 2 * _STREAM_TOKENS) * model.kv.token_bytes
        async with cache_process(Path(directory), 2 * pool_bytes) as (address, _):
            servicer = FusionServicer(WorkerConfig(cache=address, pool_bytes=pool_bytes, **PATIENT), model)
            try:
                await fill(servicer, traffic)
                stand = Stand(servicer, model, traffic)
                for name, ratio in RECIPES:  # brings all bytes from the cache service
                    await stand.gap(name, ratio)
                with Progress(console=console) as progress:
                    task = progress.add_task("layerwise", total=len(RECIPES) * len(SHARES))
                    for name, ratio in RECIPES:
                        rows += [await _row(stand, name, ratio, share, repeats, progress, task) for share in SHARES]
            finally:
                await servicer.close()
    return rows


async def _row(
    stand: Stand, name: str, ratio: float, share: float, repeats: int, progress: Progress, task: TaskID
) -> dict[str, object]:
    device = stand.device
    device.rate, device.layered = float("inf"), False
    computing = statistics.median([await stand.ttft(name, ratio) for _ in range(repeats)])
    device.rate = stand.bytes / (share * computing)
    found: dict[bool, tuple[float, float]] = {}
    for device.layered in (False, True):
        first = statistics.median([await stand.ttft(name, ratio) for _ in range(repeats)])
        found[device.layered] = first, statistics.median([await stand.gap(name, ratio) for _ in range(repeats)])
    progress.advance(task)
    (whole, whole_gap), (layers, layers_gap) = found[False], found[True]
    return {
        "name": name,
        "r": ratio,
        "loading_over_computing": share,
        "computing_s": round(computing, 3),
        "ttft_whole_s": round(whole, 3),
        "ttft_layers_s": round(layers, 3),
        "saved": round(1 - layers / whole, 3),
        "stream_gap_whole_s": round(whole_gap, 3),
        "stream_gap_layers_s": round(layers_gap, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.bench.worker.layerwise", description=__doc__)
    parser.add_argument("--chunks", type=int, default=8, help="in each prompt (%(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the median counts (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there as well")
    args = parser.parse_args()
    traffic = Traffic(2 * args.chunks, args.chunk_tokens, args.chunks)
    rows = asyncio.run(bench(small_model(), traffic, args.repeats, Console(stderr=True)))
    show("KV loaded whole, and layer by layer", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
