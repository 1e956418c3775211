"""Answers in words against transformers' own logits, greedy generation step by step, and prompts without passages."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from fusionkv.bench.quality import metrics
from fusionkv.bench.quality.data import tasks
from fusionkv.bench.quality.data.prompts import Prompter
from fusionkv.bench.quality.data.samples import Library, Sample, Task
from fusionkv.bench.quality.report.cells import NO_CONTEXT
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import SamplingParams
from fusionkv.fusion_worker.load import loader as loading
from fusionkv.fusion_worker.recipes import modifiers
from fusionkv.fusion_worker.recipes.recipes import Recipe
from fusionkv.fusion_worker.request import Piece
from fusionkv.fusion_worker.servicer import FusionServicer
from tests.fusion_worker.evaluation.measuring import cells, measure

COUNT, LENGTH = 3, 6


@pytest.fixture(scope="module")
def task() -> Task:
    made = tasks.reference("chain2", COUNT)
    return dataclasses.replace(made, metrics=("f1", "exact_match"), max_tokens=LENGTH, group=1)


@torch.inference_mode()
def own(network: Qwen2ForCausalLM, ids: Sequence[int], block: Sequence[int], following: Sequence[int]) -> np.ndarray:
    """Logits that transformers finds `following` by; tokens of two different blocks, both above 0, don't see each
    other, and keep the places that they have in the prompt."""
    every = torch.tensor([*ids, *following])
    of = torch.tensor([*block, *[0] * len(following)])
    seen = (of[:, None] == of) | (of[:, None] == 0) | (of == 0)
    seen &= torch.ones(len(every), len(every)).tril().bool()
    mask = torch.zeros(len(every), len(every)).masked_fill(~seen, torch.finfo(torch.float32).min)
    out = network(every[None], attention_mask=mask[None, None], use_cache=False).logits[0]
    return out[len(ids) - 1 : -1].numpy()


def test_metrics_are_those_of_transformers_logits(model: models.Model, task: Task, reference_model: Path) -> None:
    network = Qwen2ForCausalLM.from_pretrained(
        reference_model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model = dataclasses.replace(model, bos=None)
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
        alone = [n for n, chunk in enumerate(prompt.chunks, 1) for _ in chunk.ids]
        alone += [0] * len(prompt.question)
        given: list[int] = []
        while len(given) < LENGTH and not (given and given[-1] in model.ends):
            given.append(int(own(network, ids, [0] * len(ids), [*given, 0])[-1].argmax()))
        whole, apart = (own(network, ids, block, given) for block in ([0] * len(ids), alone))
        assert reuse.values["answer_kl"][i] == pytest.approx(metrics.kl(whole, apart).mean(), rel=1e-3, abs=1e-5)
        share = float((apart.argmax(-1) == np.array(given)).mean())
        assert reuse.values["answer_agreement"][i] == pytest.approx(share)
        for found, block in ((full, [0] * len(ids)), (reuse, alone)):
            logits = torch.from_numpy(own(network, ids, block, gold))
            wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(gold))
            assert found.values["gold_nll"][i] == pytest.approx(float(wanted), rel=1e-3, abs=1e-5)
    assert max(reuse.values["answer_kl"]) > 0.01, "where reuse changes nothing, nothing is tested"


NAMES = (
    "full_reuse",
    "epic",
    "cacheblend",
    "cacheblend+adaptive(20)",
    "prophetkv+adaptive(20)",
    "prophetkv+snapkv(100)",
)


@pytest.mark.parametrize("timed", [True, False])
def test_generated_answers_are_plain_greedy_ones(
    model: models.Model, task: Task, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def number(_: str, answer: str, *__: object) -> float:
        texts.append(answer)
        return len(texts) - 1.0

    monkeypatch.setattr(metrics, "text_score", number)
    asked = cells(*((name, 0.0 if name == "full_reuse" else 0.1) for name in NAMES))
    found = measure(model, dataclasses.replace(task, metrics=("f1",)), asked, timed)
    said = {cell.recipe.name: [texts[int(i)] for i in found[cell].values["f1"]] for cell in asked}
    assert said == asyncio.run(plainly(model, task))
    assert len({tuple(answers) for answers in said.values()}) > 1, "answers differ between recipes"


async def plainly(model: models.Model, task: Task) -> dict[str, list[str]]:
    """As a worker answers."""
    servicer, prompter, found = FusionServicer(WorkerConfig(pool_bytes=64 << 20), model), Prompter(model, 512), {}
    params = SamplingParams(max_tokens=LENGTH)

    async def one(recipe: Recipe, sample: Sample) -> str:
        prompt, _ = prompter.prompt(sample, task.chat, LENGTH)
        asking = servicer.answerer.answer(prompt, recipe, 0.0 if recipe.fixed else 0.1, params)
        ids = [event.token async for event in asking if isinstance(event, Piece)]
        return model.tokenizer.decode([i for i in ids if i not in model.ends])

    try:
        for name in NAMES:
            found[name] = [await one(modifiers.find(name), sample) for sample in task.samples]
    finally:
        await servicer.close()
    return found


@pytest.mark.slow
def test_a_sample_gives_the_same_timed_and_among_others(model: models.Model, task: Task) -> None:
    library = dataclasses.replace(task, library=Library(tasks.reference("chain2", COUNT + 2).samples))
    asked = [*cells(("full_attention", 1.0), *((name, 0.1) for name in (*NAMES[1:], "fusionrag"))), NO_CONTEXT]
    alone, together = measure(model, library, asked), measure(model, library, asked, timed=False)
    for cell in asked:
        assert alone[cell].values.keys() == together[cell].values.keys()
        for name, values in alone[cell].values.items():
            np.testing.assert_allclose(together[cell].values[name], values, atol=3e-4, rtol=3e-4, err_msg=name)


def test_the_question_alone_is_a_row_of_its_own(model: models.Model, task: Task) -> None:
    asked = [*cells(("full_attention", 1.0)), NO_CONTEXT]
    full, bare = measure(model, task, asked).values()
    assert set(bare.values) == {"gold_nll", "f1", "exact_match"}
    assert sum(bare.values["gold_nll"]) > sum(full.values["gold_nll"]), "the answers stand in the passages"
    # Its question is the same whatever the passages.
    first = dataclasses.replace(task, samples=tuple(dataclasses.replace(s, passages=("x",)) for s in task.samples))
    again = measure(model, first, asked)[NO_CONTEXT]
    np.testing.assert_allclose(again.values["gold_nll"], bare.values["gold_nll"], rtol=1e-4)


def test_neighbours_come_from_the_whole_file_and_only_those_needed_are_encoded(
    model: models.Model, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tasks.reference("chain2", COUNT + 8).samples[COUNT:]
    small = dataclasses.replace(task, samples=task.samples[:1])
    asked = cells(("full_attention", 1.0), ("full_reuse+similarity_guided(2)", 0.0))
    encoded: list[object] = []
    start = loading.Loader._start

    def counted(self: loading.Loader, part: loading.LoadedChunk, *rest: object) -> None:
        encoded.append(part.wanted.chunk.digest)
        start(self, part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loading.Loader, "_start", counted)
    found = {}
    for name, more in (("own", ()), ("file", others)):
        encoded.clear()
        wide = dataclasses.replace(small, library=Library((*small.samples, *more)))
        found[name] = measure(model, wide, asked)[asked[1]].values
        pages = len(small.samples[0].passages)
        # System prompt, the chunks as one, each alone, all but the first behind two neighbours, and those neighbours.
        assert len(set(encoded)) - 2 - pages <= (2 * (pages - 1) if more else 0)
        assert len(encoded) <= 2 + pages + (pages - 1) * (3 if more else 1)
    assert found["own"]["answer_kl"] != found["file"]["answer_kl"]
    assert found["file"]["encoded_tokens"] == [2.0 * found["file"]["stored"][0]]
    assert found["file"]["encoded_tokens_per_chunk"] == [found["file"]["encoded_tokens"][0] / pages]


def test_the_expected_answer_goes_on_where_the_prompt_ends(model: models.Model) -> None:
    talks = dataclasses.replace(model, template=dataclasses.replace(model.template, head="", tail="\nAnswer:\n"))
    sample = Sample("", ("p",), "Question: q\nAnswer:", ("Ada",))
    opened = dataclasses.replace(sample, opening="It is")
    for one, chat, made, text in (
        *((model, chat, sample, " Ada") for chat in (False, True)),
        *((talks, False, sample, " Ada"), (talks, True, sample, "Ada"), (talks, True, opened, " Ada")),
        (model, False, dataclasses.replace(sample, answers=(" Ada",)), " Ada"),
    ):
        prompter = Prompter(one, 512)
        assert prompter.expected(made, chat) == prompter.ids(text)
