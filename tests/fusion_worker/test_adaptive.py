"""Which tokens are chosen: the contract of selectors, and a little first, then more when a token is in doubt."""

import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import threading
import typing
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker import select
from fusionkv.fusion_worker.decode.sampling import Sampler
from fusionkv.fusion_worker.recipes import RECIPES
from fusionkv.fusion_worker.select.base import CachedAttention, Need, Selector
from tests.fusion_worker.oracle import CLOSE, error, oracle, random_ids, whole

LENGTHS = (13, 40, 25)
RATIO, FIRST = 0.5, 40


@pytest.mark.parametrize("recipe", ["prophetkv", "cacheblend", "prophetkv+snapkv(16)"])
@pytest.mark.parametrize("doubt", [False, True])
async def test_the_ratio_follows_the_first_token(recipe: str, doubt: bool, start: Any, parts: Any) -> None:
    rig = await start("qwen3")
    # 260 tokens: the likeliest one always has more than 1 per mille, and 999 it has never in a random model.
    adaptive = f"{recipe}+adaptive({FIRST},{999 if doubt else 1})"
    found = await rig.ask(*parts, recipe=adaptive, ratio=RATIO, max_tokens=3)
    plain = await rig.ask(*parts, recipe=recipe, ratio=RATIO * (1 if doubt else FIRST / 100), max_tokens=3)
    assert found.ids == plain.ids
    assert found.summary.tokens_recomputed == plain.summary.tokens_recomputed > 0
    for one, other in zip(found.logits, plain.logits, strict=True):
        assert error(one, other) < CLOSE


async def test_tokens_are_drawn_beside_the_event_loop(
    start: Any, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, draw = set(), Sampler.draw
    monkeypatch.setattr(Sampler, "draw", lambda *given: used.add(threading.current_thread()) or draw(*given))
    await (await start("llama")).ask(*parts, recipe="prophetkv+adaptive", ratio=RATIO, max_tokens=3)
    assert used
    assert threading.current_thread() not in used


async def test_doubt_within_an_answer(start: Any, parts: Any) -> None:
    """What is said is left as it is; from the token in doubt on it is the larger ratio's."""
    rig, plain, stale = await start("llama"), oracle("llama"), oracle("llama").reused(*parts[:2])
    for seed in range(20):  # a question whose first token is the surest
        asked = *parts[:2], random_ids(6, seed)
        low = await rig.ask(*asked, recipe="prophetkv", ratio=RATIO * FIRST / 100, max_tokens=6)
        sure = [int(1000 * float(logits.softmax(-1).max())) for logits in low.logits]
        if min(sure) < sure[0]:
            break
    at = next(i for i, s in enumerate(sure) if s < sure[0])
    fuser, chosen = rig.servicer.answerer._planner, []
    make = fuser._plan

    def watch(*args: Any) -> Any:
        chosen.append(make(*args).chosen)
        return make(*args)

    def expected(said: list[int]) -> torch.Tensor:
        fresh = torch.zeros(len(whole(asked)) - len(asked[2]), dtype=torch.bool)
        fresh[chosen[len(said) >= at]] = True
        return plain.overlaid([*whole(asked), *said], stale, fresh)

    fuser._plan = watch
    recipe = f"prophetkv+adaptive({FIRST},{sure[0]})"
    found = await rig.ask(*asked, recipe=recipe, ratio=RATIO, max_tokens=6, expected=expected)
    assert found.ids[:at] == low.ids[:at]
    few, many = (len(c) for c in chosen)
    assert found.summary.tokens_recomputed == many > few > 0


async def test_sampling_draws_from_the_same_logits(start: Any, parts: Any) -> None:
    rig = await start("llama")
    more = {"temperature": 1.0, "seed": 7, "max_tokens": 4}
    found = await rig.ask(*parts, recipe=f"prophetkv+adaptive({FIRST},1)", ratio=RATIO, **more)
    plain = await rig.ask(*parts, recipe="prophetkv", ratio=RATIO * FIRST / 100, **more)
    assert found.ids == plain.ids


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_no_choice_is_no_trial(ratio: float, start: Any, parts: Any) -> None:
    rig = await start("llama")
    answer = await rig.ask(*parts, recipe="prophetkv+adaptive", ratio=ratio)
    # The first chunk stands where it was encoded.
    assert answer.summary.tokens_recomputed == ratio * sum(map(len, parts[1][1:]))


SELECTORS = [recipe.select for recipe in RECIPES.values() if recipe.select is not None]


def test_every_file_is_a_row_of_the_table() -> None:
    files = [
        importlib.import_module(f"{select.__name__}.{file.name}") for file in pkgutil.iter_modules(select.__path__)
    ]
    kinds = {kind for file in files for kind in vars(file).values() if isinstance(kind, type)}
    made = {kind for kind in kinds if issubclass(kind, Selector) and not inspect.isabstract(kind)}
    assert made == {type(selector) for selector in SELECTORS}


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_another_rank_makes_the_same_one(selector: Selector[typing.Any]) -> None:
    assert pickle.loads(pickle.dumps(selector)) == selector
    assert hash(selector) == hash(dataclasses.replace(selector))  # type: ignore[type-var]
    assert isinstance(selector.needs, Need)


def test_layers_are_counted_from_either_end() -> None:
    assert CachedAttention().of(3) == {0, 1, 2}
    assert CachedAttention(first=1.0).of(5) == {4}
    assert [CachedAttention(0.25, 0.75).of(layers) for layers in (8, 1)] == [{2, 3, 4, 5}, {0}]
