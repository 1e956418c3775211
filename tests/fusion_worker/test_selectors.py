"""The contract of selectors."""

import dataclasses
import importlib
import inspect
import pickle
import pkgutil
from typing import Any

import pytest

from fusionkv.fusion_worker import select
from fusionkv.fusion_worker.recipes import RECIPES
from fusionkv.fusion_worker.select.base import CachedAttention, Need, Selector

SELECTORS = [recipe.select for recipe in RECIPES.values() if recipe.select is not None]


def test_every_file_is_a_row_of_the_table() -> None:
    files = [
        importlib.import_module(f"{select.__name__}.{file.name}") for file in pkgutil.iter_modules(select.__path__)
    ]
    kinds = {kind for file in files for kind in vars(file).values() if isinstance(kind, type)}
    made = {kind for kind in kinds if issubclass(kind, Selector) and not inspect.isabstract(kind)}
    assert made == {type(selector) for selector in SELECTORS}


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_another_rank_makes_the_same_one(selector: Selector[Any]) -> None:
    assert pickle.loads(pickle.dumps(selector)) == selector
    assert hash(selector) == hash(dataclasses.replace(selector))  # type: ignore[type-var]
    assert isinstance(selector.needs, Need)


def test_layers_are_counted_from_either_end() -> None:
    assert CachedAttention().of(3) == {0, 1, 2}
    assert CachedAttention(first=1.0).of(5) == {4}
    assert [CachedAttention(0.25, 0.75).of(layers) for layers in (8, 1)] == [{2, 3, 4, 5}, {0}]
