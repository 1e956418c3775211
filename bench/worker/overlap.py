"""What loading beside computing saves: the same questions with an engine that stands still while KV is loaded.

All KV comes from the cache service's disk tier. Rates and questions are the same for both, which take turns at every
rate, each with an empty pool and a page cache that holds nothing of the disk tier's files: a chunk that is asked for
again comes from there or from the pool. Both fetch as many chunks at once. Loading hides no more than it takes, and a
local disk takes little of it, so both are also measured over devices that take longer: there a fetch waits as long
as its bytes would take, one after another, before it is made.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fusionkv.bench.worker.bench import PATIENT, cache_process, show
from fusionkv.bench.worker.throughput import Load, Station, Traffic, fill, small_model
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.load.placement import LoadedChunk, Stages
from fusionkv.fusion_worker.servicer import FusionServicer

SYSTEMS = (("full_reuse", 0.0), ("prophetkv", 0.15))
# Seconds that a device takes for a prompt of which the pool holds nothing, over those until the first token without
# it; and the rates, as shares of what the two together allow one request after another.
DEVICES = ((0.0, (0.6, 0.9)), (1.0, (0.9,)), (3.0, (0.9,)))


class Device:
    """A storage device before the cache service's: of `seconds` for a byte."""

    def __init__(self, servicer: FusionServicer) -> None:
        self._real = servicer.loader.fetch
        self._turn = asyncio.Lock()
        self.seconds = 0.0
        servicer.loader.fetch = self.fetch  # type: ignore[method-assign]

    async def fetch(self, part: LoadedChunk, stages: Stages) -> None:
        assert part.wanted.entry is not None
        if self.seconds:
            async with self._turn:
                await asyncio.sleep(part.wanted.entry.size * self.seconds)
        await self._real(part, stages)


class Alternation:
    """Fetches side by side, or a step of the engine, and never both.

    A fetch counts from when it waits for its turn among `max_loads`: a step begins when no chunk is left to fetch.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._fetches = 0
        self._step: Future[None] | None = None

    @asynccontextmanager
    async def fetching(self) -> AsyncIterator[None]:
        """Waits for the end of the step under way; no other begins inside."""
        with self._changed:
            self._fetches += 1
            step = self._step
        try:
            if step is not None:
                await asyncio.wait([asyncio.wrap_future(step)])
            yield
        finally:
            with self._changed:
                self._fetches -= 1
                self._changed.notify_all()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """For the engine's thread: waits until nothing is fetched or is to be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._fetches)
            step = self._step = Future()
        try:
            yield
        finally:
            with self._changed:
                self._step = None
            step.set_result(None)


def stand_still(servicer: FusionServicer) -> None:
    """From now on the engine computes nothing while chunks are fetched, and the other way round."""
    alternation, turns, engine = Alternation(), servicer.loader.turns, servicer.engine
    turn, step = turns.turn, engine.step

    @asynccontextmanager
    async def turned(number: int) -> AsyncIterator[None]:
        async with alternation.fetching(), turn(number):
            yield

    def stepped(parts: Sequence[object]) -> None:
        with alternation.stepping():
            step(parts)  # type: ignore[arg-type]

    turns.turn = turned  # type: ignore[method-assign]
    engine.step = stepped  # type: ignore[method-assign]


def drop_pages(folder: Path) -> None:
    """Makes the next reads of the files below a folder go to their device, if the device is one of this machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def bench(model: models.Model, traffic: Traffic, requests: int, console: Console) -> list[dict[str, object]]:
    """One row for each recipe, device and rate."""
    runs = [(system, slower, share) for system in SYSTEMS for slower, shares in DEVICES for share in shares]
    prompt_bytes = traffic.chunks * traffic.chunk_tokens * model.kv.token_bytes
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory, Progress(console=console) as progress:
        task = progress.add_task("overlap", total=2 * len(runs))
        # Memory for a chunk: everything else lies on disk.
        memory = max(1 << 20, traffic.chunk_tokens * model.kv.token_bytes)
        async with AsyncExitStack() as stack:
            address, _ = await stack.enter_async_context(cache_process(Path(directory), memory))
            # Beside, and in turn.
            workers = [await stack.enter_async_context(_worker(model, traffic, address)) for _ in range(2)]
            stations = [Station(worker) for worker in workers]
            devices = [Device(worker) for worker in workers]
            await fill(workers[0], traffic)
            alone = {name: await stations[0].alone(traffic, name, ratio) for name, ratio in SYSTEMS}
            stand_still(workers[1])
            for number, ((name, ratio), slower, share) in enumerate(runs):
                first, whole = alone[name]
                found = dict[int, Load]()
                # Another first each time: what a machine does besides changes slowly.
                for which in (0, 1) if number % 2 else (1, 0):
                    devices[which].seconds = slower * first / prompt_bytes
                    workers[which].pool.clear()
                    await asyncio.to_thread(drop_pages, Path(directory))
                    rate = share / (whole + slower * first)
                    found[which] = await stations[which].load(
                        traffic.prompts(requests, number), name, ratio, rate, number
                    )
                    progress.advance(task)
                rows.append(_row(name, ratio, slower * first, rate, found[0], found[1]))
    return rows


def _row(name: str, ratio: float, device: float, rate: float, beside: Load, after: Load) -> dict[str, object]:
    ours, theirs = statistics.mean(beside.ttft), statistics.mean(after.ttft)
    return {
        "name": name,
        "r": ratio,
        "device_s": round(device, 3),
        "requests_per_s": round(rate, 2),
        "ttft_still_s": round(theirs, 3),
        "ttft_beside_s": round(ours, 3),
        "saved": round(1 - ours / theirs, 3),
        "engine_idle_still": round(1 - after.busy, 3),
        "engine_idle_beside": round(1 - beside.busy, 3),
    }


@asynccontextmanager
async def _worker(model: models.Model, traffic: Traffic, address: str) -> AsyncIterator[FusionServicer]:
    """A worker whose pool holds little more than the requests in flight."""
    prompt = (traffic.chunks + 2) * traffic.chunk_tokens * model.kv.token_bytes
    config = WorkerConfig(cache=address, pool_bytes=8 * prompt, max_requests=6, max_queue=1 << 20, **PATIENT)
    servicer = FusionServicer(config, model)
    try:
        yield servicer
    finally:
        await servicer.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.bench.worker.overlap", description=__doc__)
    parser.add_argument("--requests", type=int, default=40, help="at each rate (%(default)s)")
    parser.add_argument("--base", type=int, default=256, help="chunks of the knowledge base (%(default)s)")
    parser.add_argument("--chunks", type=int, default=8, help="in each prompt (%(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there as well")
    args = parser.parse_args()
    traffic = Traffic(args.base, args.chunk_tokens, args.chunks)
    rows = asyncio.run(bench(small_model(), traffic, args.requests, Console(stderr=True)))
    show("loading beside computing, and in turn with it", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
