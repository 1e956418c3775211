"""Many requests at once over a pool that is too small and a cache service: evicted, fetched again, always right."""

import asyncio
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionkv.bench.services import soak
from fusionkv.bench.services.process import Footing
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.evaluate.data.tasks import shipped
from tests.fusion_worker.oracle import oracle, random_ids

pytestmark = pytest.mark.system


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


@pytest.mark.long
@pytest.mark.slow
def test_the_soak_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = models.load(shipped()[0])
    cases = soak.questions(model, 2)
    assert {case.recipe for case in cases} == {name for name, _ in soak.RECIPES}
    monkeypatch.setattr(soak, "questions", lambda *_: cases)
    rows = tmp_path / "soak.json"
    flags = ["--model", str(shipped()[0]), "--minutes", "0.1", "--clients", "4", "--json", str(rows)]
    assert soak.main(flags) == 0
    (row,) = json.loads(rows.read_text())
    assert min(row["answers"], row["entries_left"]) > 0
    assert (row["wrong_answers"], row["leases"]) == (0, 0)
    assert set(row["evictions"]) == {"memory", "disk"}
    for name in ("worker_rss_mib", "worker_files", "cache_rss_mib", "cache_files"):
        first, last, most = row[name]
        assert 0 < max(first, last) <= most


async def test_a_wrong_answer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_servicer: Any, case: soak.Case) -> tuple[tuple[int, ...], Any]:
        prefill = SimpleNamespace(loaded=SimpleNamespace(missed=0, hits={}))
        return (1, 2), SimpleNamespace(degraded="the cache failed" if case.recipe == "epic" else "", prefill=prefill)

    monkeypatch.setattr(soak, "answer", answer)
    # However slow the machine is, one client asks five times.
    clock = itertools.count()
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    cases = (("prophetkv", (1, 2), 0), ("prophetkv", (1, 3), 5), ("epic", (1, 2), 5))
    # Answers that are there before they are cancelled count, too.
    for cancelled, (recipe, expected, wrong) in itertools.product((0.0, 1.0), cases):
        monkeypatch.setattr(soak, "_CANCELLED", cancelled)
        nothing: Any = None
        run = soak.Soak(nothing, [soak.Case(nothing, recipe, 0.1)], [expected])
        await run.run(1, 6, 0)
        assert (run.seen["answers"], len(run.wrong)) == (5, wrong)


def test_what_a_process_holds_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    early = Footing(bytes=100 << 20, files=20)
    assert Footing(bytes=150 << 20, files=20).outgrew(early, *soak.BOUNDS)
    assert Footing(bytes=100 << 20, files=40).outgrew(early, *soak.BOUNDS)
    assert not Footing(bytes=110 << 20, files=22).outgrew(early, *soak.BOUNDS)
    looks = iter([early, Footing(112 << 20, 25), Footing(101 << 20, 21), Footing(200 << 20, 21)])
    monkeypatch.setattr(soak.Footing, "of", lambda _: next(looks))
    trail = soak.Trail(1)
    for _ in range(3):
        trail.look()
    assert trail.row("x") == {"x_rss_mib": [100, 101, 112], "x_files": [20, 21, 25]}
    with pytest.raises(AssertionError, match="the process grew from"):
        trail.look()
