"""The correction of reused KV: the fit, the map, and what a worker makes of both."""

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.correct import corrector, distillation, questions, validation
from fusionkv.fusion_worker.correct.correction import (
    PLACES,
    RIDGE,
    STRENGTH,
    Correction,
    Fit,
    PlacedCorrection,
    change_share,
    places,
    shape,
)
from fusionkv.fusion_worker.correct.corrector import PROMPTS
from fusionkv.fusion_worker.correct.distillation import Distillation, Lesson
from fusionkv.fusion_worker.correct.questions import Questions, ask
from fusionkv.fusion_worker.correct.validation import Trial
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.kernels.segments import Rotation
from fusionkv.kvcache_service import keys
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.fusion_worker.oracle import CLOSE, Parts, error, last_of, oracle, random_ids

LENGTHS = (9, 12, 7)
LESSONS = 2
TRAINED = PROMPTS + LESSONS  # prompts
LAYERS, HEADS, DIM = 2, 2, 8
LESSON = [random_ids(90, n) for n in range(9)]  # enough to learn a correction
ROTATIONS = (Rotation(torch.tensor([1.0, 0.1, 0.01]), False), Rotation(torch.tensor([0.5, 0.2, 0.05, 0.02]), False))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes a step for each of two prompts, with two questions; what is learned passes after one more."""
    monkeypatch.setattr(distillation, "LESSONS", LESSONS)
    monkeypatch.setattr(distillation, "EPOCHS", 1)
    monkeypatch.setattr(validation, "PROMPTS", 1)
    monkeypatch.setattr(Trial, "loses", lambda *_: "")
    monkeypatch.setattr(questions, "COUNT", 2)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(seed: int = 0) -> torch.Tensor:
    return 0.3 * random(LAYERS, HEADS, 2 * DIM + PLACES, 2 * DIM, seed=seed)


def at(kv: torch.Tensor, base: int) -> torch.Tensor:
    """KV [layers, 2, tokens, heads, dim] without positions, as if its keys were written from `base` on."""
    there = kv.clone()
    for layer, rotation in enumerate(ROTATIONS):
        for token in range(kv.shape[2]):
            there[layer, 0, token] = rotation.turn(kv[layer, 0, token], base + token)
    return there


def changed(kv: torch.Tensor, w: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """The map, number by number."""
    out = kv.clone()
    where = places(kv.shape[2], kv.device)
    for layer in range(LAYERS):
        for head in range(HEADS):
            key, value = kv[layer, :, :, head]
            for token in range(kv.shape[2]):
                change = torch.cat([key[token], value[token], where[token]]) @ w[layer, head]
                out[layer, 0, token, head] += share * change[:DIM]
                out[layer, 1, token, head] += share * change[DIM:]
    return out


def test_the_map_is_the_same_wherever_a_chunk_was_written() -> None:
    kv, correction = random(LAYERS, 2, 20, HEADS, DIM, seed=1), Correction(weights())
    half = PlacedCorrection(correction, 4)
    for base in (0, 7, 1000):
        stored, wanted = at(kv, base), at(changed(kv, correction.weights, 0.5), base)
        found = torch.empty_like(stored)
        half.apply(stored, found, base, ROTATIONS)
        assert torch.allclose(found, wanted, atol=1e-4)
        half.apply(stored, stored, base, ROTATIONS)
        assert torch.equal(stored, found)


def test_a_chunk_behind_more_text_changes_more() -> None:
    kv, correction = random(LAYERS, 2, 20, HEADS, DIM, seed=1), Correction(weights())
    placed = [correction.behind(before) for before in (1, 50, 100, 400, 100_000)]
    assert [p.step for p in placed] == [1, 3, 4, 6, 8]
    assert len({p.name for p in placed}) == 5, "no two share a key in the pool"
    assert correction.behind(90).name == correction.behind(110).name
    for p in placed:
        expected, found = changed(kv, correction.weights, p.step / 8), at(kv, 7)
        p.apply(found, found, 7, ROTATIONS)
        assert torch.allclose(found, at(expected, 7), atol=1e-4)


def test_a_fit_finds_the_map_that_made_its_chunks() -> None:
    fit, true = Fit(shape(LAYERS, HEADS, DIM)), weights()
    for number in range(60):
        kv = random(LAYERS, 2, 24, HEADS, DIM, seed=100 + number)
        there = changed(kv, true, change_share(10 * number))
        fit.add(at(kv, 3), 3, at(there, 3 + 10 * number), 3 + 10 * number, ROTATIONS)
    new = random(LAYERS, 2, 24, HEADS, DIM, seed=1)
    # Of keys and values that are all alike in size, the ridge takes the same part.
    true[:, :, : 2 * DIM] /= 1 + RIDGE
    change, found = changed(new, true) - new, torch.empty_like(new)
    PlacedCorrection(fit.solve(), 8).apply(at(new, 0), found, 0, ROTATIONS)
    assert float((found - at(new + STRENGTH * change, 0)).norm() / (STRENGTH * change).norm()) < 0.03


def test_first_tokens_are_told_apart_from_later_ones() -> None:
    where = places(200, torch.device("cpu"))
    assert where.shape == (200, PLACES)
    assert torch.equal(where[:4, 1:5], torch.eye(4))
    assert not where[4:, 1:5].any()
    assert (where[:-1, 5:] > where[1:, 5:]).all()


def test_kept_in_a_file(tmp_path: Path) -> None:
    correction = Correction(weights())
    correction.save(tmp_path / "c.safetensors")
    size = correction.weights.shape
    assert torch.equal(Correction.load(tmp_path / "c.safetensors", size).weights, correction.weights)
    with pytest.raises(ValueError, match="not finite float32"):
        Correction.load(tmp_path / "c.safetensors", torch.Size([1, *size[1:]]))
    assert [file.name for file in tmp_path.iterdir()] == ["c.safetensors"]
    for number, message in (("nan", "not finite"), ("inf", "not finite"), ("1e38", "1e\\+38; they are at most")):
        bad = weights()
        bad[1, 0, 3, 2] = -float(number)
        Correction(bad).save(tmp_path / "c.safetensors")
        with pytest.raises(ValueError, match=message):
            Correction.load(tmp_path / "c.safetensors", size)


def corrected(plain: Any, system: Any, chunks: Any, weights: torch.Tensor) -> Any:
    """What the worker reuses, in plain transformers: the first chunk as it is, the others changed by the map."""
    kv, position, weights = plain.reused(system, chunks), len(system) + len(chunks[0]), weights.cpu()
    out = [(k.clone(), v.clone()) for k, v in kv]
    for chunk in chunks[1:]:
        where = places(len(chunk), weights.device)
        share = max(1, round(8 * change_share(position - len(system)))) / 8
        for layer, (k, v) in enumerate(out):
            for token in range(len(chunk)):
                here = position + token
                free = plain.rotated(kv[layer][0][:, :, here : here + 1], -here, layer)
                for head in range(k.shape[1]):
                    key, value = free[0, head, 0], kv[layer][1][0, head, here]
                    to_key, to_value = (share * torch.cat([key, value, where[token]]) @ weights[layer, head]).chunk(2)
                    k[0, head, here] = plain.rotated((key + to_key)[None, None, None], here, layer)[0, 0, 0]
                    v[0, head, here] = value + to_value
        position += len(chunk)
    return out


async def taught(rig: Any) -> Correction:
    """Has a worker answer what it needs to learn a correction, and nothing less."""
    learns = rig.servicer.answerer.corrector
    for number in range(TRAINED + 1):
        assert (await learns.candidate(rig.tenant, "") is None) == (number < PROMPTS)
        assert await learns.find(rig.tenant, "") is None
        assert not await learns.learned(rig.tenant, "")
        chunks = [random_ids(90, 100 * number + n) for n in range(4)]
        await rig.ask(random_ids(5, 1), chunks, [7], recipe="full_reuse+corrected")
        await learns.settle()
    found: Correction = await learns.find(rig.tenant, "")
    return found


async def test_what_is_reused_is_corrected(family: str, start: Any, parts: Parts) -> None:
    """At r = 0, once the worker has learned how; at r = 1 it is full attention, before and after."""
    system, chunks, question = parts
    rig, plain = await start(family), oracle(family)
    before = await rig.ask(*parts, recipe="full_reuse+corrected", expected=plain.full_reuse(parts))
    correction = await taught(rig)
    context = corrected(plain, system, chunks, correction.weights)
    more = {"max_tokens": 2, "expected": lambda said: plain.after(context, [*question, *said])}
    none = await rig.ask(*parts, recipe="full_reuse+corrected", **more)
    assert none.summary.tokens_recomputed == 0
    assert (before.summary.chunks_corrected, none.summary.chunks_corrected) == (0, 2)
    assert error(before.logits[0], none.logits[0]) > 10 * CLOSE, "the correction does nothing"
    await rig.ask(*parts, recipe="prophetkv+corrected", ratio=1.0, expected=plain.full_attention(parts))


def sample(rig: Any, chunks: Any = LESSON) -> Prompt:
    """Chunks to draw prompts from."""
    return Prompt(Chunk((1, 2)), tuple(Chunk(tuple(ids)) for ids in chunks), (), rig.tenant)


async def lesson_of(rig: Any, parts: Parts) -> Lesson:
    """A lesson from a prompt without its question."""
    system, *chunks = (Chunk(tuple(ids)) for ids in (parts[0], *parts[1]))
    lesson: Lesson = await rig.servicer.answerer.corrector._lesson(Prompt(system, tuple(chunks), (), rig.tenant))
    return lesson


def asked_about(lesson: Lesson, model: Model) -> Questions:
    """What the model asks itself about a lesson's prompt."""
    return ask(model, lesson.prompt, [layer.to(model.device) for layer in lesson.together], 0)


async def test_training_is_for_what_a_worker_answers(family: str, start: Any, parts: Parts) -> None:
    """Its loss is the KL of answers over the corrected context from full attention, in plain transformers."""
    system, chunks, _ = parts
    rig, plain = await start(family), oracle(family)
    lesson, model = await lesson_of(rig, parts), rig.servicer._model
    first = 0.1 * random(*shape(model.kv.layers, model.kv.kv_heads, model.kv.head_dim), seed=0)
    training = Distillation(model, Correction(first))
    training.add(lesson)
    rows, losses = asked_about(lesson, model), list[float]()
    contexts = plain.kv([*system, *(i for chunk in chunks for i in chunk)]), corrected(plain, system, chunks, first)
    counted, answers = rows.counted.tolist(), 0
    for row in counted:
        own = (questions._SHARED, rows.groups[row])
        asked = [i for i, group in zip(rows.ids[: row + 1].tolist(), rows.groups, strict=False) if group in own]
        full, reused = (plain.after(context, asked).log_softmax(-1) for context in contexts)
        losses.append(float((full.exp() * (full - reused)).sum()))
        if rows.weights[row] == 1 and (rows.groups[row] == rows.groups[row + 1 :][:1]).any():
            assert rows.ids[row + 1] == full.argmax(), "full attention answers, greedily"
            answers += 1
    assert answers > 10
    weights = rows.weights[counted].tolist()
    loss = sum(weight * kl for weight, kl in zip(weights, losses, strict=True)) / sum(weights)
    assert training.step() == pytest.approx(loss, rel=1e-3)
    assert not torch.equal(training.correction.weights.cpu(), first)


async def test_a_question_ends_with_the_template(start: Any) -> None:
    """Of which only the last token's prediction counts: that of the answer's first token."""
    rig = await start("llama")
    lesson = await lesson_of(rig, ([1, 2], [random_ids(40, n) for n in range(4)], []))
    model = rig.servicer._model
    template = replace(model.template, tail="<|end|>")
    rows = asked_about(lesson, replace(model, template=template))
    for group in range(2):
        own = rows.groups == group
        text, weights = model.tokenizer.decode(rows.ids[own].tolist()), rows.weights[own].tolist()
        assert "\nAnswer:<|end|>" in text
        start_of_answer = weights.index(1.0)
        assert model.tokenizer.decode(rows.ids[own][: start_of_answer + 1].tolist()).endswith("<|end|>")
        assert weights[start_of_answer - 6 : start_of_answer] == [0.0] * 6
        assert weights[: start_of_answer - 6] == pytest.approx([questions._QUESTION_WEIGHT] * (start_of_answer - 6))
        assert set(weights[start_of_answer:]) == {1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
async def test_training_makes_answers_closer(dtype: torch.dtype, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "RATE", 0.72)  # a model with random weights changes little from step to step
    monkeypatch.setattr(distillation, "EPOCHS", 4)
    rig = await start("llama", dtype=dtype)
    lesson = await lesson_of(rig, ([1, 2], [random_ids(40, n) for n in range(4)], []))
    fit = Fit(rig.servicer.answerer.corrector._shape)
    rig.servicer.answerer.corrector._add(fit, lesson)
    training = Distillation(rig.servicer._model, fit.solve())
    for _ in range(LESSONS):
        assert not training.ready
        training.add(lesson)
    first, *_, last = [sum(training.step() for _ in range(LESSONS)) for _ in range(4)]
    assert training.finished
    assert last < 0.8 * first, "of the same questions"


async def test_a_corpus_is_learned_ahead_of_time(start: Any, parts: Any) -> None:
    rig = await start("llama")
    *before, last = LESSON
    encoded = [await rig.encode(parts[0], before, last, "CORRECTION", corpus="ahead") for _ in range(2)]
    assert [each.existed for each in encoded] == [False, True]
    asked = await rig.ask(*parts, recipe="full_reuse+corrected", corpus="ahead")
    assert asked.summary.chunks_corrected == 2
    too_long = "the system prompt and the two longest chunks have 2095 tokens"
    long = [random_ids(2000, 1), LESSON[0]]
    for few, message in (([LESSON[0], last], "at least three different chunks"), (long, too_long)):
        with pytest.raises(InvalidArgument, match=message):
            await rig.encode(parts[0], few, last, "CORRECTION", corpus="other")


@pytest.mark.parametrize("left", [False, True])
async def test_a_prompt_that_comes_twice_counts_once(left: bool, start: Any) -> None:
    rig = await start("llama")
    ours = rig.servicer.answerer.corrector
    chunks = tuple(Chunk(tuple(random_ids(20, n))) for n in range(3))
    prompt = Prompt(Chunk(tuple(random_ids(5, 1))), chunks, (), rig.tenant)
    first = asyncio.create_task(ours.learn(prompt, "c"))
    if left:  # after its second chunk, if these are added one by one
        while not any(lessons.fit.tokens for lessons in ours._lessons.values()):  # noqa: ASYNC110 - a thread adds
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
    await asyncio.gather(first, ours.learn(prompt, "c"), return_exceptions=True)
    (lessons,) = ours._lessons.values()
    assert lessons.fit.tokens == 40


async def test_with_neighbours_a_chunk_is_the_mean_of_two_estimates(cached: Any) -> None:
    rig, plain = await cached("llama"), oracle("llama")
    system, a, b, c = (random_ids(n, n) for n in (5, 9, 12, 20))
    await rig.encode(system, LESSON[:-1], LESSON[-1], "CORRECTION", corpus="near")
    correction = await rig.servicer.answerer.corrector.find(rig.tenant, "near")
    near = await rig.encode(system, [a, b], c, "NEIGHBOURS", corpus="near")
    before = await rig.encode(system, [a, b], c, "NEIGHBOURS", corpus="another, without a correction")
    assert near.variant not in (b"", before.variant)
    await rig.stored()

    changed = corrected(plain, system, [a, b, c], correction.weights)
    after = plain.kv(c, past=corrected(plain, system, [a, b], correction.weights))
    mean = [
        tuple((x[:, :, -20:] + y[:, :, -20:]) / 2 for x, y in zip(*each, strict=True))
        for each in zip(after, changed, strict=True)
    ]
    for chunk, variant, kv in (
        (c, near.variant, mean),
        (c, before.variant, plain.kv(c, past=plain.reused(system, [a, b]))),
        (b, b"", plain.alone(system, b, len(system))),
    ):
        # Right after the system prompt, the entry of the chunk encoded alone would win.
        between = [(variant, ())] if variant else []
        path = [(keys.chunk_digest(system), ()), *between, (keys.chunk_digest(chunk), (variant,) if variant else ())]
        entry = (await rig.servicer.cache.lookup(rig.namespace, path, timeout=5)).hits[-1].entry
        assert entry.variant == variant
        torch.testing.assert_close(await rig.kv_of(entry), last_of(kv, len(chunk)), atol=1e-4, rtol=1e-4)


async def test_what_is_learned_is_kept_and_its_tenants_own(start: Any) -> None:
    correction = await taught(await start("llama"))
    other = await start("llama")
    find = other.servicer.answerer.corrector.find
    assert torch.equal((await find(other.tenant, "")).weights, correction.weights)
    assert await find("b", "") is None
    assert await find(other.tenant, "corpus") is None


async def test_what_another_worker_learns_is_used(start: Any) -> None:
    """One goes on from what the other fits, and leaves what the other trains as it is."""
    rig, prompts = await start("llama"), [LESSON[n:6] + LESSON[:n] for n in range(6)]
    ours, theirs = rig.servicer.answerer.corrector, (await start("llama")).servicer.answerer.corrector
    assert await ours.find(rig.tenant, "c") is None
    await ours.learn(sample(rig, prompts[1]), "c")
    assert await theirs.study(sample(rig, prompts[0]), "c", train=False)
    fit = await ours.candidate(rig.tenant, "c")
    assert torch.equal(fit.weights, (await theirs.candidate(rig.tenant, "c")).weights)
    await ours.learn(sample(rig, prompts[2]), "c")
    await ours.learn(sample(rig, prompts[3]), "c")
    (lessons,) = ours._lessons.values()
    assert (lessons.fit, len(lessons.training._exercises)) == (None, 1)
    assert await theirs.study(sample(rig, prompts[0]), "c")
    trained = (await theirs.find(rig.tenant, "c")).weights
    await ours.learn(sample(rig, prompts[4]), "c")
    assert not ours._lessons
    await ours._finish(replace(fit, validated=True), ours._file(rig.tenant, "c"))  # such as for lack of memory
    for each in (ours, (await start("llama")).servicer.answerer.corrector):
        assert torch.equal((await each.find(rig.tenant, "c")).weights, trained)


async def test_learning_yields_to_requests(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the priority of its thread, which torch's threads inherit; that of the others is as before."""
    usual, found = os.getpriority(os.PRIO_PROCESS, 0), list[int]()
    make = Distillation.__init__

    def begin(*given: Any) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        make(*given)

    def step(training: Distillation) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        training._steps += 1

    monkeypatch.setattr(Distillation, "__init__", begin)
    monkeypatch.setattr(Distillation, "step", step)
    assert "name" in vars(await taught(await start("llama"))), "made in a thread as well"
    assert len(found) == 1 + LESSONS
    assert min(found) > usual
    priorities = [os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in threading.enumerate()]
    assert priorities.count(usual) > 1
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


@pytest.mark.parametrize("where", ["add", "step"])
async def test_without_room_to_train_the_fit_is_kept(
    where: str, start: Any, corrections: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Distillation, where, full)
    rig = await start("llama")
    ours = rig.servicer.answerer.corrector
    assert await ours.study(sample(rig), "c")
    assert await ours.learned(rig.tenant, "c")
    assert ours._file(rig.tenant, "c") in (corrections / "corrections").iterdir()


async def test_what_gives_way_to_another_corpus_goes_on_from_its_fit(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same worker, and in one that starts later."""
    monkeypatch.setattr(corrector, "_MOST_LESSONS", 1)
    rig = await start("llama")
    ours = rig.servicer.answerer.corrector
    assert await ours.study(sample(rig), "c", train=False)
    fit = (await ours.candidate(rig.tenant, "c")).weights
    await ours.learn(sample(rig), "another")
    for each in (ours, (await start("llama")).servicer.answerer.corrector):
        assert torch.equal((await each.candidate(rig.tenant, "c")).weights, fit)
        assert not await each.learned(rig.tenant, "c")
    assert await each.study(sample(rig), "c")
    assert await each.learned(rig.tenant, "c")
    assert not torch.equal((await each.find(rig.tenant, "c")).weights, fit)


async def test_under_tensor_parallelism_nothing_is_learned(start: Any) -> None:
    """What another worker learned and validated is used."""
    ours = (rig := await start("llama")).servicer.answerer.corrector
    theirs = (await start("llama")).servicer.answerer.corrector
    ours._model = replace(ours._model, ranks=replace(ours._model.ranks, count=2))
    ours.offer(sample(rig), "c")
    assert ours._waiting.empty()
    assert not await ours.study(sample(rig), "c")
    assert await ours.learned(rig.tenant, "c"), "there is no more to learn"
    assert "does not learn" in await ours.state(rig.tenant, "c")
    assert await theirs.study(sample(rig), "c", validate=False)
    assert await ours.find(rig.tenant, "c") is None
    assert await theirs.study(sample(rig), "c")
    assert await ours.find(rig.tenant, "c") is not None


async def test_learning_ahead_of_time_needs_no_idle_worker(start: Any) -> None:
    """Even if a training has begun that waits for one."""
    rig = await start("llama")
    ours, idle, whole = rig.servicer.answerer.corrector, asyncio.Event(), sample(rig)
    for number in range(1, TRAINED):
        await ours.learn(sample(rig, [random_ids(90, 100 * number + n) for n in range(4)]), "c")
    waiting = asyncio.create_task(ours.learn(whole, "c", idle))
    (lessons,) = ours._lessons.values()
    await rig.until(lambda: lessons.training.ready)
    assert not await ours.learned(rig.tenant, "c")
    assert await ours.study(whole, "c")
    assert await ours.learned(rig.tenant, "c")
    idle.set()
    await waiting


@pytest.mark.parametrize("patience", [pytest.param(600.0, marks=pytest.mark.slow), -1.0])
async def test_corpora_that_take_turns(patience: float, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third one is learned about when one of the first two is done, or was not asked about for long."""
    monkeypatch.setattr(corrector, "_PATIENCE_SECONDS", patience)
    rig = await start("llama")
    ours, corpora = rig.servicer.answerer.corrector, "abc"

    async def ask(number: int, corpus: str) -> None:
        ours.offer(sample(rig, [random_ids(90, 100 * number + n) for n in range(4)]), corpus)
        await ours.settle()

    for number in range(TRAINED + 1):
        for corpus in corpora:
            await ask(number, corpus)
    assert [await ours.learned(rig.tenant, c) for c in corpora] == [patience > 0, patience > 0, False]
    for number in range(TRAINED + 1):
        await ask(2 * TRAINED + number, "c")
    assert await ours.learned(rig.tenant, "c")


async def test_no_tenant_keeps_others_from_learning(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many corpora it asks about, and however often."""
    monkeypatch.setattr(corrector, "PROMPTS", 1)
    monkeypatch.setattr(corrector, "TOKENS", 1)
    monkeypatch.setattr(distillation, "LESSONS", 1)
    rig = await start("llama")
    ours, tenants = rig.servicer.answerer.corrector, [rig.tenant + name for name in "ab"]
    for number in range(6):
        about = replace(sample(rig, [random_ids(30, 100 * number + n) for n in range(4)]), tenant=rig.tenant)
        for corpus in range(12):
            ours.offer(about, f"{number} {corpus}")  # never enough to learn about any
        for tenant in tenants:
            ours.offer(replace(about, tenant=tenant), "c")
        assert ours._waiting.qsize() <= 10
        await ours.settle()
    assert [await ours.learned(tenant, "c") for tenant in tenants] == [True, True]
    assert len(ours._lessons) <= corrector._MOST_LESSONS
    assert not +ours._queued


async def test_three_chunks_make_fewer_prompts_than_a_training_takes(start: Any) -> None:
    rig = await start("llama")
    ours = rig.servicer.answerer.corrector
    assert await ours.study(sample(rig, [random_ids(200, n) for n in range(3)]), "c")
    assert await ours.learned(rig.tenant, "c")
    assert not ours._lessons


async def test_of_a_long_prompt_a_part_is_learned_from(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV of all prompts stays in memory until the training ends."""
    monkeypatch.setattr(corrector, "_DRAWN_TOKENS", 300)
    rig = await start("llama")
    ours = rig.servicer.answerer.corrector
    ours.offer(sample(rig), "c")
    await ours.settle()
    (lessons,) = ours._lessons.values()
    assert lessons.fit.tokens == 2 * 90, "all but the first chunk"


async def test_drawn_prompts_fit_into_the_pool(start: Any) -> None:
    large = await start("llama")
    rig = await start("llama", pool_bytes=600 * large.model.kv.token_bytes)
    assert await rig.servicer.answerer.corrector.study(sample(rig), "c")


async def test_what_is_not_used_leaves_memory(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrector, "_MOST_BYTES", 1)
    rig = await start("llama")
    ours = rig.servicer.answerer.corrector
    first = await taught(rig)
    assert await ours.learned(rig.tenant, "")
    assert await ours.find(rig.tenant, "") is first, "the last one stays"
    first.save(ours._file("d", ""))
    assert await ours.find("d", "") is not None
    again = await ours.find(rig.tenant, "")
    assert again is not first
    assert torch.equal(again.weights, first.weights), "from its file"


@pytest.mark.parametrize("how", ["damaged", "other constants"])
async def test_a_file_that_is_no_use_is_learned_again(
    how: str, start: Any, corrections: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await taught(await start("qwen2"))
    if how == "damaged":
        for file in (corrections / "corrections").iterdir():
            file.write_bytes(file.read_bytes()[:-9])
    else:
        monkeypatch.setattr(corrector, "MADE", b"otherwise")
    assert (await taught(await start("qwen2"))).weights.isfinite().all()
    assert caplog.text.count("can't be read") == (how == "damaged"), "not at every request"


async def test_a_fault_of_the_cache_is_plain_prefill(start: Any, parts: Parts) -> None:
    """Whatever the worker has learned."""
    rig = await start("llama", cache="127.0.0.1:1", lookup_timeout=1)
    await taught(rig)
    for recipe in ("full_reuse+corrected", "midlayer+corrected"):
        answer = await rig.ask(*parts, recipe=recipe, expected=oracle("llama").full_attention(parts))
        assert "lookup failed" in answer.summary.degraded_reason


async def test_what_is_stored_is_not_corrected(start: Any, cached: Any, parts: Parts) -> None:
    """Neither by the worker that encoded a chunk, nor is it corrected twice by the one that fetches it."""
    rig, alone = await cached("llama"), await start("llama")
    await taught(rig)
    first = await rig.fill(*parts, recipe="full_reuse+corrected")
    assert first.summary.chunks_missed == 3
    other = await cached("llama")
    again = await other.ask(*parts, recipe="full_reuse+corrected", expected=first.logits[0])
    assert again.summary.chunks_missed == 0
    plain = await other.ask(*parts, recipe="full_reuse")
    assert error(plain.logits[0], (await alone.ask(*parts, recipe="full_reuse")).logits[0]) < CLOSE
    assert error(plain.logits[0], first.logits[0]) > 10 * CLOSE
    # From what lies in the pool already: the chunk that was first stands behind others now.
    turned = parts[0], parts[1][::-1], parts[2]
    moved = await other.ask(*turned, recipe="full_reuse+corrected")
    assert moved.summary.chunks_missed == 0
    fresh = await alone.ask(*turned, recipe="full_reuse+corrected")
    assert error(moved.logits[0], fresh.logits[0]) < CLOSE


async def test_the_first_chunk_stays_as_it_is(cached: Any, parts: Parts) -> None:
    """Also where it is not lossless, since it was stored in one byte a number."""
    rig, other = [await cached("llama", store="int8") for _ in range(2)]
    await taught(rig)
    one = parts[0], parts[1][:1], parts[2]
    await rig.fill(*one, recipe="full_reuse")
    plain, found = [await other.ask(*one, recipe=f"full_reuse{more}") for more in ("", "+corrected")]
    assert found.summary.chunks_missed == plain.summary.chunks_missed == 0
    assert error(found.logits[0], plain.logits[0]) < CLOSE
