"""Shapes of prompts and batches: whatever runs beside a request, and however it is cut, its answer is its own."""

import asyncio
import dataclasses
import itertools
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.compute.batch import Batch
from fusionkv.fusion_worker.compute.engine import TPGroup
from fusionkv.fusion_worker.compute.model_runner import by_layer
from fusionkv.fusion_worker.models import Model
from tests.fusion_worker.oracle import CLOSE, error, network, oracle, random_ids, whole


class ByLayer(TPGroup):
    """Computes steps as the engine inside vLLM does."""

    def forward(self, model: Model, batch: Batch) -> torch.Tensor:
        (*_, last) = by_layer(model, batch)
        return last


RECIPES = ("prophetkv", "epic", "fusionrag", "a3", "deeplayer")


async def test_a_step_computed_layer_by_layer(varied: str, start: Any) -> None:
    parts = random_ids(4, 1), [random_ids(n, n) for n in (9, 22, 5)], random_ids(6, 2)
    whole, layers = await start(varied), await start(varied, tp=ByLayer())
    for recipe, ratio in (("prophetkv", 0.3), ("cacheblend", 0.3), ("epic", 1.0)):
        one, other = [await rig.ask(*parts, recipe=recipe, ratio=ratio, max_tokens=3) for rig in (whole, layers)]
        assert one.ids == other.ids
        assert all(error(b, a) < CLOSE for a, b in zip(one.logits, other.logits, strict=True))


async def test_several_at_once_give_what_each_gives_alone(varied: str, start: Any) -> None:
    rig = await start(varied)
    shared = [random_ids(n, n) for n in (9, 22, 5)]
    prompts = []
    for i, recipe, ratio in zip(range(8), itertools.cycle(RECIPES), itertools.cycle((0.0, 0.3, 1.0))):
        chunks = [shared[(i + j) % 3] for j in range(i % 4)] + [random_ids(1 + 7 * i, i)]
        question = random_ids(1 + (i * 13) % 90, 100 + i)
        prompts.append(
            ((random_ids(4, i % 2), chunks, question), {"recipe": recipe, "ratio": ratio, "max_tokens": 5})
        )
    alone = [await rig.ask(*parts, **more) for parts, more in prompts]
    together = await asyncio.gather(*(rig.ask(*parts, **more) for parts, more in prompts))
    for one, other in zip(alone, together, strict=True):
        assert one.ids == other.ids
        assert all(error(b, a) < CLOSE for a, b in zip(one.logits, other.logits, strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen2-window"])
@pytest.mark.parametrize(
    ("system", "chunks", "question"),
    [
        (0, [], 90),
        (0, [3, 5, 70], 4),
        (5, [1, 1, 1, 1], 1),
        (70, [120, 3], 200),
    ],
    ids=str,
)
async def test_shapes_of_prompts(kind: str, system: int, chunks: list[int], question: int, start: Any) -> None:
    rig, plain, context = await start(kind), oracle(kind), sum(chunks)
    parts = random_ids(system, 1), [random_ids(n, i) for i, n in enumerate(chunks, 10)], random_ids(question, 3)
    for recipe in ("full_attention", "prophetkv", "epic"):
        await rig.ask(*parts, recipe=recipe, ratio=1.0, expected=plain.full_attention(parts))
    expected = plain.full_reuse(parts) if system + context else plain.logits(parts[2])
    for recipe in ("full_reuse", "fusionrag"):
        await rig.ask(*parts, recipe=recipe, ratio=0.0, expected=expected)
    half = await rig.ask(*parts, ratio=0.5)
    assert half.summary.tokens_recomputed == min(round(0.5 * context), context - half.summary.tokens_lossless)


@pytest.mark.parametrize("kind", ["qwen3", "glm4", "mistral-window"])
async def test_a_chunk_several_times_in_one_prompt(kind: str, start: Any) -> None:
    """Its slots are shared by its places, each with its own rotation and its own recomputed tokens."""
    rig, plain = await start(kind), oracle(kind)
    system, chunk, other, question = (random_ids(n, n) for n in (5, 11, 6, 4))
    parts = system, [chunk, other, chunk, chunk], question
    for ratio, count in ((0.0, 0), (0.25, 10), (1.0, 28)):
        fresh = plain.chosen("epic", *parts, ratio)
        expected = plain.overlaid(whole(parts), plain.reused(*parts[:2]), fresh)
        answer = await rig.ask(*parts, recipe="epic", ratio=ratio, expected=expected)
        assert answer.summary.tokens_recomputed == count


@pytest.mark.parametrize("kind", ["llama", "qwen2-mixed"])
async def test_a_prefill_split_over_steps(kind: str, start: Any) -> None:
    parts = random_ids(9, 1), [random_ids(n, n) for n in (40, 70, 3, 55)], random_ids(30, 2)
    rig, split = await start(kind), await start(kind, max_step_tokens=16)
    ratios = {"full_attention": 1.0, "epic": 1.0, "deeplayer": 0.4, "a3": 0.4, "prophetkv": 0.4, "full_reuse": 0.0}
    for recipe, ratio in ratios.items():
        one, two = [await each.ask(*parts, recipe=recipe, ratio=ratio, max_tokens=3) for each in (rig, split)]
        assert one.ids == two.ids
        assert error(two.logits[0], one.logits[0]) < CLOSE
    expected = {1.0: oracle(kind).full_attention(parts)}
    asked = (split.ask(*parts, recipe="epic", ratio=r, expected=expected.get(r)) for r in (0.1, 0.5, 1.0))
    await asyncio.gather(*asked)


@pytest.mark.parametrize("kind", ["llama", "glm4"])
async def test_a_fragmented_pool(kind: str, start: Any) -> None:
    """Chunks and fresh tokens lie in several runs; what lies between them belongs to others."""
    rig, plain = await start(kind, pool_bytes=1 << 20), oracle(kind)
    pool = rig.pool
    held = [pool.reserve(1) for _ in range(pool.capacity // pool.free.page_tokens)]
    pool.kv.fill_(float("nan"))  # what nobody may see
    for runs in held[::2]:
        pool.release(runs)
    parts = random_ids(9, 1), [random_ids(n, n) for n in (13, 21, 30)], random_ids(10, 2)
    for ratio, expected in ((0.0, plain.full_reuse(parts)), (1.0, plain.full_attention(parts)), (0.3, None)):
        answer = await rig.ask(*parts, recipe="epic", ratio=ratio, max_tokens=3, expected=expected)
        assert not answer.logits[-1].isnan().any()
    assert max(len(r.runs) for r in pool.chunks) > 3
    for runs in held[1::2]:
        pool.release(runs)


async def test_greedy_answers_are_those_of_generate(varied: str, start: Any) -> None:
    """Twenty tokens, beside others that decode at the same time."""
    rig = await start(varied, replace=lambda model: dataclasses.replace(model, ends=frozenset()))
    parts = random_ids(9, 1), [random_ids(n, n) for n in (13, 21)], random_ids(10, 2)
    ids = torch.tensor([whole(parts)])
    more = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = network(varied).generate(ids, max_new_tokens=20, **more)[0, ids.shape[1] :].tolist()
    answers = await asyncio.gather(
        rig.ask(*parts, recipe="full_attention", max_tokens=20),
        rig.ask(*parts, recipe="prophetkv", ratio=1.0, max_tokens=20),
        rig.ask(parts[0], [], parts[2], recipe="full_reuse", max_tokens=9),
    )
    assert answers[0].ids == answers[1].ids == expected
    assert len(answers[2].ids) == 9
