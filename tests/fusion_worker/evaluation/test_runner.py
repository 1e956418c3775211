"""Cells against an independent forward pass, textual answers against transformers' logits, and each other."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import SamplingParams
from fusionkv.fusion_worker.evaluate import metrics
from fusionkv.fusion_worker.evaluate.data import tasks
from fusionkv.fusion_worker.evaluate.data.prompts import Prompter
from fusionkv.fusion_worker.evaluate.data.samples import Block, Library, Sample, Task
from fusionkv.fusion_worker.evaluate.data.stories import Sample as Story
from fusionkv.fusion_worker.evaluate.report.cells import NO_CONTEXT, Cell, Measured
from fusionkv.fusion_worker.evaluate.runner import Runner
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.request import Request
from fusionkv.fusion_worker.servicer import FusionServicer
from fusionkv.models import evaluate
from fusionkv.protos.answer.v1.answer_pb2 import Token
from fusionkv.protos.contract.recipes import Recipe, find_recipe
from fusionkv.protos.runtime.errors import FailedPrecondition, ResourceExhausted
from tests.fusion_worker.oracle import Oracle


def cells(*asked: tuple[str, float]) -> list[Cell]:
    return [Cell(find_recipe(name), r) for name, r in asked]


def measure(
    model: Model,
    task: Task,
    asked: Sequence[Cell],
    pool_bytes: int = 64 << 20,
    auxiliary: Model | None = None,
    store: str = "plain",
) -> dict[Cell, Measured]:
    async def run() -> list[Measured]:
        runner = Runner(model, WorkerConfig(pool_bytes=pool_bytes, store=store), 512, auxiliary)
        try:
            return await runner.measure(Block(task, 0, len(task.samples)), asked)
        finally:
            await runner.close()

    return dict(zip(asked, asyncio.run(run()), strict=True))


CHAIN, SAMPLES = "chain2", 3


def same(a: Measured, b: Measured, turned: bool = False, tolerance: float = 2e-4) -> None:
    """turned: `b` has the samples in the opposite order."""
    assert a.values.keys() == b.values.keys()
    for name, found in a.values.items():
        wanted = b.values[name][:: -1 if turned else 1]
        np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def by_evaluate(reference_model: Path) -> dict[str, np.ndarray]:
    """By models/evaluate.py, which shares no code with the engine: exact and KL of full reuse."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reference_model)
    network = Qwen2ForCausalLM.from_pretrained(reference_model, dtype=torch.float32).eval()
    stories = [Story(made.pages, (question,)) for made, question in tasks.asked(CHAIN, SAMPLES)]
    p = evaluate.lay_out(stories, tokenizer)
    place = torch.arange(p.ids.shape[1]).expand_as(p.ids)
    with torch.inference_mode():
        full, _ = evaluate.forward(network, p.ids, place, p.visible)
        _, alone = evaluate.forward(network, p.ids, p.alone, p.visible_alone)
        reuse, _ = evaluate.forward(network, p.ids, place, p.visible, p.chunk <= 0, alone)
    first = (p.answer != -100).int().argmax(1)
    rows = range(SAMPLES)
    return {
        "exact": evaluate.exact(full, p.answer).numpy(),
        "exact_reuse": evaluate.exact(reuse, p.answer).numpy(),
        "kl": np.array([metrics.kl(full[i, first[i]].numpy(), reuse[i, first[i]].numpy()) for i in rows]),
    }


def test_full_attention_and_full_reuse_are_the_oracles(
    model: models.Model, by_evaluate: dict[str, np.ndarray]
) -> None:
    found = measure(model, tasks.reference(CHAIN, SAMPLES), cells(("full_attention", 1.0), ("full_reuse", 0.0)))
    full, reuse = found.values()
    assert full.values["exact_match"] == by_evaluate["exact"].tolist()
    assert full.values["kl"] == [0.0] * SAMPLES
    assert reuse.values["exact_match"] == by_evaluate["exact_reuse"].tolist()
    np.testing.assert_allclose(reuse.values["kl"], by_evaluate["kl"], atol=1e-3, rtol=1e-3)
    assert min(by_evaluate["kl"]) > 0.01, "samples on which reuse changes nothing test nothing"


def test_everything_recomputed_is_full_attention_however_it_was_encoded(model: models.Model) -> None:
    asked = cells(("full_attention", 1.0), ("fusionrag", 1.0), ("cacheblend", 1.0), ("fusionrag", 0.0))
    full, guided, blended, stale = measure(model, tasks.reference(CHAIN, 2), asked).values()
    for everything in (guided, blended):
        assert max(everything.values["kl"]) < 1e-4
        assert everything.values["exact_match"] == full.values["exact_match"]
        # The first chunk stands where it was encoded: it is lossless, and nothing is recomputed of it.
        assert 0 < everything.values["recomputed"][0] < full.values["recomputed"][0]
    assert max(stale.values["kl"]) > 0.01


@pytest.mark.slow
def test_a_sample_gives_the_same_alone_and_among_others(model: models.Model) -> None:
    names = ("epic", "cacheblend", "a3", "fusionrag", "prophetkv", "prophetkv+window(8,5)", "a3+snapkv(100)")
    asked = [*cells(*((name, r) for name in names for r in (0.1, 0.3))), *cells(("ape", 0.0))]
    task = tasks.reference(CHAIN, 4)
    a, b, c, d = task.samples
    forth = measure(model, task, asked)
    back = measure(model, dataclasses.replace(task, samples=(d, c, b, a)), asked)
    for cell in asked:
        same(forth[cell], back[cell], turned=True)
    few, many = (forth[cell].values for cell in cells(("prophetkv", 0.1), ("prophetkv", 0.3)))
    assert [m > f for m, f in zip(many["recomputed"], few["recomputed"], strict=True)] == [True] * 4


def test_link_tokens_are_counted_as_computed(model: models.Model) -> None:
    """Any tokens serve as link tokens here: the model was not trained with some."""
    linked = dataclasses.replace(model, links=(tuple(range(300, 305)),) * 8)
    task = tasks.reference(CHAIN, 2)
    asked = cells(("full_reuse", 0.0), ("kvlink", 0.0), ("kvlink+linked(0)", 0.0), ("a3", 0.1), ("a3+linked(2)", 0.1))
    reuse, five, none, some, both = measure(linked, task, asked).values()
    assert five.values["recomputed"] == [5 * 8] * 2
    same(none, reuse)
    assert min(abs(a - b) for a, b in zip(five.values["kl"], reuse.values["kl"], strict=True)) > 1e-3
    assert both.values["recomputed"] == [count + 2 * 8 for count in some.values["recomputed"]]
    with pytest.raises(FailedPrecondition, match="link tokens for 7 chunks; kvlink is asked to link 8"):
        measure(dataclasses.replace(linked, links=linked.links[:7]), task, asked)


def test_a_second_model_chooses(model: models.Model, reference_model: Path) -> None:
    """Here the model is its own second one."""
    task, asked = tasks.reference(CHAIN, 2), cells(("full_reuse", 0.0), ("cacheclip", 0.3))
    with pytest.raises(FailedPrecondition, match="--auxiliary"):
        measure(model, task, asked)
    reuse, clip = measure(model, task, asked, auxiliary=models.load(reference_model)).values()
    changed = [c != r for c, r in zip(clip.values["kl"], reuse.values["kl"], strict=True)]
    assert changed == [count > 0 for count in clip.values["recomputed"]]
    assert any(changed)


def test_what_does_not_fit_the_pool_says_what_would(model: models.Model) -> None:
    message = r"chain2: 4 samples need \d+ tokens of KV .* raise pool_bytes to \d+"
    with pytest.raises(ResourceExhausted, match=message):
        measure(model, tasks.reference(CHAIN, 4), cells(("full_reuse", 0.0)), pool_bytes=4 << 20)


COUNT, LENGTH = 2, 6


@pytest.fixture(scope="module")
def task() -> Task:
    made = tasks.reference("chain2", COUNT)
    return dataclasses.replace(made, metrics=("f1", "exact_match"), max_tokens=LENGTH, group=1)


@torch.inference_mode()
def own(plain: Oracle, ids: Sequence[int], following: Sequence[int], block: Sequence[int] = ()) -> np.ndarray:
    """Logits that transformers finds `following` by; with blocks, as of `Oracle.blocks`, for each of `ids`."""
    of = plain.blocks([*block, *[-1] * len(following)]) if block else plain
    return of.network(torch.tensor([[*ids, *following]]), use_cache=False).logits[0, len(ids) - 1 : -1].numpy()


def test_metrics_are_those_of_transformers_logits(model: models.Model, task: Task, reference_model: Path) -> None:
    more = {"dtype": torch.float32, "attn_implementation": "eager"}
    plain = Oracle(Qwen2ForCausalLM.from_pretrained(reference_model, **more).eval())
    model = dataclasses.replace(model, begin="")
    prompter = Prompter(model, 512)
    # No system prompt: distances within a chunk are what they were when it was encoded, and nothing else is seen.
    task = dataclasses.replace(task, samples=tuple(dataclasses.replace(s, instruction="") for s in task.samples))
    full, reuse = measure(model, task, cells(("full_attention", 1.0), ("full_reuse", 0.0))).values()
    assert full.values["answer_kl"] == [0.0] * COUNT
    assert full.values["answer_agreement"] == [1.0] * COUNT
    for i, sample in enumerate(task.samples):
        prompt, _ = prompter.prompt(sample, task.chat, LENGTH)
        ids, gold = prompt.ids.tolist(), prompter.ids(sample.answers[0])
        assert not prompt.system.ids
        alone = [n for n, chunk in enumerate(prompt.chunks) for _ in chunk.ids] + [-1] * len(prompt.question)
        given: list[int] = []
        while len(given) < LENGTH and not (given and given[-1] in model.ends):
            given.append(int(plain.logits([*ids, *given]).argmax()))
        whole, apart = (own(plain, ids, given, block) for block in ((), alone))
        assert reuse.values["answer_kl"][i] == pytest.approx(metrics.kl(whole, apart).mean(), rel=1e-3, abs=1e-5)
        share = float((apart.argmax(-1) == np.array(given)).mean())
        assert reuse.values["answer_agreement"][i] == pytest.approx(share)
        for found, block in ((full, ()), (reuse, alone)):
            logits = torch.from_numpy(own(plain, ids, gold, block))
            wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(gold))
            assert found.values["gold_nll"][i] == pytest.approx(float(wanted), rel=1e-3, abs=1e-5)
    assert max(reuse.values["answer_kl"]) > 0.01, "where reuse changes nothing, nothing is tested"


NAMES = ("full_reuse", "epic", "cacheblend", "prophetkv", "prophetkv+snapkv(100)")


def test_generated_answers_are_plain_greedy_ones(
    model: models.Model, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def number(answer: str, _: object) -> float:
        texts.append(answer)
        return len(texts) - 1.0

    monkeypatch.setitem(metrics.SCORES, "f1", number)
    asked = cells(*((name, 0.0 if name == "full_reuse" else 0.1) for name in NAMES))
    found = measure(model, dataclasses.replace(task, metrics=("f1",)), asked)
    said = {cell.recipe.name: [texts[int(i)] for i in found[cell].values["f1"]] for cell in asked}
    assert said == asyncio.run(plainly(model, task))
    assert len({tuple(answers) for answers in said.values()}) > 1, "answers differ between recipes"


async def plainly(model: models.Model, task: Task, names: Sequence[str] = NAMES) -> dict[str, list[str]]:
    """As a worker answers."""
    servicer, params = FusionServicer(WorkerConfig(pool_bytes=64 << 20), model), SamplingParams(max_tokens=LENGTH)

    async def one(recipe: Recipe, sample: Sample) -> str:
        prompt, _ = Prompter(model, 512).prompt(sample, task.chat, LENGTH)
        asking = servicer.answerer.answer(Request(prompt, recipe, 0.0 if recipe.fixed else 0.1, params))
        ids = [event.id async for event in asking if isinstance(event, Token)]
        return model.tokenizer.decode([i for i in ids if i not in model.ends])

    try:
        return {name: [await one(find_recipe(name), sample) for sample in task.samples] for name in names}
    finally:
        await servicer.close()


def test_the_question_alone_is_a_row_of_its_own(model: models.Model, task: Task) -> None:
    asked = [*cells(("full_attention", 1.0)), NO_CONTEXT]
    full, bare = measure(model, task, asked).values()
    assert set(bare.values) == {"gold_nll", "f1", "exact_match"}
    assert sum(bare.values["gold_nll"]) > sum(full.values["gold_nll"]), "the answers stand in the passages"
    # Its question is the same whatever the passages.
    first = dataclasses.replace(task, samples=tuple(dataclasses.replace(s, passages=("x",)) for s in task.samples))
    again = measure(model, first, asked)[NO_CONTEXT]
    np.testing.assert_allclose(again.values["gold_nll"], bare.values["gold_nll"], rtol=1e-4)


def test_long_answers_are_compared_with_full_attention_s(
    model: models.Model, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def kept(answer: str, expected: Sequence[str]) -> float:
        seen.append(expected[0])
        return metrics.rouge_l(answer, expected)

    monkeypatch.setitem(metrics.SCORES, "rouge_l", kept)
    long = dataclasses.replace(task, metrics=("contains", "entities"), compared=("rouge_l", "entities"))
    asked = [*cells(("full_attention", 1.0), ("full_reuse", 0.0)), NO_CONTEXT]
    full, reuse, bare = measure(model, long, asked).values()
    for name in ("rouge_l_full", "entities_full"):
        assert full.values[name] == [1.0] * COUNT
        assert min(reuse.values[name]) < 1.0, "reuse changes answers"
        assert min(bare.values[name]) < 1.0
    # The reference is what full attention itself says.
    whole = asyncio.run(plainly(model, task, ("full_attention",)))["full_attention"]
    assert {*seen} == {*whole}


def test_neighbours_come_from_the_whole_file(model: models.Model, task: Task) -> None:
    others = tasks.reference("chain2", COUNT + 8).samples[COUNT:]
    small = dataclasses.replace(task, samples=task.samples[:1])
    asked = cells(("full_attention", 1.0), ("full_reuse+similarity_guided(2)", 0.0))
    own, file = (
        measure(model, dataclasses.replace(small, library=Library((*small.samples, *more))), asked)[asked[1]].values
        for more in ((), others)
    )
    assert own["answer_kl"] != file["answer_kl"]
    assert file["encoded_tokens"] == [2.0 * file["stored"][0]]
    assert file["encoded_tokens_per_chunk"] == [file["encoded_tokens"][0] / len(small.samples[0].passages)]


def test_chunks_are_encoded_after_a_primer_of_the_file(model: models.Model, task: Task) -> None:
    """Those of samples without a file are encoded after the same text on any machine."""
    library = Library(tasks.reference("chain2", COUNT + 5).samples)
    one = dataclasses.replace(task, samples=task.samples[:1], library=None)
    primed, plain = cells(("full_reuse+primed", 0.0), ("full_reuse", 0.0))
    alone, filed = (
        measure(model, each, [primed, plain]) for each in (one, dataclasses.replace(one, library=library))
    )
    assert len({found[primed].values["answer_kl"][0] for found in (alone, filed)}) == 2
    same(alone[plain], filed[plain])
    assert alone[primed].values["answer_kl"] != alone[plain].values["answer_kl"]
