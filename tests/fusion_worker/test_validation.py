"""The validation of corrections: what is used, what is refused, and what replies say of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.correct import distillation, questions, validation
from fusionkv.fusion_worker.correct.correction import PLACES, Correction, pairs, places, shape
from fusionkv.fusion_worker.correct.distillation import Lesson
from fusionkv.fusion_worker.correct.validation import Trial, Validation
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.fusion_worker.quality.defaults import MIDLAYER, PROPHETKV, Default
from fusionkv.fusion_worker.quality.fallback import Verdict
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.fusion_worker.oracle import Parts, oracle, prompt, random_ids

PARTS: Parts = prompt(9, 12, 7)
LARGE = [random_ids(90, n) for n in range(9)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes a step a prompt, with two questions, and a validation two prompts."""
    monkeypatch.setattr(distillation, "EPOCHS", 1)
    monkeypatch.setattr(validation, "PROMPTS", 2)
    monkeypatch.setattr(questions, "COUNT", 2)


def trial(*kl: float, kept: int = 0, first: int = 0) -> Trial:
    return Trial([*kl], [n < kept for n in range(len(kl))], [n < first for n in range(len(kl))])


PLAIN = trial(*([0.3] * 18), 0.9, 1.2, kept=10, first=15)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (trial(*([0.1] * 18), 0.8, 1.1, kept=10, first=15), ""),
        (trial(*([0.1] * 20), kept=20, first=20), ""),
        (trial(*([0.01] * 18), 1.1, 1.1, kept=12, first=16), "2 of 20 answers are off by more than 1 nat, not 1"),
        (trial(*([0.01] * 19), float("nan"), kept=19, first=19), "worst tenth"),
        (trial(*([0.01] * 18), float("nan"), 1.1, kept=18, first=18), "2 of 20 answers are off"),
        (trial(*([0.01] * 18), 0.95, 1.2, kept=18, first=18), "worst tenth of 20 answers are off by 1.075 nats"),
        (trial(*([0.1] * 20), kept=9, first=20), "9 of 20 answers stay full attention's, not 10"),
        (trial(*([0.1] * 20), kept=12, first=14), "14 of 20 first tokens stay full attention's, not 15"),
        (trial(*([0.38] * 20), kept=12, first=15), "off by 0.380 nats in the mean, not 0.375"),
        (replace(PLAIN), "in the mean"),
    ],
)
def test_tails_count_before_means(other: Trial, why: str) -> None:
    """What improves the mean and wrecks a few answers is refused."""
    assert why in other.loses(PLAIN)
    assert bool(why) == bool(other.loses(PLAIN))


def by_place(model: Model, scale: float) -> Correction:
    """A correction that adds the same to every token, in proportion to the places alone."""
    weights = torch.zeros(shape(model.kv.layers, model.kv.kv_heads, model.kv.head_dim))
    weights[:, :, -PLACES:] = scale * torch.randn(weights[:, :, -PLACES:].shape, generator=torch.manual_seed(1))
    return Correction(weights)


async def lesson_of(rig: Any, seed: int, missed: Correction) -> Lesson:
    """A lesson whose chunks lack exactly what the correction adds."""
    chunks = tuple(Chunk(tuple(random_ids(40, 10 * seed + n))) for n in range(4))
    asked = Prompt(Chunk((1, 2)), chunks, (), rig.tenant)
    lesson: Lesson = await rig.servicer.answerer.corrector._lesson(asked)
    model, alone = rig.model, list[torch.Tensor]()
    for chunk, start in zip(chunks[1:], lesson.starts, strict=True):
        there = lesson.together[:, :, start : start + len(chunk)]
        where = places(len(chunk), torch.device("cpu"))
        share = missed.behind(start - lesson.base).share
        lacking = pairs(there, start, model.rotations) - share * where @ missed.weights[:, :, -PLACES:]
        keys, values = lacking.transpose(1, 2).chunk(2, -1)
        positions = torch.arange(lesson.base, lesson.base + len(chunk))
        turned = [
            rotation.apply(key, *(f[:, None] for f in rotation.factors(positions)))
            for key, rotation in zip(keys, model.rotations, strict=True)
        ]
        alone.append(torch.stack([torch.stack(turned), values], 1))
    return replace(lesson, alone=alone)


@pytest.mark.parametrize(("trained", "fit", "chosen"), [(1, 0.5, 1), (0.5, 1, 1), (-1, 0.5, 0.5), (-1, -2, None)])
async def test_the_best_is_chosen(trained: float, fit: float, chosen: float | None, start: Any) -> None:
    """Of the trained correction, the fit and none; shares of what is missing."""
    rig = await start("llama")
    missed = by_place(rig.model, 0.5)
    trials = Validation(rig.model, *(Correction(x * missed.weights) for x in (trained, fit)))
    for seed in range(2):
        assert not trials.ready
        trials.add(await lesson_of(rig, seed, missed))
    assert trials.ready
    found = trials.verdict()
    if chosen is None:
        assert (found.validated, len(found.weights)) == (False, 0)
    else:
        assert found.validated
        assert torch.equal(found.weights, chosen * missed.weights)
        assert "4 answers" in found.why


def chunks(seed: int) -> Sequence[list[int]]:
    return [random_ids(90, 100 * seed + n) for n in range(4)]


async def states(rig: Any, *corpora: str) -> list[str]:
    request = pb.GetCorrectionsRequest(tenant=rig.tenant, corpora=corpora)
    return [*(await rig.servicer.GetCorrections(request, None)).states]


async def test_the_states_of_too_many_corpora_are_refused(start: Any) -> None:
    rig = await start("llama")
    assert len(await states(rig, *map(str, range(1000)))) == 1000
    with pytest.raises(InvalidArgument, match="1001 corpora are more than 1000"):
        await states(rig, *map(str, range(1001)))
    with pytest.raises(InvalidArgument, match="the corpus's name is longer than 256"):
        await states(rig, "x" * 257)


async def asked(rig: Any, count: int, recipe: str) -> None:
    for number in range(count):
        await rig.ask([1, 2], chunks(number), [7], recipe=recipe)
        await rig.servicer.answerer.corrector.settle()


@pytest.mark.parametrize("trained", [True, False])
async def test_a_correction_that_makes_answers_worse_is_refused(
    trained: bool, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It lies in the folder as another worker would leave it: no answer uses it before or after."""
    rig = await start("llama")
    corrector = rig.servicer.answerer.corrector
    file = corrector._file(rig.tenant, "")
    file.parent.mkdir(exist_ok=True)
    replace(by_place(rig.model, 3.0), trained=trained).save(file)
    expected = oracle("llama").full_reuse(PARTS)
    before = await rig.ask(*PARTS, recipe="full_reuse+corrected", expected=expected)
    assert (before.summary.chunks_corrected, before.summary.recipe) == (0, "full_reuse")
    assert "not validated yet" in before.summary.uncorrected_reason
    await asked(rig, 2 if trained else 2 + distillation.LESSONS, "full_reuse+corrected")
    for worker in (rig, await start("llama")):
        after = await worker.ask(*PARTS, recipe="full_reuse+corrected", expected=expected)
        assert (after.summary.chunks_corrected, after.summary.recipe) == (0, "full_reuse")
        assert after.summary.uncorrected_reason.startswith("refused: with it, ")
        assert await worker.servicer.answerer.corrector.learned(rig.tenant, "")
        told = await states(worker, "", "another")
        assert told == [after.summary.uncorrected_reason, told[1]]
        assert told[1].startswith("not validated yet: 0 of about ")
    assert "a correction of reused KV is refused: with it, " in caplog.text
    assert file.stat().st_size < 1000, "its weights are gone"


@pytest.mark.parametrize("weight", ["1e38", "nan", "inf"])
async def test_a_correction_out_of_bounds_is_learned_again(
    weight: str, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if it is marked as validated."""
    rig = await start("llama")
    corrector = rig.servicer.answerer.corrector
    bad = by_place(rig.model, 1.0)
    bad.weights[0, 0, 0, 0] = float(weight)
    corrector._file(rig.tenant, "").parent.mkdir(exist_ok=True)
    replace(bad, trained=True, validated=True).save(corrector._file(rig.tenant, ""))
    answer = await rig.ask(*PARTS, recipe="full_reuse+corrected", expected=oracle("llama").full_reuse(PARTS))
    assert "not validated yet: 0 of" in answer.summary.uncorrected_reason
    assert "can't be read, and is learned again" in caplog.text


async def test_a_verdict_is_about_the_same_weights(tmp_path: Path, start: Any) -> None:
    rig = await start("llama")
    good, other = by_place(rig.model, 0.1), by_place(rig.model, 0.2)
    for validated in (True, False):
        replace(good, validated=validated).save(tmp_path / "c")
        found = Correction.load(tmp_path / "c", good.weights.shape)
        assert found.validated is (True if validated else None), "a refused one has no weights"
    object.__setattr__(other, "name", good.name)
    replace(good, validated=True).save(tmp_path / "c")
    kept = (tmp_path / "c").read_bytes()
    data = other.weights.numpy().tobytes()
    (tmp_path / "c").write_bytes(kept[: -len(data)] + data)
    found = Correction.load(tmp_path / "c", good.weights.shape)
    assert torch.equal(found.weights, other.weights)
    assert found.validated is None


async def test_the_default_is_what_was_validated(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts are learned from before that."""
    monkeypatch.setattr(Trial, "loses", lambda *_: "")
    rig = await start("llama", verdict=Verdict("", {}, default=Default(MIDLAYER, PROPHETKV, "")))
    for recipe, named, ratio in (
        ("default", "prophetkv", 0.2),
        ("default+window", "prophetkv+window", 0.2),
        ("midlayer+corrected", "midlayer", 0.12),
        ("prophetkv+corrected", "prophetkv", 0.2),
    ):
        summary = (await rig.ask(*PARTS, recipe=recipe)).summary
        assert (summary.recipe, summary.ratio, summary.chunks_corrected) == (named, ratio, 0)
        assert "not validated yet" in summary.uncorrected_reason
    await asked(rig, 4 + distillation.LESSONS + 2, "default")
    summary = (await rig.ask(*PARTS, recipe="default")).summary
    assert (summary.recipe, summary.ratio, summary.chunks_corrected) == ("midlayer+corrected", 0.12, 2)
    assert summary.uncorrected_reason == ""
    for worker in (rig, await start("llama")):  # the other one has it on the disk only
        (told,) = await states(worker, "")
        assert told.startswith("validated: on 4 answers it lowers the KL from ")
    summary = (await rig.ask(*PARTS, recipe="default", corpus="another", ratio=0.05)).summary
    assert (summary.recipe, summary.ratio) == ("prophetkv", 0.05)
    summary = (await rig.ask(*PARTS, recipe="prophetkv")).summary
    assert (summary.recipe, summary.uncorrected_reason) == ("prophetkv", "")
    # Another share of what was validated, and of what is done elsewhere.
    default = Default(replace(MIDLAYER, ratio=0.05), replace(PROPHETKV, ratio=0.1), "")
    rig = await start("llama", verdict=Verdict("", {}, default=default))
    for corpus, named, ratio in (("", "midlayer+corrected", 0.05), ("another", "prophetkv", 0.1)):
        summary = (await rig.ask(*PARTS, recipe="default", corpus=corpus)).summary
        assert (summary.recipe, summary.ratio) == (named, ratio)


async def test_nothing_is_learned_for_a_default_that_corrects_nothing(start: Any) -> None:
    """As on any model that was not measured."""
    rig = await start("llama")
    folder = rig.servicer.answerer.corrector._file(rig.tenant, "").parent
    before = {*folder.glob("*")}
    await asked(rig, 5, "default")
    summary = (await rig.ask(*PARTS, recipe="default")).summary
    assert (summary.recipe, summary.ratio, summary.uncorrected_reason) == ("prophetkv", 0.2, "")
    assert {*folder.glob("*")} == before
    await asked(rig, 5, "midlayer+corrected")
    assert {*folder.glob("*")} > before
