"""Every family against plain transformers: all recomputed, nothing recomputed, and a choice in between."""

import copy
import itertools
from typing import Any

import pytest
import torch

CLOSE = 1e-4
# bfloat16 keeps 8 bits, so two right computations differ by about 3% of the spread after three layers. What is held
# is that ours lies hardly further from the same weights in float32 than plain transformers in bfloat16 does.
AS_GOOD = 1.5
RECIPES = ("epic", "cacheblend", "kvshare", "cache_craft", "a3", "prophetkv", "fusionrag")


def whole(parts: tuple[list[int], list[list[int]], list[int]]) -> list[int]:
    system, chunks, question = parts
    return [*system, *itertools.chain(*chunks), *question]


@pytest.fixture
def parts(tools: Any) -> tuple[list[int], list[list[int]], list[int]]:
    """A system prompt, chunks of several lengths (one token, less and more than a page, a window), a question."""
    lengths = (13, 1, 30, 4, 7)
    return tools.random_ids(5, 0), [tools.random_ids(n, n) for n in lengths], tools.random_ids(6, 99)


async def test_all_recomputed_is_full_attention(family: str, start: Any, oracle: Any, parts: Any, tools: Any) -> None:
    context = sum(map(len, parts[1]))
    # The first chunk stands where it would be encoded alone: computed once, and lossless.
    first = len(parts[1][0])
    rig = await start(family)
    expected = oracle(family).logits(whole(parts))
    for recipe in (*RECIPES, "full_attention"):
        answer = await rig.ask(*parts, recipe=recipe, ratio=1.0)
        assert tools.error(answer.logits[0], expected) < CLOSE, recipe
        lossless = 0 if recipe == "full_attention" else first
        assert answer.summary.tokens_lossless == lossless
        assert answer.summary.tokens_recomputed == context - lossless


async def test_nothing_recomputed_is_full_reuse(family: str, start: Any, oracle: Any, parts: Any, tools: Any) -> None:
    system, chunks, question = parts
    rig, plain = await start(family), oracle(family)
    expected = plain.after(plain.reused(system, chunks), question)
    for recipe, ratio in (("full_reuse", {}), ("prophetkv", {"ratio": 0.0})):
        answer = await rig.ask(*parts, recipe=recipe, **ratio)
        assert tools.error(answer.logits[0], expected) < CLOSE, recipe
        assert answer.summary.tokens_recomputed == 0
    full = plain.logits(whole(parts))
    assert tools.error(full, expected) > 100 * CLOSE, "reuse and full attention agree, so this test shows nothing"


@pytest.mark.parametrize("recipe", RECIPES)
async def test_a_third_recomputed(family: str, recipe: str, start: Any, oracle: Any, parts: Any, tools: Any) -> None:
    system, chunks, question = parts
    rig, plain = await start(family), oracle(family)
    context = plain.reused(system, chunks)
    first = len(system) + len(chunks[0])
    last = len(system) + sum(map(len, chunks))
    scores = plain.scores(recipe, system, chunks, question).clone()
    scores[:first] = float("-inf")
    fresh = torch.zeros(last, dtype=torch.bool)
    count = round(0.3 * (last - len(system)))
    fresh[sorted(range(last), key=lambda p: (-float(scores[p]), p))[:count]] = True
    expected = plain.overlaid(whole(parts), context, fresh)
    answer = await rig.ask(*parts, recipe=recipe, ratio=0.3)
    assert answer.summary.tokens_recomputed == count
    assert tools.error(answer.logits[0], expected) < CLOSE
    assert tools.error(plain.after(context, question), expected) > 100 * CLOSE, "recomputing changed nothing"


@pytest.mark.parametrize("recipe", ["a3", "prophetkv", "epic"])
async def test_tokens_behind_the_first(recipe: str, start: Any, oracle: Any, parts: Any, tools: Any) -> None:
    """Decoding over a context that was recomputed in part, whatever layer it was recomputed from."""
    system, chunks, question = parts
    rig, plain = await start("llama"), oracle("llama")
    answer = await rig.ask(*parts, recipe=recipe, ratio=0.3, max_tokens=4)
    first = len(system) + len(chunks[0])
    last = len(system) + sum(map(len, chunks))
    scores = plain.scores(recipe, system, chunks, question).clone()
    scores[:first] = float("-inf")
    fresh = torch.zeros(last, dtype=torch.bool)
    fresh[scores.sort(descending=True, stable=True).indices[: answer.summary.tokens_recomputed]] = True
    for at, logits in enumerate(answer.logits):
        ids = [*whole(parts), *answer.ids[:at]]
        assert tools.error(logits, plain.overlaid(ids, plain.reused(system, chunks), fresh)) < CLOSE


async def test_windows_of_chosen_tokens(start: Any, oracle: Any, parts: Any, tools: Any) -> None:
    system, chunks, question = parts
    rig, plain = await start("llama"), oracle("llama")
    context = plain.reused(system, chunks)
    first, last = len(system) + len(chunks[0]), len(system) + sum(map(len, chunks))
    scores = plain.scores("prophetkv", system, chunks, question).clone()
    scores[:first] = float("-inf")
    best = scores.sort(descending=True, stable=True).indices[: round(0.5 * (last - len(system)))].tolist()
    fresh = torch.zeros(last, dtype=torch.bool)
    for start_of in range(first, last, 4):
        inside = [p for p in best if start_of <= p < start_of + 4]
        fresh[inside] = len(inside) >= 3
    assert 0 < int(fresh.sum()) < len(best), "the windows keep all or nothing, so this test shows nothing"
    answer = await rig.ask(*parts, recipe="prophetkv+window(4,3)", ratio=0.5)
    assert answer.summary.recipe == "prophetkv+window(4,3)"
    assert answer.summary.tokens_recomputed == int(fresh.sum())
    assert tools.error(answer.logits[0], plain.overlaid(whole(parts), context, fresh)) < CLOSE


async def test_bfloat16(family: str, start: Any, oracle: Any, parts: Any) -> None:
    system, chunks, question = parts
    rig, plain = await start(family, torch.bfloat16), oracle(family, torch.bfloat16)
    exact = type(plain)(copy.deepcopy(plain.network).float())
    prompt = whole(parts)

    def away(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found - expected).norm() / expected.norm())

    everything, true = (await rig.ask(*parts, ratio=1.0)).logits[0], exact.logits(prompt)
    assert away(everything, true) < AS_GOOD * away(plain.logits(prompt), true)
    none = (await rig.ask(*parts, recipe="full_reuse")).logits[0]
    true = exact.after(exact.reused(system, chunks), question)
    assert away(none, true) < AS_GOOD * away(plain.after(plain.reused(system, chunks), question), true)


async def test_bfloat16_with_a_third_recomputed(family: str, start: Any, oracle: Any, parts: Any) -> None:
    """By `epic`, whose choice no rounding changes."""
    system, chunks, question = parts
    rig, plain = await start(family, torch.bfloat16), oracle(family, torch.bfloat16)
    exact, prompt = type(plain)(copy.deepcopy(plain.network).float()), whole(parts)
    first, last = len(system) + len(chunks[0]), len(system) + sum(map(len, chunks))
    scores = exact.scores("epic", system, chunks, question).clone()
    scores[:first] = float("-inf")
    fresh = torch.zeros(last, dtype=torch.bool)
    fresh[sorted(range(last), key=lambda p: (-float(scores[p]), p))[: round(0.3 * (last - len(system)))]] = True
    true = exact.overlaid(prompt, exact.reused(system, chunks), fresh)
    theirs = plain.overlaid(prompt, plain.reused(system, chunks), fresh)
    ours = (await rig.ask(*parts, recipe="epic", ratio=0.3)).logits[0]
    assert float((ours - true).norm()) < AS_GOOD * float((theirs - true).norm())


async def test_context_at_another_temperature(family: str, start: Any, oracle: Any, parts: Any, tools: Any) -> None:
    """Of APE: weights by its definition, in an untouched model over the reused context."""
    system, chunks, question = parts
    rig, plain = await start(family), oracle(family)
    low, high = len(system), len(system) + sum(map(len, chunks))
    tempered = plain.tempered(low, high, 0.9, 0.9)
    context = plain.reused(system, chunks)
    answer = await rig.ask(*parts, recipe="ape", max_tokens=3)
    assert answer.summary.tokens_recomputed == 0
    for at, logits in enumerate(answer.logits):
        expected = tempered.after(context, [*question, *answer.ids[:at]])
        assert tools.error(logits, expected) < CLOSE
    assert tools.error(plain.after(context, question), answer.logits[0]) > 100 * CLOSE, "the temperature does nothing"
