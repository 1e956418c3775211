"""A soak test: hours of mixed traffic over a pool and a cache that are too small; checks answers and leaks.

Several clients ask questions of the reference models' tasks with many recipes, and cancel one in seven at a random
moment. Each answer must equal that of the same question alone without a cache. Ten times all clients pause: nothing
may be pinned, leased or waiting then, and memory and open files must not have grown. In the end the cache service is
stopped, and its files on disk are checked.
"""

import asyncio
import dataclasses
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fusionkv.bench import command
from fusionkv.bench.services.process import Footing
from fusionkv.bench.worker.bench import PATIENT, cache_service
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import SamplingParams
from fusionkv.fusion_worker.evaluate.data.prompts import Prompter
from fusionkv.fusion_worker.evaluate.data.stories import TASKS
from fusionkv.fusion_worker.evaluate.data.tasks import reference
from fusionkv.fusion_worker.meters import Summary
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.request import Request
from fusionkv.fusion_worker.servicer import FusionServicer
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.answer.v1.answer_pb2 import Token
from fusionkv.protos.contract.recipes import find_recipe
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb

RECIPES = (
    ("full_attention", 1.0),
    ("full_reuse", 0.0),
    ("epic", 0.2),
    ("cacheblend", 0.15),
    ("prophetkv", 0.15),
    ("prophetkv+snapkv(64)", 0.15),
    ("prefix_cache", 0.0),
)
ANSWER = 8
_SHOWN = 20  # maximum number of printed wrong answers
_CANCELLED = 1 / 7
# Allowed growth between the first tenth of the run, after the warm-up, and its end.
BOUNDS = (1.1, 16 << 20, 8)  # factor of memory, additional bytes, additional files


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A question and its recipe. Prefix caching has a separate tenant: its entries would be exact hits for others."""

    prompt: Prompt
    recipe: str
    ratio: float


class Soak:
    """Clients of one worker, and a count of what they saw."""

    def __init__(self, servicer: FusionServicer, cases: list[Case], expected: list[tuple[int, ...]]) -> None:
        self._servicer = servicer
        self._cases = cases
        self._expected = expected
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, clients: int, seconds: float, seed: int) -> None:
        """All clients ask until the time is over; answers that differ from the expected ones are added to `wrong`."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for client in range(clients):
                group.create_task(self._client(random.Random(f"{seed} {client}"), end))

    async def _client(self, chance: random.Random, end: float) -> None:
        while time.monotonic() < end:
            number = chance.randrange(len(self._cases))
            asking = asyncio.ensure_future(answer(self._servicer, self._cases[number]))
            if chance.random() < _CANCELLED:
                await asyncio.wait([asking], timeout=chance.expovariate(20))
                asking.cancel()
                await asyncio.wait([asking])
                if asking.cancelled():
                    self.seen["cancelled"] += 1
                    continue
            ids, summary = await asking
            case = self._cases[number]
            if summary.degraded or ids != self._expected[number]:
                self.wrong.append(f"{case.recipe}: {ids}, alone {self._expected[number]} {summary.degraded}")
            self.seen["answers"] += 1
            self.seen["chunks encoded"] += summary.prefill.loaded.missed
            for (_, tier), count in summary.prefill.loaded.hits.items():
                self.seen[f"chunks from {tier}"] += count


async def answer(servicer: FusionServicer, case: Case) -> tuple[tuple[int, ...], Summary]:
    """The answer's token ids and summary."""
    ids: list[int] = []
    request = Request(case.prompt, find_recipe(case.recipe), case.ratio, SamplingParams(max_tokens=ANSWER))
    async with aclosing(servicer.answerer.answer(request)) as events:
        async for event in events:
            if isinstance(event, Token):
                ids.append(event.id)
            elif isinstance(event, Summary):
                return tuple(ids), event
    raise AssertionError("no summary")


def questions(model: models.Model, count: int) -> list[Case]:
    """`count` questions of every task, with alternating recipes."""
    prompter = Prompter(model, 512)
    cases: list[Case] = []
    for name in TASKS:
        for sample in reference(name, count).samples:
            recipe, ratio = RECIPES[len(cases) % len(RECIPES)]
            prompt, _ = prompter.prompt(sample, False, ANSWER)
            tenant = "prefix" if recipe == "prefix_cache" else ""
            cases.append(Case(dataclasses.replace(prompt, tenant=tenant), recipe, ratio))
    return cases


class Trail:
    """Memory and open files of a process over time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks: list[Footing] = []

    def look(self) -> None:
        """Records the figures. Raises AssertionError when they have grown since the first call."""
        now = Footing.of(self._pid)
        self._looks.append(now)
        assert not now.outgrew(self._looks[0], *BOUNDS), f"the process grew from {self._looks[0]} to {now}"

    def row(self, name: str) -> dict[str, object]:
        """First, last and maximum memory in MiB and open files."""
        mib, files = [look.bytes >> 20 for look in self._looks], [look.files for look in self._looks]
        return {
            f"{name}_{what}": [each[0], each[-1], max(each)] for what, each in (("rss_mib", mib), ("files", files))
        }


async def soak(
    model: models.Model, cases: list[Case], minutes: float, clients: int, console: Console
) -> tuple[dict[str, object], list[str]]:
    """Runs the soak test for `minutes`; returns counts, and wrong answers.

    Raises:
        AssertionError: something leaked.
    """
    chunk = max(len(part) for case in cases for part in case.prompt.parts) * model.kv.token_bytes
    longest = max(case.prompt.tokens for case in cases) * model.kv.token_bytes
    started, pieces = time.monotonic(), 10
    with tempfile.TemporaryDirectory() as directory:
        # A small pool as well: memory that it returns to the allocator would hide growth.
        alone = FusionServicer(WorkerConfig(pool_bytes=max(1 << 20, 4 * longest)), model)
        try:
            expected = [(await answer(alone, case))[0] for case in cases]
        finally:
            await alone.close()
        # Memory for a few chunks, disk for a part of them, and a pool for a few prompts, so that all tiers evict.
        memory, disk = max(1 << 20, 8 * chunk), max(4 << 20, len(cases) * chunk)
        with cache_service(directory, memory, disk) as ((address,), pid):
            pool = max(1 << 20, 4 * longest)
            config = WorkerConfig(cache=address, pool_bytes=pool, max_requests=6, max_queue=1000, **PATIENT)
            servicer, cache = FusionServicer(config, model), CacheClient(address)
            try:
                run, worker, service = Soak(servicer, cases, expected), Trail(os.getpid()), Trail(pid)
                with Progress(console=console) as progress:
                    for piece in progress.track(range(pieces), description="soak"):
                        shown = len(run.wrong)
                        await run.run(clients, 60 * minutes / pieces, piece)
                        for each in run.wrong[shown:_SHOWN]:
                            progress.console.print(f"wrong: {each}")
                        await _check_idle(servicer, cache)
                        worker.look()
                        service.look()
                        progress.console.print(f"{Footing.of(os.getpid()).bytes >> 20} MiB, {dict(run.seen)}")
                stats = await cache.stats()
            finally:
                await cache.close()
                await servicer.close()
        left = await asyncio.to_thread(_check_stopped, Path(directory) / "kv", disk)
    row = {
        "minutes": round((time.monotonic() - started) / 60, 1),
        "clients": clients,
        "wrong_answers": len(run.wrong),
        **{name.replace(" ", "_"): count for name, count in sorted(run.seen.items())},
        "evictions": {pb.Tier.Name(each.tier).removeprefix("TIER_").lower(): each.evictions for each in stats.tiers},
        "leases": stats.active_leases,
        "entries_left": left,
        **worker.row("worker"),
        **service.row("cache"),
    }
    return row, run.wrong


def _check_stopped(data_dir: Path, disk_bytes: int) -> int:
    """Counts the entries of a stopped cache service. Raises AssertionError when its files are inconsistent."""
    argv = [sys.executable, "-P", "-m", "fusionkv.bench.cache.integrity"]
    argv += ["--data-dir", str(data_dir), "--disk-bytes", str(disk_bytes)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


async def _check_idle(servicer: FusionServicer, cache: CacheClient) -> None:
    """Checks that no lease and no slot is held once everything is answered."""
    await servicer.wait_idle()
    for _ in range(200):
        if not (await cache.stats()).active_leases:
            break
        await asyncio.sleep(0.05)  # releases may be in flight
    else:
        raise AssertionError("a lease was not released")
    servicer.pool.check_integrity(idle=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser_of("services.soak", __doc__)
    parser.add_argument("--model", type=Path, default=WorkerConfig().model, help="reference model (%(default)s)")
    parser.add_argument("--minutes", type=float, default=30.0, help="duration (%(default)s)")
    parser.add_argument("--clients", type=int, default=12, help="concurrent clients (%(default)s)")
    parser.add_argument("--questions", type=int, default=20, help="questions of every task (%(default)s)")
    args = parser.parse_args(argv)
    console, model = Console(stderr=True), models.load(args.model)
    cases = questions(model, args.questions)
    row, wrong = asyncio.run(soak(model, cases, args.minutes, args.clients, console))
    Console().print(row)
    command.write([row], args.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
