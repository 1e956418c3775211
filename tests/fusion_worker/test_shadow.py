"""Answers made again by full attention: what is compared, when, and what follows from it."""

import itertools
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.quality.fallback import SAMPLES, Allowed, Fallback
from fusionkv.fusion_worker.quality.shadow import Sample
from fusionkv.fusion_worker.recipes.modifiers import find
from tests.fusion_worker.oracle import error, oracle, random_ids


@pytest.fixture
def parts() -> tuple[list[int], list[list[int]], list[int]]:
    return random_ids(5, 0), [random_ids(n, n) for n in (13, 30, 7)], random_ids(6, 99)


@pytest.mark.parametrize("question", [1, 6])
@pytest.mark.parametrize("max_step_tokens", [16, 4096])
async def test_full_attention_over_the_same_answer(
    question: int, max_step_tokens: int, start: Any, parts: Any
) -> None:
    rig, plain = await start("llama", shadow_share=1.0, max_step_tokens=max_step_tokens), oracle("llama")
    system, chunks, asked = parts[0], parts[1], parts[2][:question]
    seen: list[tuple[Sample, torch.Tensor]] = []
    again = rig.servicer.answerer.shadow._again

    async def watch(sample: Sample) -> torch.Tensor:
        seen.append((sample, await again(sample)))
        return seen[-1][1]

    rig.servicer.answerer.shadow._again = watch
    answer = await rig.ask(system, chunks, asked, recipe="full_reuse", max_tokens=4)
    await rig.servicer.answerer.shadow.settle()
    ((sample, logits),) = seen
    assert list(sample.tokens) == answer.ids
    assert error(sample.logits, answer.logits[0]) == 0
    for at, row in enumerate(logits):
        whole = [*system, *itertools.chain(*chunks), *asked, *answer.ids[:at]]
        assert error(row, plain.logits(whole)) < 1e-4
    await rig.settled()


async def test_it_waits_until_nobody_else_does(start: Any, parts: Any) -> None:
    rig = await start("llama", shadow_share=1.0)
    shadow = rig.servicer.answerer.shadow
    gate, running = await rig.block(*parts, recipe="full_attention", max_tokens=2)
    await rig.until(lambda: not shadow.idle.is_set())
    shadow.offer(Sample(*_sample(rig, parts)))
    await rig.until(lambda: shadow._waiting.qsize() == 0)
    assert shadow._waiting._unfinished_tasks == 1, "it was made while a request was running"
    gate.opened.set()
    await running
    await shadow.settle()


def _sample(rig: Any, parts: Any) -> tuple[Any, ...]:
    from fusionkv.fusion_worker.prompt import Chunk, Prompt

    system, chunks, question = parts
    prompt = Prompt(Chunk(tuple(system)), tuple(Chunk(tuple(c)) for c in chunks), tuple(question))
    recipe, logits = find("full_reuse"), torch.zeros(rig.model.vocabulary)
    return prompt, recipe, "", (1, 2), logits, Fallback(0.0).ratio(recipe, "", 0.0)


@pytest.mark.parametrize(
    "more",
    [
        {"recipe": "full_attention"},
        {"recipe": "prophetkv", "ratio": 1.0},
        {"recipe": "full_reuse", "temperature": 0.7},
    ],
)
async def test_what_cannot_differ_is_not_made_again(start: Any, parts: Any, more: dict[str, Any]) -> None:
    rig = await start("llama", shadow_share=1.0)
    rig.servicer.answerer.shadow.offer = lambda sample: pytest.fail("offered")
    await rig.ask(*parts, **more)


async def test_answers_that_stray_raise_the_ratio_then_recompute_all(start: Any, parts: Any) -> None:
    rig = await start("llama", shadow_share=1.0, shadow_floor=0.9)
    full = await rig.ask(*parts, recipe="full_attention", max_tokens=6)
    ratios, reasons, answers = [], [], []
    for _ in range(2 * SAMPLES + 1):
        answer = await rig.ask(*parts, recipe="prophetkv", ratio=0.1, max_tokens=6)
        ratios.append(round(answer.summary.ratio, 3))
        reasons.append(answer.summary.ratio_raised)
        answers.append(answer.ids)
        await rig.servicer.answerer.shadow.settle()
    assert answers[0] != full.ids, "the recipe does not stray, so this test shows nothing"
    assert ratios == [0.1] * SAMPLES + [0.2] * SAMPLES + [1.0]
    assert answers[-1] == full.ids
    assert reasons[0] == ""
    assert reasons[SAMPLES] == "0% of 20 answers matched full attention, below the floor of 90%"
    # Another corpus and another recipe are where they were.
    assert (await rig.ask(*parts, recipe="epic", ratio=0.1)).summary.ratio_raised == ""


@pytest.mark.parametrize(("recipe", "ratio"), [("ape", 0.0), ("prophetkv+snapkv(8)", 0.3)])
async def test_what_replaces_a_recipe_is_full_attention(recipe: str, ratio: float, start: Any, parts: Any) -> None:
    """Nothing of it is left: neither another temperature nor an eviction."""
    rig = await start("llama", shadow_floor=0.9)
    full = await rig.ask(*parts, recipe="full_attention", max_tokens=6)
    assert (await rig.ask(*parts, recipe=recipe, ratio=ratio, max_tokens=6)).summary.ratio < 1.0
    for _ in range(2 * SAMPLES):
        record(rig.servicer.answerer._guard, recipe, "", ratio, same=False)
    answer = await rig.ask(*parts, recipe=recipe, ratio=ratio, max_tokens=6)
    assert answer.summary.ratio == 1.0
    assert answer.ids == full.ids
    assert all(error(a, b) < 1e-4 for a, b in zip(answer.logits, full.logits, strict=True))


async def test_an_answer_of_before_a_raise_does_not_count_after_it(start: Any, parts: Any) -> None:
    rig = await start("llama", shadow_share=1.0, shadow_floor=0.9)
    made: list[Sample] = []
    rig.servicer.answerer.shadow.offer = made.append
    guard, epic = rig.servicer.answerer._guard, find("epic")
    await rig.ask(*parts, recipe="epic", max_tokens=2)
    for _ in range(2 * SAMPLES):
        guard.record(made[0].allowed, same=False)
    assert guard.ratio(epic, "", 0.2).ratio == 0.4, "40 answers at 0.2 say nothing about 0.4"
    await rig.ask(*parts, recipe="epic", max_tokens=2)
    for _ in range(SAMPLES):
        guard.record(made[1].allowed, same=False)
    assert guard.ratio(epic, "", 0.2).ratio == 1.0


def record(guard: Fallback, recipe: str, corpus: str, asked: float, same: bool) -> None:
    """An answer at what the guard allows."""
    guard.record(guard.ratio(find(recipe), corpus, asked), same)


def allowed(guard: Fallback, recipe: str, corpus: str, asked: float) -> tuple[float, str]:
    found: Allowed = guard.ratio(find(recipe), corpus, asked)
    return found.ratio, found.why


def test_the_guard_keeps_recipes_and_corpora_apart() -> None:
    guard = Fallback(0.8)
    for _ in range(SAMPLES):
        record(guard, "epic", "a", 0.2, same=False)
        record(guard, "full_reuse", "a", 0.0, same=False)
        record(guard, "epic", "b", 0.2, same=True)
    assert allowed(guard, "epic", "a", 0.2)[0] == 0.4
    assert allowed(guard, "epic", "a", 0.5)[0] == 1.0
    assert allowed(guard, "full_reuse", "a", 0.0)[0] == 1.0, "a recipe of a fixed ratio has nothing in between"
    assert allowed(guard, "epic", "b", 0.2) == (0.2, "")
    assert allowed(guard, "epic+window", "a", 0.2) == (0.2, "")


def test_who_asks_for_less_than_a_recipe_takes_raises_it_for_nobody_else() -> None:
    guard = Fallback(0.8)
    for _ in range(SAMPLES):
        record(guard, "epic", "", 0.01, same=False)
    assert allowed(guard, "epic", "", 0.2) == (0.2, "")
    assert allowed(guard, "epic", "", 0.01)[0] == allowed(guard, "epic", "", 0.05)[0] == 0.15
    assert allowed(guard, "epic", "", 0.19)[0] == 0.38


def test_what_was_raised_stays_however_many_others_come() -> None:
    guard = Fallback(0.8)
    for _ in range(2 * SAMPLES):
        record(guard, "epic", "a", 0.2, same=False)
    for corpus in range(3000):
        record(guard, "epic", str(corpus), 0.2, same=True)
        assert allowed(guard, "epic", "a", 0.2)[0] == 1.0


def test_the_guard_looks_at_the_latest_answers_once_there_are_enough() -> None:
    guard = Fallback(0.8)
    for _ in range(SAMPLES - 1):
        record(guard, "epic", "", 0.2, same=False)
    assert allowed(guard, "epic", "", 0.2) == (0.2, "")
    guard = Fallback(0.8)
    for same in (*[True] * 100, *[False] * 4):
        record(guard, "epic", "", 0.2, same=same)
    assert allowed(guard, "epic", "", 0.2) == (0.2, ""), "16 of the latest 20 are not below the floor"
    record(guard, "epic", "", 0.2, same=False)
    raised, why = allowed(guard, "epic", "", 0.2)
    assert raised == 0.4
    assert why == "75% of 20 answers matched full attention, below the floor of 80%"


def test_the_guard_without_a_floor_raises_nothing() -> None:
    guard = Fallback(0.0)
    for _ in range(3 * SAMPLES):
        record(guard, "epic", "", 0.2, same=False)
    assert allowed(guard, "epic", "", 0.2) == (0.2, "")
