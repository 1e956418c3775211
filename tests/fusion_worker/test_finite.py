"""NaN and infinity: such logits fail their request alone, and such KV is neither used nor stored."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.decode.sampling import NotFinite, Sampler, SamplingParams
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.kvcache_service import keys
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker.oracle import CLOSE, error, oracle, random_ids

BAD = 200  # a token whose embedding is not finite; no other text has it
NUMBERS = [float("nan"), float("inf"), float("-inf")]
GREEDY, SAMPLED = {}, {"temperature": 0.7, "top_p": 0.9}


def poisoned(number: float) -> Callable[[Model], Model]:
    """A model that computes what is not finite from one token on."""

    def change(model: Model) -> Model:
        embedding = model.network.model.embed_tokens
        embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        if model.network.lm_head.weight is not embedding.weight:
            embedding.weight[BAD, 0] = number
        return model

    return change


def text(length: int, seed: int) -> list[int]:
    return [i for i in random_ids(2 * length, seed) if i != BAD][:length]


PARTS = SYSTEM, CHUNKS, QUESTION = text(5, 1), [text(20, 2), text(30, 3)], text(4, 4)


async def stored(rig: Any, chunk: list[int], *before: list[int], variant: bytes = b"") -> bool:
    """Whether the cache service has an entry of a chunk."""
    path = [(keys.chunk_digest(SYSTEM), ()), *((keys.chunk_digest(b), ()) for b in before)]
    path.append((keys.chunk_digest(chunk), (variant,) if variant else ()))
    return (await rig.servicer.cache.lookup(rig.namespace, path, timeout=5)).hits[-1].entry is not None


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("number", NUMBERS)
def test_no_token_is_drawn_from_logits_that_are_not_finite(number: float, params: Any) -> None:
    logits = torch.zeros(50)
    assert 0 <= Sampler(SamplingParams(max_tokens=1, **params)).draw(logits) < 50
    logits[7] = number
    with pytest.raises(NotFinite, match="not finite"):
        Sampler(SamplingParams(max_tokens=1, **params)).draw(logits)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("recipe", ["prophetkv", "full_attention"])
async def test_a_request_fails_alone(recipe: str, params: Any, start: Any) -> None:
    """Also in the middle of an answer, and beside another request in the same steps."""
    rig = await start("llama", replace=poisoned(NUMBERS[0]))
    good = oracle("llama").full_attention(PARTS)
    gate, first = await rig.block(SYSTEM, CHUNKS, QUESTION, recipe="full_attention", expected=good)
    bad = asyncio.create_task(rig.ask(SYSTEM, CHUNKS, [*QUESTION, BAD], recipe=recipe, **params))
    fine = asyncio.create_task(rig.ask(SYSTEM, CHUNKS, QUESTION, recipe="full_attention", expected=good))
    await asyncio.sleep(0)
    gate.opened.set()
    await asyncio.gather(first, fine)
    with pytest.raises(FailedPrecondition, match="not finite"):
        await bad
    await rig.settled()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("recipe", ["full_reuse", "prophetkv", "prefix_cache", "prophetkv+versions"])
async def test_what_is_not_finite_is_not_stored(recipe: str, number: float, cached: Any) -> None:
    rig = await cached("llama", replace=poisoned(number))
    bad = [*CHUNKS[1][:-1], BAD]
    with pytest.raises(FailedPrecondition, match="not finite"):
        await rig.ask(SYSTEM, [CHUNKS[0], bad], QUESTION, recipe=recipe)
    await rig.stored()
    assert await stored(rig, CHUNKS[0])
    for before in ([], [CHUNKS[0]]):
        for variant in (b"", keys.versions_variant(3)):
            assert not await stored(rig, bad, *before, variant=variant)
    # Nor is it in the pool.
    with pytest.raises(FailedPrecondition, match="not finite"):
        await rig.ask(SYSTEM, [CHUNKS[0], bad], QUESTION, recipe=recipe)
    await rig.settled()


@pytest.mark.parametrize("mode", ["EXACT", "NEIGHBOURS"])
async def test_what_is_not_finite_is_not_encoded_ahead_of_time(mode: str, cached: Any) -> None:
    rig = await cached("llama", replace=poisoned(NUMBERS[0]))
    bad = [BAD, *CHUNKS[1]]
    for before, chunk in (([CHUNKS[0]], bad), ([bad], CHUNKS[0])):
        with pytest.raises(FailedPrecondition, match="not finite"):
            await rig.encode(SYSTEM, before, chunk, mode)
        await rig.stored()
        near = keys.neighbours_variant([keys.chunk_digest(b) for b in before])
        assert not await stored(rig, chunk, *before)
        assert not await stored(rig, chunk, variant=near)
    assert not await stored(rig, bad)


@pytest.mark.parametrize(
    ("recipe", "store"),
    [("full_reuse", "plain"), ("prophetkv", "plain"), ("prophetkv", "int8"), ("prophetkv+versions", "plain")],
)
async def test_a_stored_entry_that_is_not_finite(
    recipe: str, store: str, cached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as of an earlier version: full attention answers, and the entry is replaced."""
    other, bad = await cached("llama", store=store, replace=poisoned(NUMBERS[0])), [*CHUNKS[1][:-1], BAD]
    # With versions, the other chunk is encoded behind what is not finite.
    chunks = [bad, CHUNKS[0]] if "versions" in recipe else [CHUNKS[0], bad]
    with monkeypatch.context() as unchecked:
        unchecked.setattr(Storage, "finite", lambda *_: True)
        with pytest.raises(FailedPrecondition, match="not finite"):
            await other.ask(SYSTEM, [CHUNKS[0], bad], QUESTION, recipe="full_reuse")
        await other.stored()
    rig = await cached("llama", store=store)
    assert await stored(rig, bad)
    expected = oracle("llama").full_attention((SYSTEM, chunks, QUESTION))
    degraded = await rig.fill(SYSTEM, chunks, QUESTION, recipe=recipe)
    assert error(degraded.logits[-1], expected) < CLOSE
    assert "not finite" in degraded.summary.degraded_reason
    assert not await stored(rig, bad)
    again = await rig.fill(SYSTEM, chunks, QUESTION, recipe=recipe)
    assert (again.summary.degraded, again.summary.chunks_missed) == (False, 1 + ("versions" in recipe))
    await rig.settled()
