"""Link tokens behind reused chunks (KVLink), against plain transformers."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument
from tests.fusion_worker.oracle import error, oracle

CLOSE = 1e-4
CHUNKS, EACH = 6, 5
# Any tokens serve: what makes one a link token is where it stands and what sees it.
LINKS = tuple(tuple(range(200 + EACH * i, 200 + EACH * (i + 1))) for i in range(CHUNKS))
Parts = tuple[list[int], list[list[int]], list[int]]


@pytest.fixture
def linked(start: Any) -> Any:
    """Starts a worker whose model has link tokens."""
    return lambda family, **more: start(family, replace=lambda m: dataclasses.replace(m, links=LINKS), **more)


def woven(chunks: list[list[int]], each: int) -> tuple[list[int], list[int]]:
    """Ids of the chunks with their links behind them, and the number of each token's chunk; -1 of a link."""
    ids, block = [], []
    for number, chunk in enumerate(chunks):
        ids += [*chunk, *LINKS[number][:each]]
        block += [number] * len(chunk) + [-1] * each
    return ids, block


@pytest.mark.parametrize("each", [1, 5])
async def test_links_see_all_before_them(family: str, each: int, linked: Any, parts: Parts) -> None:
    system, chunks, question = parts
    rig, plain = await linked(family), oracle(family)
    context = plain.linked(system, chunks, [LINKS[i][:each] for i in range(len(chunks))])
    answer = await rig.ask(*parts, recipe=f"kvlink+linked({each})", max_tokens=3)
    assert answer.summary.tokens_recomputed == 0
    for at, logits in enumerate(answer.logits):
        assert error(logits, plain.after(context, [*question, *answer.ids[:at]])) < CLOSE
    without = plain.after(plain.reused(system, chunks), question)
    assert error(without, answer.logits[0]) > 100 * CLOSE, "links change nothing, so this test shows nothing"


@pytest.mark.parametrize("each", [1, 5])
async def test_one_pass_under_a_mask_of_blocks(family: str, each: int, linked: Any, parts: Parts) -> None:
    """As in training: without a system prompt, distances within a chunk are what they were when it was encoded."""
    _, chunks, question = parts
    rig, plain = await linked(family), oracle(family)
    ids, block = woven(chunks, each)
    expected = plain.blocks([*block, *[-1] * len(question)]).logits([*ids, *question], use_cache=False)
    recipe = "kvlink" if each == 5 else "full_reuse+linked(1)"
    answer = await rig.ask([], chunks, question, recipe=recipe)
    assert error(answer.logits[0], expected) < CLOSE


@pytest.mark.parametrize("recipe", ["prophetkv", "epic", "cacheblend", "a3"])
async def test_a_third_recomputed_beside_links(recipe: str, linked: Any, parts: Parts) -> None:
    """Tokens are chosen as without links; what is recomputed sees the links before it."""
    system, chunks, question = parts
    rig, plain, each = await linked("llama"), oracle("llama"), 2
    chosen = plain.chosen(recipe, *parts, 0.3)
    ids, block = woven(chunks, each)
    fresh = torch.ones(len(system) + len(ids), dtype=torch.bool)
    fresh[len(system) :][torch.tensor(block) >= 0] = chosen[len(system) :]
    fresh[: len(system)] = False
    stale = plain.linked(system, chunks, [LINKS[i][:each] for i in range(len(chunks))])
    answer = await rig.ask(*parts, recipe=f"{recipe}+linked({each})", ratio=0.3, max_tokens=3)
    assert answer.summary.tokens_recomputed == chosen.sum()
    for at, logits in enumerate(answer.logits):
        assert error(logits, plain.overlaid([*system, *ids, *question, *answer.ids[:at]], stale, fresh)) < CLOSE


async def test_context_kept_beside_links(linked: Any, parts: Parts) -> None:
    system, chunks, question = parts
    rig, plain = await linked("llama"), oracle("llama")
    answer = await rig.ask(*parts, recipe="kvlink+linked(2)+snapkv(12)", max_tokens=4)
    context = plain.linked(system, chunks, [LINKS[i][:2] for i in range(len(chunks))])
    shrunk, whole = plain.seeing(plain.kept(context, question, len(system), 12)), plain.kv(question, past=context)
    for at in range(1, len(answer.logits)):
        assert error(answer.logits[at], shrunk.after(whole, answer.ids[:at])) < CLOSE
    await rig.settled()


async def test_no_links_where_nothing_is_stale(linked: Any, parts: Parts) -> None:
    """With everything recomputed, and for a chunk right behind the system prompt, it is full attention."""
    system, chunks, question = parts
    rig, plain = await linked("llama"), oracle("llama")
    for asked, recipe, more in ((chunks, "prophetkv+linked(5)", {"ratio": 1.0}), (chunks[:1], "kvlink", {})):
        answer = await rig.ask(system, asked, question, recipe=recipe, **more)
        expected = plain.logits([*system, *itertools.chain(*asked), *question])
        assert error(answer.logits[0], expected) < CLOSE, recipe


async def test_zero_links_are_full_reuse_on_any_model(start: Any, parts: Parts) -> None:
    rig = await start("llama")
    none, reuse = [await rig.ask(*parts, recipe=r) for r in ("kvlink+linked(0)", "full_reuse")]
    assert error(none.logits[0], reuse.logits[0]) == 0


async def test_what_a_model_has_no_links_for_is_refused(start: Any, linked: Any, parts: Parts) -> None:
    system, chunks, question = parts
    with pytest.raises(FailedPrecondition, match="llama has 0 link tokens for a chunk; kvlink takes 5: it was not"):
        await (await start("llama")).ask(*parts, recipe="kvlink")
    rig = await linked("llama", max_tokens=110)
    with pytest.raises(FailedPrecondition, match=r"has 5 .* kvlink\+linked\(6\) takes 6: use \+linked\(5\)"):
        await rig.ask(*parts, recipe="kvlink+linked(6)")
    with pytest.raises(FailedPrecondition, match="link tokens for 6 chunks; kvlink is asked to link 7"):
        await rig.ask(system, [*chunks, [1], [2]], question, recipe="kvlink")
    with pytest.raises(InvalidArgument, match="a prompt of 91 tokens and an answer of 20 exceed"):
        await rig.ask(*parts, recipe="kvlink", max_tokens=20)
    assert (await rig.ask(*parts, recipe="full_reuse", max_tokens=20)).ids
