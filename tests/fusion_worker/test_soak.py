"""Many requests at once over a pool that is too small and a cache service: evicted, fetched again, always right.

`make soak MINUTES=30` runs the last test for so long.
"""

import asyncio
import os
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import SamplingParams
from fusionkv.fusion_worker.evaluate.data.prompts import Prompter
from fusionkv.fusion_worker.evaluate.data.stories import TASKS
from fusionkv.fusion_worker.evaluate.data.tasks import reference, shipped
from fusionkv.fusion_worker.meters import Summary
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.request import Request
from fusionkv.fusion_worker.servicer import FusionServicer
from fusionkv.kvcache_service.__main__ import make_store
from fusionkv.kvcache_service.config import Config
from fusionkv.protos.answer.v1.answer_pb2 import Token
from fusionkv.protos.contract.recipes import find_recipe
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from tests.fusion_worker.oracle import oracle, random_ids
from tests.processes import Footing
from tests.services import start_cache
from tests.waiting import until

pytestmark = pytest.mark.system

MINUTES = float(os.environ.get("FUSIONKV_TEST_SOAK_MINUTES", "0.1"))
CLIENTS, PIECES, ANSWER, CANCELLED = 12, 10, 8, 1 / 7
RECIPES = (
    ("full_attention", 1.0),
    ("full_reuse", 0.0),
    ("epic", 0.2),
    ("cacheblend", 0.15),
    ("prophetkv", 0.15),
    ("prophetkv+snapkv(64)", 0.15),
    ("prefix_cache", 0.0),
)
# Growth between the first tenth of the run, after the warm-up, and its end: a factor and bytes of memory, files.
BOUNDS = (1.1, 16 << 20, 8)


@pytest.mark.parametrize("kind", ["qwen3", "mistral-window"])
async def test_answers_under_pressure(kind: str, cached: Any) -> None:
    plain, dice = oracle(kind), random.Random(kind)
    systems = [random_ids(n, n) for n in (5, 9)]
    chunks = [random_ids(dice.randrange(1, 40), 100 + i) for i in range(12)]
    prompts = []
    for i in range(40):
        parts = (dice.choice(systems), dice.choices(chunks, k=dice.randrange(5)), random_ids(1 + i % 7, i))
        ratio, expected = dice.choice([0.0, 0.3, 1.0]), None
        if ratio == 1.0 or len(parts[1]) < 2:
            expected = plain.full_attention(parts)
        elif ratio == 0.0:
            expected = plain.full_reuse(parts)
        prompts.append((parts, {"ratio": ratio, "expected": expected, "recipe": "epic", "max_tokens": 3}))

    # Room for three or four of the prompts.
    room = 600 * (await cached(kind)).model.kv.token_bytes
    rig = await cached(kind, pool_bytes=room, max_requests=8, max_step_tokens=64)
    for _ in range(2):
        answers = await asyncio.gather(*(rig.ask(*parts, **more) for parts, more in prompts))
        assert not any(answer.summary.degraded for answer in answers)
        rig.pool.check_integrity()
        await rig.stored()
    assert not any(a.summary.tokens_encoded for a in answers), "the second time all is found"
    assert {"device", "memory"} <= {hit.tier for a in answers for hit in a.summary.hits}


async def test_requests_given_up_leave_no_lease(cached: Any) -> None:
    rig, dice = await cached("llama"), random.Random(5)
    parts = random_ids(5, 1), [random_ids(20, n) for n in range(2, 6)], random_ids(4, 9)
    await rig.fill(*parts)
    rig.pool.clear()
    for _ in range(60):
        asking = asyncio.create_task(rig.ask(*parts))
        await asyncio.sleep(dice.uniform(0, 0.01))  # most of them while they wait for the lookup
        asking.cancel()
        await asyncio.wait([asking])
    await rig.settled()

    async def none() -> bool:
        return not (await rig.servicer.cache.stats()).active_leases

    await rig.until(none, 20)  # a lease's own end is after 30 s


@dataclass(frozen=True, slots=True)
class Case:
    prompt: Prompt
    recipe: str
    ratio: float

    async def answer(self, servicer: FusionServicer) -> tuple[list[int], Summary]:
        ids: list[int] = []
        request = Request(self.prompt, find_recipe(self.recipe), self.ratio, SamplingParams(max_tokens=ANSWER))
        async with aclosing(servicer.answerer.answer(request)) as events:
            async for event in events:
                if isinstance(event, Token):
                    ids.append(event.id)
                elif isinstance(event, Summary):
                    return ids, event
        raise AssertionError("no summary")


def questions(model: models.Model, count: int) -> list[Case]:
    """`count` questions of every task, with alternating recipes.

    Prefix caching has a tenant of its own: its entries would be exact hits for others.
    """
    prompter, cases = Prompter(model, 512), list[Case]()
    for name in TASKS:
        for sample in reference(name, count).samples:
            recipe, ratio = RECIPES[len(cases) % len(RECIPES)]
            prompt, _ = prompter.prompt(sample, False, ANSWER)
            cases.append(Case(replace(prompt, tenant="prefix" * (recipe == "prefix_cache")), recipe, ratio))
    return cases


async def keep_asking(
    servicer: FusionServicer, cases: Sequence[Case], alone: Sequence[list[int]], dice: random.Random, end: float
) -> None:
    """Asks until `end`, and gives up one question in seven at some moment; answers are those of each `alone`."""
    while time.monotonic() < end:
        case, expected = dice.choice(list(zip(cases, alone, strict=True)))
        asking = asyncio.ensure_future(case.answer(servicer))
        if dice.random() < CANCELLED:
            await asyncio.wait([asking], timeout=dice.expovariate(20))
            asking.cancel()
            await asyncio.wait([asking])
            if asking.cancelled():
                continue
        ids, summary = await asking
        assert (ids, summary.degraded) == (expected, ""), case.recipe


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
async def test_mixed_traffic_over_tiers_that_are_too_small(tmp_path: Path, launch: Any, cache_client: Any) -> None:
    model = models.load(shipped()[0])
    cases = questions(model, 20 if MINUTES > 1 else 2)
    assert {case.recipe for case in cases} == {name for name, _ in RECIPES}
    chunk = max(len(part) for case in cases for part in case.prompt.parts) * model.kv.token_bytes
    # A pool for a few prompts, memory for a few chunks, and disk for a part of them, so that all evict.
    pool_bytes = max(1 << 20, 4 * max(case.prompt.tokens for case in cases) * model.kv.token_bytes)
    memory, disk = max(1 << 20, 8 * chunk), max(4 << 20, len(cases) * chunk)
    uncached = FusionServicer(WorkerConfig(pool_bytes=pool_bytes), model)
    alone = [(await case.answer(uncached))[0] for case in cases]
    await uncached.close()

    cache = start_cache(launch, tmp_path, "--memory-bytes", str(memory), "--disk-bytes", str(disk))
    busy = {"lookup_timeout": 60.0, "fetch_timeout": 60.0, "cache_seconds": 120.0}
    config = WorkerConfig(cache=cache.address, pool_bytes=pool_bytes, max_requests=6, max_queue=1000, **busy)
    servicer, client = FusionServicer(config, model), cache_client(cache)

    async def no_lease() -> bool:
        return not (await client.stats()).active_leases

    footings: dict[int, Footing] = {}
    for piece in range(PIECES):
        end = time.monotonic() + 60 * MINUTES / PIECES
        dices = (random.Random(f"{piece} {number}") for number in range(CLIENTS))
        await asyncio.gather(*(keep_asking(servicer, cases, alone, dice, end) for dice in dices))
        await servicer.wait_idle()
        await until(no_lease, 20)
        servicer.pool.check_integrity(idle=True)
        for pid in (os.getpid(), cache.process.pid):
            now = Footing.of(pid)
            assert not now.outgrew(footings.setdefault(pid, now), *BOUNDS), f"from {footings[pid]} to {now}"
    evictions = {pb.Tier.Name(tier.tier): tier.evictions for tier in (await client.stats()).tiers}
    assert all(evictions.values()) or MINUTES < 1, evictions
    await servicer.close()
    assert cache.stop() == 0

    store = make_store(Config(data_dir=tmp_path / "kvcache", disk_bytes=disk, memory_bytes=1 << 20))
    await store.open()
    store.check_integrity(idle=True)
    assert len(store.entries) > 0
    await store.close()
