"""The contract of selectors."""

import dataclasses
import pickle

import pytest
import torch

from fusionkv.fusion_worker.select import fresh_layer
from fusionkv.fusion_worker.select.base import Attended, scores
from fusionkv.protos.contract import selectors
from fusionkv.protos.contract.recipes import RECIPES
from fusionkv.protos.contract.selectors import CachedAttention, Need, QuestionAttention, Selector

SELECTORS = [recipe.select for recipe in RECIPES.values() if recipe.select is not None]


def test_every_selector_is_scored_and_in_a_row_of_the_table() -> None:
    assert fresh_layer, "registers its own"
    kinds = {kind for kind in vars(selectors).values() if isinstance(kind, type) and issubclass(kind, Selector)}
    assert kinds - {Selector} == scores.registry.keys() - {object} == {type(selector) for selector in SELECTORS}


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_another_rank_makes_the_same_one(selector: Selector) -> None:
    assert pickle.loads(pickle.dumps(selector)) == selector
    assert hash(selector) == hash(dataclasses.replace(selector))  # type: ignore[type-var]
    assert isinstance(selector.needs, Need)


def test_attention_fades_with_the_tokens_before_in_the_chunk() -> None:
    attended = Attended(torch.tensor([9.0, 1.0, 1.0, 1.0, 1.0, 1.0]), starts=(1, 5, 6))
    scored = scores(QuestionAttention(fade=0.5), attended)
    torch.testing.assert_close(scored, torch.tensor([0.0, 1.0, 2**-0.5, 3**-0.5, 0.5, 1.0]))
    assert scores(QuestionAttention(), attended) is attended.attention


def test_layers_are_counted_from_the_last_one() -> None:
    assert CachedAttention().of(3) == {0, 1, 2}
    assert CachedAttention(first=1.0).of(5) == {4}
    assert [CachedAttention(first=0.25).of(layers) for layers in (8, 1)] == [{2, 3, 4, 5, 6, 7}, {0}]
