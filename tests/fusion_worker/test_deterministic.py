"""The setting `deterministic`: greedy answers are the same, bit for bit, alone and beside others."""

import asyncio
from typing import Any

import pytest
import torch

from tests.fusion_worker.oracle import random_ids

SYSTEM = random_ids(5, 1)
CHUNKS = [random_ids(40 + 3 * n, 10 + n) for n in range(6)]
ASKED = [
    (recipe, [CHUNKS[(n + i) % 6] for i in range(3)], random_ids(6 + n, 50 + n), {"max_tokens": 8})
    for n, recipe in enumerate(("prophetkv", "full_reuse", "deeplayer", "full_attention", "cacheblend", "epic"))
]


async def answers(rig: Any, together: bool) -> list[Any]:
    asked = [rig.ask(SYSTEM, chunks, question, recipe=recipe, **more) for recipe, chunks, question, more in ASKED]
    return await asyncio.gather(*asked) if together else [await each for each in asked]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
async def test_answers_are_the_same_alone_and_beside_others(dtype: torch.dtype, start: Any) -> None:
    """Also where prefills are split, and where chunks are encoded at the same time."""
    more = {"dtype": dtype, "deterministic": True, "max_mixed_tokens": 64}
    expected = await answers(await start("llama", **more), together=False)
    for _ in range(2):
        same(expected, await answers(await start("llama", **more), together=True))


@pytest.mark.parametrize("kind", ["llama", "qwen2-mixed"])
async def test_answers_are_the_same_in_a_fragmented_pool(kind: str, start: Any) -> None:
    """Where a chunk's pages lie depends on what others have asked."""
    whole, rig = [await start(kind, torch.bfloat16, deterministic=True) for _ in range(2)]
    if rig.model.device.type != "cpu":
        pytest.skip("a GPU reads the pool run by run")
    pages = [rig.pool.reserve(1) for _ in range(rig.pool.capacity // rig.pool.free.page_tokens)]
    for runs in pages[::2]:
        rig.pool.release(runs)
    found = await answers(rig, together=False)
    for runs in pages[1::2]:
        rig.pool.release(runs)
    same(await answers(whole, together=False), found)


def same(expected: list[Any], found: list[Any]) -> None:
    for (recipe, *_), one, other in zip(ASKED, expected, found, strict=True):
        assert one.ids == other.ids, recipe
        assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True)), recipe
