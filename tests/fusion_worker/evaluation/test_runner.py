"""Cells against an independent forward pass, and against each other where they must agree."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from fusionkv.bench.quality import metrics
from fusionkv.bench.quality.data import tasks
from fusionkv.bench.quality.report.cells import Measured
from fusionkv.fusion_worker import models
from fusionkv.models import evaluate
from fusionkv.models.tasks import Sample as Story
from fusionkv.protos.runtime.errors import FailedPrecondition, ResourceExhausted
from tests.fusion_worker.evaluation.measuring import cells, measure

TASK, COUNT = "chain2", 6


def same(a: Measured, b: Measured, samples: Sequence[int], others: Sequence[int]) -> None:
    assert a.values.keys() == b.values.keys()
    for name in a.values:
        found, wanted = np.array(a.values[name]), np.array(b.values[name])
        np.testing.assert_allclose(found[samples], wanted[others], atol=2e-4, rtol=2e-4, err_msg=name)


@pytest.fixture(scope="module")
def oracle(reference_model: Path) -> dict[str, np.ndarray]:
    """By models/evaluate.py, which shares no code with the engine: exact, KL and KV deviation of full reuse."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reference_model)
    network = Qwen2ForCausalLM.from_pretrained(reference_model, dtype=torch.float32).eval()
    stories = [Story(made.pages, (question,)) for made, question in tasks.asked(TASK, COUNT)]
    p = evaluate.lay_out(stories, tokenizer)
    place = torch.arange(p.ids.shape[1]).expand_as(p.ids)
    with torch.inference_mode():
        full, states = evaluate.forward(network, p.ids, place, p.visible)
        _, alone = evaluate.forward(network, p.ids, p.alone, p.visible_alone)
        reuse, _ = evaluate.forward(network, p.ids, place, p.visible, p.chunk <= 0, alone)
    first = (p.answer != -100).int().argmax(1)
    rows = range(COUNT)
    inside = (p.chunk > 0)[:, None, :, None]
    pairs = [(torch.cat(s, 1) * inside, torch.cat(a, 1) * inside) for s, a in zip(states, alone, strict=True)]
    return {
        "exact": evaluate.exact(full, p.answer).numpy(),
        "exact_reuse": evaluate.exact(reuse, p.answer).numpy(),
        "kl": np.array([metrics.kl(full[i, first[i]].numpy(), reuse[i, first[i]].numpy()) for i in rows]),
        "deviation": np.array(
            [((s - a).flatten(1).norm(dim=1) / s.flatten(1).norm(dim=1)).numpy() for s, a in pairs]
        ),
    }


def test_full_attention_and_full_reuse_are_the_oracles(model: models.Model, oracle: dict[str, np.ndarray]) -> None:
    found = measure(model, tasks.reference(TASK, COUNT), cells(("full_attention", 1.0), ("full_reuse", 0.0)))
    full, reuse = found.values()
    assert full.values["exact_match"] == oracle["exact"].tolist()
    assert full.values["kl"] == [0.0] * COUNT
    assert reuse.values["exact_match"] == oracle["exact_reuse"].tolist()
    np.testing.assert_allclose(reuse.values["kl"], oracle["kl"], atol=1e-3, rtol=1e-3)
    assert min(oracle["kl"]) > 0.01, "samples on which reuse changes nothing test nothing"
    for layer, expected in enumerate(oracle["deviation"]):
        np.testing.assert_allclose(reuse.values[f"kv_deviation_layer_{layer}"], expected, atol=1e-4, rtol=1e-3)
    assert len(full.seconds["prefill"]) == 1


def test_everything_recomputed_is_full_attention_however_it_was_encoded(model: models.Model) -> None:
    asked = cells(("full_attention", 1.0), ("fusionrag", 1.0), ("cacheblend", 1.0), ("fusionrag", 0.0))
    full, guided, blended, stale = measure(model, tasks.reference(TASK, 5), asked).values()
    for everything in (guided, blended):
        assert max(everything.values["kl"]) < 1e-4
        assert everything.values["exact_match"] == full.values["exact_match"]
        # The first chunk stands where it was encoded: it is lossless, and nothing is recomputed of it.
        assert 0 < everything.values["recomputed"][0] < full.values["recomputed"][0]
    assert max(stale.values["kl"]) > 0.01
    assert max(stale.values["kv_deviation_layer_0"]) < 1e-5 < min(stale.values["kv_deviation_layer_2"])


@pytest.mark.slow
def test_a_sample_gives_the_same_alone_and_among_others(model: models.Model) -> None:
    names = ("epic", "cacheblend", "a3", "fusionrag", "prophetkv", "prophetkv+window(8,5)", "a3+snapkv(100)")
    asked = [*cells(*((name, r) for name in names for r in (0.1, 0.3))), *cells(("ape", 0.0))]
    task = tasks.reference(TASK, 4)
    a, b, c, d = task.samples
    forth = measure(model, task, asked, picture=True)
    back = measure(model, dataclasses.replace(task, samples=(d, c, b, a)), asked)
    for cell in asked:
        same(forth[cell], back[cell], [0, 1, 2, 3], [3, 2, 1, 0])
        assert back[cell].picture is None
        picture = forth[cell].picture
        assert picture is not None
        assert sum(len(chunk["chosen"]) for chunk in picture["chunks"]) == forth[cell].values["recomputed"][0]
        pages = ["".join(chunk["tokens"]) for chunk in picture["chunks"]]
        assert tuple(pages) == a.passages
        if cell.recipe.name == "prophetkv":
            chosen = [(c["scores"][i], i in c["chosen"]) for c in picture["chunks"] for i in range(len(c["scores"]))]
            assert min(s for s, on in chosen if on) >= max(s for s, on in chosen if not on) - 0.01
    few, many = (forth[cell].values for cell in cells(("prophetkv", 0.1), ("prophetkv", 0.3)))
    assert [m > f for m, f in zip(many["recomputed"], few["recomputed"], strict=True)] == [True] * 4


@pytest.mark.slow
def test_generated_answers_are_those_that_feeding_in_predicts(model: models.Model) -> None:
    asked = cells(("full_attention", 1.0), ("full_reuse", 0.0), ("fusionrag", 0.2), ("prophetkv+adaptive(20)", 0.1))
    fed = tasks.reference(TASK, COUNT)
    generated = dataclasses.replace(fed, metrics=("exact_match", "f1"), max_tokens=6)
    expected, found = measure(model, fed, asked), measure(model, generated, asked)
    for cell in asked:
        assert found[cell].values["exact_match"] == expected[cell].values["exact_match"]
        assert found[cell].values["agreement"] == expected[cell].values["agreement"]
        for metric in ("recomputed", "scored_rows"):
            values = zip(found[cell].values[metric], expected[cell].values[metric], strict=True)
            right = zip(expected[cell].values["exact_match"], values, strict=True)
            assert all(a == b for exact, (a, b) in right if exact)
        assert all(f >= e for f, e in zip(found[cell].values["f1"], found[cell].values["exact_match"], strict=True))
    assert (
        0 < sum(found[asked[2]].values["exact_match"]) < COUNT or sum(found[asked[1]].values["exact_match"]) < COUNT
    )


def test_link_tokens_are_counted_as_computed(model: models.Model) -> None:
    """Any tokens serve as link tokens here: the model was not trained with some."""
    linked = dataclasses.replace(model, links=(tuple(range(300, 305)),) * 8)
    task = tasks.reference(TASK, 4)
    asked = cells(("full_reuse", 0.0), ("kvlink", 0.0), ("kvlink+linked(0)", 0.0), ("a3", 0.1), ("a3+linked(2)", 0.1))
    reuse, five, none, some, both = measure(linked, task, asked).values()
    assert five.values["recomputed"] == [5 * 8] * 4
    same(none, reuse, range(4), range(4))
    assert min(abs(a - b) for a, b in zip(five.values["kl"], reuse.values["kl"], strict=True)) > 1e-3
    assert both.values["recomputed"] == [count + 2 * 8 for count in some.values["recomputed"]]
    with pytest.raises(FailedPrecondition, match="link tokens for 7 chunks; kvlink is asked to link 8"):
        measure(dataclasses.replace(linked, links=linked.links[:7]), task, asked)


@pytest.mark.slow
def test_chunks_as_anchor_tokens(model: models.Model) -> None:
    """Any tokens serve: fewer are stored, no page is recomputed, and the first sample, which ran alone, agrees."""
    links = (tuple(range(300, 305)),) * 8
    compressed = dataclasses.replace(
        model, anchors={50: tuple(range(310, 318)), 75: tuple(range(310, 314))}, links=links
    )
    task = tasks.reference(TASK, 4)
    asked = cells(("full_reuse", 0.0), *((f"kvlink+linked(0)+anchored({percent})", 0.0) for percent in (50, 75)))
    asked += cells(("kvlink+anchored(75)", 0.0))
    reuse, half, quarter, linked = measure(compressed, task, asked).values()
    for whole, few, fewer in zip(*(m.values["stored"] for m in (reuse, half, quarter)), strict=True):
        assert 0.5 * whole <= few <= 0.5 * whole + 8
        assert 0.25 * whole <= fewer <= 0.25 * whole + 8
    assert linked.values["stored"] == quarter.values["stored"]
    assert (half.values["recomputed"], linked.values["recomputed"]) == ([0] * 4, [5 * 8] * 4)
    assert min(abs(a - b) for a, b in zip(half.values["kl"], quarter.values["kl"], strict=True)) > 1e-3
    assert not [name for name in half.values if name.startswith("kv_deviation")]
    turned = dataclasses.replace(task, samples=task.samples[::-1])
    for measured, again in zip(
        (reuse, half, quarter, linked), measure(compressed, turned, asked).values(), strict=True
    ):
        for name in ("exact_match", "kl", "stored"):
            np.testing.assert_allclose(again.values[name][::-1], measured.values[name], atol=2e-4, rtol=2e-4)


def test_a_second_model_chooses(model: models.Model, reference_model: Path) -> None:
    """Here the model is its own second one."""
    task, asked = tasks.reference(TASK, 4), cells(("full_reuse", 0.0), ("cacheclip", 0.3))
    with pytest.raises(FailedPrecondition, match="--auxiliary"):
        measure(model, task, asked)
    reuse, clip = measure(model, task, asked, auxiliary=models.load(reference_model)).values()
    changed = [c != r for c, r in zip(clip.values["kl"], reuse.values["kl"], strict=True)]
    assert changed == [count > 0 for count in clip.values["recomputed"]]
    assert any(changed)


def test_what_does_not_fit_the_pool_says_what_would(model: models.Model) -> None:
    with pytest.raises(
        ResourceExhausted, match=r"chain2: 4 samples need \d+ tokens of KV .* raise pool_bytes to \d+"
    ):
        measure(model, tasks.reference(TASK, 4), cells(("full_reuse", 0.0)), pool_bytes=4 << 20)
