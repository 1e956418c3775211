"""Models as they are in the world, against plain transformers on real text: `make test ARGS="-m weights"`."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.library.catalog import KNOWN
from tests.fusion_worker.oracle import CLOSE, Oracle, error, whole

pytestmark = pytest.mark.weights
# Together more than the sliding window of Gemma 3 (512), and so is one of them alone.
_LENGTHS = (150, 1, 540, 120)
_CONFIG: dict[str, Any] = {"pool_bytes": 512 << 20, "page_tokens": 16}


@pytest.fixture(scope="module", params=[name for name, model in KNOWN.items() if not model.embeds])
def loaded(request: pytest.FixtureRequest) -> tuple[models.Model, Oracle]:
    """The engine's model and an untouched one, both in float32."""
    directory = KNOWN[request.param].directory
    if not directory.is_dir():
        pytest.skip(f"{request.param} was not fetched: fusionkv model get {request.param}")
    untouched = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return models.load(directory, "cpu", "float32"), Oracle(untouched.eval())


@pytest.fixture(scope="module")
def parts(loaded: tuple[models.Model, Oracle], root: Path) -> tuple[list[int], list[list[int]], list[int]]:
    """System prompt, passages of this project's documentation, and a question."""
    model, _ = loaded

    def ids(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=False).ids

    text, chunks = ids((root / "docs/security.md").read_text()), []
    for length in _LENGTHS:
        chunks.append(text[:length])
        text = text[length:]
    assert list(map(len, chunks)) == [*_LENGTHS]
    return (
        ids(model.template.system),
        chunks,
        ids(model.template.question.format(question="Which tokens does a gateway accept?")),
    )


@pytest.fixture
async def rig(loaded: Any, start: Any) -> Any:
    return await start("llama", replace=lambda _: loaded[0], max_tokens=loaded[0].max_tokens, **_CONFIG)


async def test_all_recomputed_is_full_attention(loaded: Any, parts: Any, rig: Any) -> None:
    expected = loaded[1].full_attention(parts)
    for recipe in ("full_attention", "prophetkv", "a3"):
        await rig.ask(*parts, recipe=recipe, ratio=1.0, expected=expected)


async def test_nothing_recomputed_is_full_reuse(loaded: Any, parts: Any, rig: Any) -> None:
    expected = loaded[1].full_reuse(parts)
    await rig.ask(*parts, recipe="full_reuse", expected=expected)
    assert error(loaded[1].full_attention(parts), expected) > 10 * CLOSE, "reuse changes nothing here"


@pytest.mark.parametrize("recipe", ["epic", "prophetkv", "a3"])
async def test_a_third_recomputed(recipe: str, loaded: Any, parts: Any, rig: Any) -> None:
    _, plain = loaded
    context = plain.reused(*parts[:2])
    fresh = plain.chosen(recipe, *parts, 0.3, kv=copy.deepcopy(context))
    more = {"max_tokens": 3, "expected": lambda said: plain.overlaid([*whole(parts), *said], context, fresh)}
    answer = await rig.ask(*parts, recipe=recipe, ratio=0.3, **more)
    assert answer.summary.tokens_recomputed == fresh.sum()


async def test_answers_are_the_same_alone_and_beside_others(loaded: Any, parts: Any, start: Any) -> None:
    """Bit for bit, with `deterministic`: 12 prompts, 6 at a time, against one after another in another worker."""
    system, chunks, question = parts
    prompts = [[chunks[(n + i) % 4][:60] for i in range(3)] for n in range(4)]
    asked = [(prompt, recipe) for recipe in ("prophetkv", "deeplayer", "full_reuse") for prompt in prompts]
    own = {"replace": lambda _: loaded[0], "max_tokens": loaded[0].max_tokens, "deterministic": True, **_CONFIG}

    async def answer(rig: Any, prompt: list[list[int]], recipe: str) -> tuple[Any, torch.Tensor]:
        said = await rig.ask(system, prompt, question, recipe=recipe, max_tokens=24)
        return said.ids, torch.stack(list(said.logits))

    alone, beside = await start("llama", **own), await start("llama", **own)
    expected = [await answer(alone, *each) for each in asked]
    for first in (0, 6):
        found = await asyncio.gather(*(answer(beside, *each) for each in asked[first : first + 6]))
        for (ids, logits), (own_ids, own_logits) in zip(found, expected[first : first + 6], strict=True):
            assert ids == own_ids
            assert torch.equal(logits, own_logits)
