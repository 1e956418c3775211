"""What loading beside computing saves: the same questions with an engine that stands still while KV is loaded.

All KV comes from the cache service's disk tier. Rates and questions are the same for both, in one run.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.bench import PATIENT, cache_process, show
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.engine.placement import Placed, Stages
from fusionkv.fusion_worker.servicer import FusionServicer
from fusionkv.fusion_worker.throughput import Load, Station, Traffic, fill, small_model

SYSTEMS = (("full_reuse", 0.0), ("prophetkv", 0.15))
SHARES = (0.3, 0.6, 0.9)


def stand_still(servicer: FusionServicer) -> None:
    """From now on the engine computes nothing while a chunk is fetched, and the other way round."""
    turn, loader, engine = threading.Lock(), servicer.loader, servicer.engine
    fetch, step = loader.fetch, engine.step
    # A fetch has work for threads too: were all of them to wait for the turn, it would never end.
    first = asyncio.Lock()

    def over(taken: asyncio.Future[bool]) -> None:
        if not taken.cancelled():
            turn.release()

    async def fetched(part: Placed, stages: Stages) -> None:
        async with first:
            taking = asyncio.ensure_future(asyncio.to_thread(turn.acquire))
            try:
                await asyncio.shield(taking)
                await fetch(part, stages)
            finally:
                # A thread goes on waiting for the turn when this task is cancelled, and gets it.
                taking.add_done_callback(over)

    def stepped(parts: Sequence[object]) -> None:
        with turn:
            step(parts)  # type: ignore[arg-type]

    loader.fetch = fetched  # type: ignore[method-assign]
    engine.step = stepped  # type: ignore[method-assign]


async def bench(model: models.Model, traffic: Traffic, requests: int, console: Console) -> list[dict[str, object]]:
    """One row for each recipe and rate."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory, Progress(console=console) as progress:
        task = progress.add_task("overlap", total=2 * len(SYSTEMS) * len(SHARES))
        # Memory for a chunk: everything else lies on disk.
        memory = max(1 << 20, traffic.chunk_tokens * model.kv.token_bytes)
        async with cache_process(Path(directory), memory) as (address, _):
            async with _worker(model, traffic, address) as first:
                await fill(first, traffic)
                station = Station(first)
                rates = {name: 1 / (await station.alone(traffic, name, ratio))[1] for name, ratio in SYSTEMS}
            found: dict[tuple[str, float, bool], Load] = {}
            for still in (False, True):
                async with _worker(model, traffic, address) as servicer:
                    station = Station(servicer)
                    if still:
                        stand_still(servicer)
                    for name, ratio in SYSTEMS:
                        for number, share in enumerate(SHARES):
                            prompts = traffic.prompts(requests, number)
                            load = await station.load(prompts, name, ratio, share * rates[name], number)
                            found[name, share, still] = load
                            progress.advance(task)
        for name, ratio in SYSTEMS:
            for share in SHARES:
                beside, after = (found[name, share, still] for still in (False, True))
                ours, theirs = statistics.mean(beside.ttft), statistics.mean(after.ttft)
                rows.append(
                    {
                        "name": name,
                        "r": ratio,
                        "requests_per_s": round(share * rates[name], 2),
                        "ttft_still_s": round(theirs, 3),
                        "ttft_beside_s": round(ours, 3),
                        "saved": round(1 - ours / theirs, 3),
                        "engine_idle_still": round(1 - after.busy, 3),
                        "engine_idle_beside": round(1 - beside.busy, 3),
                    }
                )
    return rows


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
    parser = argparse.ArgumentParser(prog="python -m fusionkv.fusion_worker.overlap", description=__doc__)
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
