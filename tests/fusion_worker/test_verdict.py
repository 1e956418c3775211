"""Answers made again by full attention, verdicts beside a model, and what a worker makes of both."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.library.cache import fingerprint
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.fusion_worker.quality.ratio_guard import SAMPLES, Allowed, RatioGuard
from fusionkv.fusion_worker.quality.shadow import Sample
from fusionkv.fusion_worker.quality.verdict import FILE, SAFE, UNDECIDED, UNSAFE, Choice, Default, Judged, Verdict
from fusionkv.protos.answer.v1.answer_pb2 import Explanation, Summary
from fusionkv.protos.contract.recipes import find_recipe as find
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker.oracle import CLOSE, error, oracle, whole


def test_a_verdict_beside_its_model(tmp_path: Path) -> None:
    both = Judged(UNSAFE, 0.2, "bad", 0.5, 0.4, 0.6, 1.0, 8, 3, 4), Judged(SAFE, 0.3, "good")
    recipes = {"epic": both, "a3": (Judged(SAFE, 0.15, ""),)}
    default = Default(Choice("deeplayer+primed", 0.05), "it keeps most")
    made = Verdict(b"f".hex(), recipes, default=default)
    made.write(tmp_path / FILE)
    assert Verdict.read(tmp_path, b"f") == made
    with pytest.raises(FailedPrecondition, match="is for another model, or this model has changed"):
        Verdict.read(tmp_path, b"g")
    replace(made, definitions="those of another version").write(tmp_path / FILE)
    with pytest.raises(FailedPrecondition, match="is of recipes that have changed since"):
        Verdict.read(tmp_path, b"f")


def test_only_what_is_unsafe_has_consequences() -> None:
    bad, good, unknown = Judged(UNSAFE, 0.2, "bad"), Judged(SAFE, 0.15, ""), Judged(UNDECIDED, 0.0, "")
    recipes = {"epic": (bad,), "a3": (good,), "ape": (unknown,)}
    found = Verdict("", recipes)
    for name in ("a3", "a3+window", "ape", "prophetkv", "full_attention", "prefix_cache"):
        assert found.unsafe(find(name), 0.2) == ""
    assert found.unsafe(find("epic"), 0.9) == "recipe 'epic' is unsafe on this model by `fusionkv check`: bad"
    assert found.unsafe(find("epic+window"), 0.2).startswith("recipe 'epic+window' at ratio 0.2 counts as 'epic': ")
    # All recomputed is full attention, unless a part alone is kept.
    assert found.unsafe(find("epic"), 1.0) == ""
    assert found.unsafe(find("epic+snapkv"), 1.0)


def test_a_recipe_with_modifiers_may_have_a_verdict_of_its_own() -> None:
    recipes = {"prophetkv": (Judged(UNSAFE, 0.2, "bad"),), "prophetkv+primed": (Judged(SAFE, 0.2, ""),)}
    for name, safe in (("prophetkv", False), ("prophetkv+primed", True)):
        for modifier in ("", "+window(8,5)"):
            assert (Verdict("", recipes).unsafe(find(name + modifier), 0.2) == "") == safe


@pytest.mark.parametrize("own", [SAFE, UNDECIDED])
def test_ratios_that_were_not_judged(own: str) -> None:
    recipes = {"a3": (Judged(own, 0.15, ""),), "full_reuse": (Judged(UNSAFE, 0.0, "bad"),)}
    found = Verdict("", recipes)
    for ratio in (0.15, 0.5, 1.0):
        assert found.unsafe(find("a3+window"), ratio) == ""
    for ratio in (0.0, 0.14):
        why = found.unsafe(find("a3+window"), ratio)
        assert why.startswith(f"recipe 'a3+window' at ratio {ratio:g} counts as 'full_reuse': ")
    for reuse in (SAFE, UNDECIDED):
        recipes["full_reuse"] = (Judged(reuse, 0.0, ""),)
        assert found.unsafe(find("a3"), 0.0) == ""


def test_each_ratio_by_the_largest_judged_up_to_it() -> None:
    judged = Judged(UNSAFE, 0.05, "little"), Judged(UNDECIDED, 0.1, ""), Judged(SAFE, 0.2, "")
    found = Verdict("", {"prophetkv": judged, "full_reuse": (Judged(UNSAFE, 0.0, "bad"),)})
    for unsafe, ratios in ((True, (0.0, 0.04, 0.05, 0.09)), (False, (0.1, 0.15, 0.2, 0.9))):
        assert [bool(found.unsafe(find("prophetkv"), ratio)) for ratio in ratios] == [unsafe] * 4
    assert found.unsafe(find("prophetkv"), 0.04).endswith("little")


def test_cacheclip_is_judged_by_the_second_model_in_use(tmp_path: Path) -> None:
    made = Verdict("66", dict.fromkeys(("cacheclip", "epic"), (Judged(UNSAFE, 0.2, ""),)), b"second".hex())
    made.write(tmp_path / FILE)
    assert Verdict.read(tmp_path, b"f", b"second") == made
    assert list(Verdict.read(tmp_path, b"f", b"third").recipes) == ["epic"]


def written(recipes: dict[str, Any] | None = None, **default: Any) -> str:
    """A file of verdicts, with other values for what `default` means."""
    choice = {"recipe": "epic", "ratio": 0.2} | default
    own = {"recipes": recipes or {}, "default": {"choice": choice, "why": ""}}
    return json.dumps({"fingerprint": "66", "auxiliary": "", "definitions": Verdict("", {}).definitions} | own)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"fingerprint": "66", "recipes": {"a": 1}}',
        written(recipes={"a": [{"verdict": "good", "ratio": 0.5, "why": ""}]}),
        written(recipes={"a": {"verdict": "safe", "ratio": 0.5, "why": ""}}),
        written(recipe="epoc"),
        written(recipes={"a": [{"verdict": "safe", "ratio": 0.5, "why": "\ud83d"}]}),
        written(recipes={"a": [{"verdict": "safe", "ratio": 0.5, "why": "", "\x1b[31m\n": 1}]}),
        "[" * 100_000,
        written(ratio=1.5),
        written(share=0.2),
        "\x00",
    ],
)
def test_a_verdict_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(written())
    assert Verdict.read(tmp_path, b"f").default.choice == Choice("epic", 0.2)
    (tmp_path / FILE).write_text(text)
    with pytest.raises(FailedPrecondition, match="run `fusionkv check") as refused:
        Verdict.read(tmp_path, b"f")
    assert str(refused.value).isprintable()
    (tmp_path / FILE).unlink()
    assert Verdict.read(tmp_path, b"f").unsafe(find("epic"), 0.0) == "", "no verdict replaces nothing"


@pytest.mark.slow
@pytest.mark.system
async def test_a_worker_answers_with_full_attention_in_place_of_what_is_unsafe(
    reference_model: Path, tmp_path: Path, launch: Any
) -> None:
    model = tmp_path / "model"
    shutil.copytree(reference_model, model)
    recipes = {
        "full_reuse": (Judged(UNSAFE, 0.0, "it strays"),),
        "prophetkv": (Judged(SAFE, 0.2, "it holds"), Judged(SAFE, 0.3, "it holds")),
        "epic": (Judged(UNDECIDED, 0.2, "who knows"),),
    }
    default = Default(Choice("prophetkv", 0.3), "it keeps most")
    Verdict(fingerprint(model).hex(), recipes, default=default).write(model / FILE)
    worker = launch("fusionkv.fusion_worker", "--listen", "127.0.0.1:0", "--model", str(model))
    client = WorkerClient(worker.address)
    try:
        told = await client.model()
        assert [(v.recipe, v.verdict, v.ratio, v.why) for v in told.verdicts] == [
            (name, judged.verdict, judged.ratio, judged.why) for name, both in recipes.items() for judged in both
        ]
        assert (told.default_recipe, told.default_meaning) == ("prophetkv", "prophetkv at 0.3: it keeps most")

        async def ask(recipe: str, **more: Any) -> tuple[list[int], Summary, Explanation]:
            chunks = [pb.Chunk(ids=[5, 6, 7, 8, 9]), pb.Chunk(ids=[9, 8, 7, 6])]
            more |= {"recipe": recipe, "chunks": chunks, "question": pb.Tokens(ids=[7]), "explain": True}
            answers = [r async for r in client.generate(pb.GenerateRequest(**more))]
            return [r.token.id for r in answers if r.HasField("token")], answers[-1].summary, answers[0].explanation

        full, summary, explained = await ask("full_attention")
        assert (summary.recipe, summary.recipe_replaced) == ("full_attention", "")
        assert [found.recipe for found in explained.verdicts] == ["full_reuse", "prophetkv", "prophetkv", "epic"]
        for recipe, more in (("full_reuse+primed", {}), ("prophetkv", {"ratio": 0.0})):
            ids, summary, _ = await ask(recipe, **more)
            assert (ids, summary.recipe, summary.degraded) == (full, "prefix_cache", False)
            why = "recipe 'full_reuse' is unsafe on this model by `fusionkv check`: it strays"
            assert summary.recipe_replaced.endswith(why)
        _, summary, _ = await ask("epic")
        assert (summary.recipe, summary.recipe_replaced) == ("epic", "")
        for recipe, ratio in (("default+window", 0.3), ("default", 0.25)):
            _, summary, _ = await ask(recipe, **({"ratio": ratio} if ratio != 0.3 else {}))
            assert (summary.recipe, summary.ratio) == (recipe.replace("default", "prophetkv"), ratio)
    finally:
        await client.close()
    assert "fusionkv check: full_reuse at ratio 0: unsafe, it strays" in worker.log


@pytest.mark.parametrize(("question", "max_step_tokens"), [(1, 4096), (6, 16)])
async def test_full_attention_over_the_same_answer(
    question: int, max_step_tokens: int, start: Any, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few tokens at a time, since the logits of many take gigabytes."""
    monkeypatch.setattr("fusionkv.fusion_worker.quality.shadow._BLOCK", 3)
    rig, plain = await start("llama", shadow_share=1.0, max_step_tokens=max_step_tokens), oracle("llama")
    asked = *parts[:2], parts[2][:question]
    seen: list[tuple[Sample, torch.Tensor]] = []
    again = rig.servicer.answerer.shadow._again

    async def watch(sample: Sample) -> AsyncGenerator[torch.Tensor]:
        async for logits in again(sample):
            seen.append((sample, logits))
            yield logits

    rig.servicer.answerer.shadow._again = watch
    answer = await rig.ask(*asked, recipe="full_reuse", max_tokens=7)
    await rig.servicer.answerer.shadow.wait_idle()
    sample, logits = seen[0][0], torch.cat([block for _, block in seen])
    assert list(sample.tokens) == answer.ids
    assert [len(block) for _, block in seen] == [3, 3, 1]
    assert error(sample.logits.cpu(), answer.logits[0]) == 0
    for at, row in enumerate(logits.cpu()):
        assert error(row, plain.logits([*whole(asked), *answer.ids[:at]])) < CLOSE


async def test_a_sample_keeps_no_logits_of_others(start: Any, parts: Any) -> None:
    rig, made = await start("llama", shadow_share=1.0), list[Sample]()
    rig.servicer.answerer.shadow.offer = made.append
    gate, running = await rig.block(*parts, recipe="full_reuse")
    asked = [asyncio.create_task(rig.ask(*parts, recipe="full_reuse")) for _ in range(2)]
    await rig.until(lambda: len(rig.servicer.engine._scheduler._prefills) == 2)  # of the next step
    gate.opened.set()
    await asyncio.gather(running, *asked)
    assert [sample.logits.untyped_storage().nbytes() for sample in made] == [made[0].logits.nbytes] * 3


async def test_it_waits_until_nobody_else_does(start: Any, parts: Any) -> None:
    rig = await start("llama", shadow_share=1.0)
    shadow = rig.servicer.answerer.shadow
    gate, running = await rig.block(*parts, recipe="full_attention", max_tokens=2)
    await rig.until(lambda: not shadow.idle.is_set())
    system, chunks, question = parts
    prompt = Prompt(Chunk(tuple(system)), tuple(Chunk(tuple(c)) for c in chunks), tuple(question))
    recipe, logits = find("full_reuse"), torch.zeros(rig.model.vocabulary)
    shadow.offer(Sample(prompt, (1, 2), logits, RatioGuard(0.0).ratio(recipe, "", 0.0)))
    await rig.until(lambda: shadow._waiting.qsize() == 0)
    assert shadow._waiting._unfinished_tasks == 1, "it was made while a request was running"
    gate.opened.set()
    await running
    await shadow.wait_idle()


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


async def test_an_answer_that_keeps_little_of_its_context_may_differ_at_any_ratio(start: Any, parts: Any) -> None:
    rig, made = await start("llama", shadow_share=1.0), list[Sample]()
    rig.servicer.answerer.shadow.offer = made.append
    for keep in (8, 2048):
        await rig.ask(*parts, recipe=f"prophetkv+snapkv({keep})", ratio=1.0)
        assert len(made) == 1, "only the first context is longer than what is kept"


async def test_answers_that_stray_raise_the_ratio_then_recompute_all(start: Any, parts: Any) -> None:
    rig = await start("llama", shadow_share=1.0, shadow_floor=0.9)
    full = await rig.ask(*parts, recipe="full_attention", max_tokens=6)
    answers = []
    for _ in range(2 * SAMPLES + 1):
        answers.append(await rig.ask(*parts, recipe="prophetkv", ratio=0.1, max_tokens=6))
        await rig.servicer.answerer.shadow.wait_idle()
    assert answers[0].ids != full.ids, "the recipe does not stray, so this test shows nothing"
    assert [round(a.summary.ratio, 3) for a in answers] == [0.1] * SAMPLES + [0.2] * SAMPLES + [1.0]
    assert answers[-1].ids == full.ids
    reasons = [answers[at].summary.ratio_raised for at in (0, SAMPLES)]
    assert reasons == ["", "0% of 20 answers matched full attention, below the floor of 90%"]
    # Another corpus and another recipe are where they were.
    assert (await rig.ask(*parts, recipe="epic", ratio=0.1)).summary.ratio_raised == ""


@pytest.mark.parametrize(("recipe", "ratio"), [("ape", 0.0), ("prophetkv+snapkv(8)", 0.3)])
async def test_what_replaces_a_recipe_is_full_attention(recipe: str, ratio: float, start: Any, parts: Any) -> None:
    """Nothing of it is left: neither another temperature nor an eviction."""
    rig = await start("llama", shadow_floor=0.9)
    full = await rig.ask(*parts, recipe="full_attention", max_tokens=6)
    assert (await rig.ask(*parts, recipe=recipe, ratio=ratio, max_tokens=6)).summary.ratio < 1.0
    record(rig.servicer.answerer._ratio_guard, recipe, "", ratio, False, 2 * SAMPLES)
    answer = await rig.ask(*parts, recipe=recipe, ratio=ratio, max_tokens=6)
    assert answer.summary.ratio == 1.0
    assert answer.ids == full.ids
    assert all(error(a, b) < 1e-4 for a, b in zip(answer.logits, full.logits, strict=True))


async def test_an_answer_of_before_a_raise_does_not_count_after_it(start: Any, parts: Any) -> None:
    rig = await start("llama", shadow_share=1.0, shadow_floor=0.9)
    made: list[Sample] = []
    rig.servicer.answerer.shadow.offer = made.append
    guard, epic = rig.servicer.answerer._ratio_guard, find("epic")
    # 40 answers at 0.2 say nothing about 0.4.
    for times, ratio in ((2 * SAMPLES, 0.4), (SAMPLES, 1.0)):
        await rig.ask(*parts, recipe="epic", max_tokens=2)
        for _ in range(times):
            guard.record(made[-1].allowed, same=False)
        assert guard.ratio(epic, "", 0.2).ratio == ratio


def record(guard: RatioGuard, recipe: str, corpus: str, asked: float, same: bool, times: int = SAMPLES) -> None:
    """So many answers at what the guard allows."""
    for _ in range(times):
        guard.record(guard.ratio(find(recipe), corpus, asked), same)


def allowed(guard: RatioGuard, recipe: str, corpus: str, asked: float) -> tuple[float, str]:
    found: Allowed = guard.ratio(find(recipe), corpus, asked)
    return found.ratio, found.why


def test_the_guard_keeps_recipes_corpora_and_low_ratios_apart() -> None:
    guard = RatioGuard(0.8)
    record(guard, "epic", "a", 0.2, same=False)
    record(guard, "full_reuse", "a", 0.0, same=False)
    record(guard, "epic", "b", 0.2, same=True)
    assert allowed(guard, "epic", "a", 0.2)[0] == 0.4
    assert allowed(guard, "epic", "a", 0.5)[0] == 1.0
    assert allowed(guard, "full_reuse", "a", 0.0)[0] == 1.0, "a recipe of a fixed ratio has nothing in between"
    for recipe, corpus in (("epic", "b"), ("epic+window", "a"), ("epic", "")):
        assert allowed(guard, recipe, corpus, 0.2) == (0.2, "")
    # Who asks for less than a recipe takes raises it for nobody else.
    record(guard, "epic", "", 0.01, same=False)
    assert allowed(guard, "epic", "", 0.2) == (0.2, "")
    assert [allowed(guard, "epic", "", asked)[0] for asked in (0.01, 0.05, 0.19)] == [0.15, 0.15, 0.38]


def test_what_was_raised_stays_however_many_others_come() -> None:
    guard = RatioGuard(0.8)
    record(guard, "epic", "a", 0.2, False, 2 * SAMPLES)
    for corpus in range(3000):
        record(guard, "epic", str(corpus), 0.2, True, 1)
        assert allowed(guard, "epic", "a", 0.2)[0] == 1.0


def test_the_guard_looks_at_the_latest_answers_once_there_are_enough() -> None:
    guard = RatioGuard(0.8)
    record(guard, "epic", "", 0.2, False, SAMPLES - 1)
    assert allowed(guard, "epic", "", 0.2) == (0.2, "")
    guard = RatioGuard(0.8)
    record(guard, "epic", "", 0.2, True, 100)
    record(guard, "epic", "", 0.2, False, 4)
    assert allowed(guard, "epic", "", 0.2) == (0.2, ""), "16 of the latest 20 are not below the floor"
    record(guard, "epic", "", 0.2, False, 1)
    why = "75% of 20 answers matched full attention, below the floor of 80%"
    assert allowed(guard, "epic", "", 0.2) == (0.4, why)
    guard = RatioGuard(0.0)
    record(guard, "epic", "", 0.2, False, 3 * SAMPLES)
    assert allowed(guard, "epic", "", 0.2) == (0.2, ""), "without a floor nothing is raised"
