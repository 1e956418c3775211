"""Link tokens behind reused chunks (KVLink), and decoding over what SnapKV keeps, against plain transformers."""

from typing import Any

import pytest
import torch

from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument
from tests.fusion_worker.linked import links
from tests.fusion_worker.oracle import CLOSE, Parts, error, oracle, overlay, whole


def woven(chunks: list[list[int]], each: int) -> tuple[list[int], list[int]]:
    """Ids of the chunks with their links behind them, and the number of each token's chunk; -1 of a link."""
    ids, block = [], []
    for number, (chunk, behind) in enumerate(zip(chunks, links(chunks, each), strict=True)):
        ids += [*chunk, *behind]
        block += [number] * len(chunk) + [-1] * each
    return ids, block


@pytest.mark.parametrize("each", [1, 5])
async def test_links_see_all_before_them(varied: str, each: int, special: Any, parts: Parts) -> None:
    system, chunks, question = parts
    rig, plain = await special(varied), oracle(varied)
    context = plain.linked(system, chunks, links(chunks, each))
    more = {"max_tokens": 3, "expected": lambda said: plain.after(context, [*question, *said])}
    answer = await rig.ask(*parts, recipe=f"kvlink+linked({each})", **more)
    assert answer.summary.tokens_recomputed == 0
    assert error(plain.full_reuse(parts), answer.logits[0]) > 100 * CLOSE, "links change nothing"


@pytest.mark.parametrize("recipe", ["prophetkv", "epic", "cacheblend", "a3"])
async def test_a_third_recomputed_beside_links(recipe: str, special: Any, parts: Parts) -> None:
    """Tokens are chosen as without links; what is recomputed sees the links before it."""
    system, chunks, question = parts
    rig, plain = await special("llama"), oracle("llama")
    chosen = plain.chosen(recipe, *parts, 0.3)
    ids, block = woven(chunks, 2)
    fresh = torch.ones(len(system) + len(ids), dtype=torch.bool)
    fresh[len(system) :][torch.tensor(block) >= 0] = chosen[len(system) :]
    fresh[: len(system)] = False
    stale = plain.linked(system, chunks, links(chunks, 2))

    def expected(said: list[int]) -> torch.Tensor:
        return plain.overlaid([*system, *ids, *question, *said], stale, fresh)

    answer = await rig.ask(*parts, recipe=f"{recipe}+linked(2)", ratio=0.3, max_tokens=3, expected=expected)
    assert answer.summary.tokens_recomputed == chosen.sum()


async def test_context_kept_beside_links(special: Any, parts: Parts) -> None:
    system, chunks, question = parts
    plain = oracle("llama")
    expected = plain.evicted(plain.linked(system, chunks, links(chunks, 2)), question, len(system), 12)
    await (await special("llama")).ask(*parts, recipe="kvlink+linked(2)+snapkv(12)", max_tokens=4, expected=expected)


async def test_no_links_where_nothing_is_stale(special: Any, parts: Parts) -> None:
    """With everything recomputed, and for a chunk right behind the system prompt, it is full attention."""
    system, chunks, question = parts
    rig, plain = await special("llama"), oracle("llama")
    for asked, recipe, more in ((chunks, "prophetkv+linked(5)", {"ratio": 1.0}), (chunks[:1], "kvlink", {})):
        expected = plain.full_attention((system, asked, question))
        await rig.ask(system, asked, question, recipe=recipe, **more, expected=expected)


async def test_zero_links_are_full_reuse_on_any_model(start: Any, parts: Parts) -> None:
    rig = await start("llama")
    none, reuse = [await rig.ask(*parts, recipe=r) for r in ("kvlink+linked(0)", "full_reuse")]
    assert error(none.logits[0], reuse.logits[0]) == 0


async def test_what_a_model_has_no_links_for_is_refused(start: Any, special: Any, parts: Parts) -> None:
    with pytest.raises(FailedPrecondition, match="llama has 0 link tokens for a chunk; kvlink takes 5: it was not"):
        await (await start("llama")).ask(*parts, recipe="kvlink")
    rig = await special("llama", max_tokens=110)
    with pytest.raises(FailedPrecondition, match=r"has 5 .* kvlink\+linked\(6\) takes 6: use \+linked\(5\)"):
        await rig.ask(*parts, recipe="kvlink+linked(6)")
    with pytest.raises(FailedPrecondition, match="link tokens for 8 chunks; kvlink is asked to link 9"):
        await rig.ask([], [[n] for n in range(9)], [1], recipe="kvlink")
    with pytest.raises(InvalidArgument, match=r"has 91 tokens .* and 20 more .*, 1 more than .* maximum of 110 in"):
        await rig.ask(*parts, recipe="kvlink", max_tokens=20)
    assert (await rig.ask(*parts, recipe="full_reuse", max_tokens=20)).ids


FULL = ("llama", "llama-yarn", "qwen2", "qwen3", "glm4", "deepseek-v2-yarn")


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize(("recipe", "ratio"), [("full_reuse", 0.0), ("prophetkv", 0.3), ("prophetkv", 1.0)])
async def test_kept_by_layer_and_head(name: str, recipe: str, ratio: float, start: Any, parts: Any) -> None:
    system, chunks, question = parts
    rig, plain = await start(name), oracle(name)
    stale, fresh = plain.reused(system, chunks), plain.chosen("prophetkv", *parts, ratio)
    context = plain.kv(whole((system, chunks, [])), past=overlay(stale, fresh))
    expected = plain.evicted(context, question, len(system), 12)
    answer = await rig.ask(*parts, recipe=f"{recipe}+snapkv(12)", ratio=ratio, max_tokens=6, expected=expected)
    everything = plain.after(context, [*question, *answer.ids[:1]])
    assert error(everything, answer.logits[1]) > 100 * CLOSE, "all was kept"


async def test_a_context_that_fits_is_left_alone(start: Any, parts: Any) -> None:
    rig = await start("llama")
    plain = await rig.ask(*parts, recipe="full_reuse", max_tokens=4)
    kept = await rig.ask(*parts, recipe="full_reuse+snapkv(55)", max_tokens=4)
    assert sum(map(len, parts[1])) == 55
    assert kept.ids == plain.ids
    assert all(error(a, b) == 0 for a, b in zip(kept.logits, plain.logits, strict=True))


async def test_chunks_are_let_go_before_the_answer_ends(start: Any, parts: Any) -> None:
    rig = await start("llama")
    await rig.ask(*parts, recipe="full_reuse")
    idle, tokens = rig.pool.chunks.idle, 0
    request = rig.request(*parts, recipe="full_reuse+snapkv(8)", max_tokens=5)
    async for response in rig.servicer.Generate(request, None):
        tokens += response.HasField("token")
        if tokens == 1:
            assert rig.pool.chunks.idle == 0
        elif tokens == 3:
            # All but the system prompt, which is still read.
            assert rig.pool.chunks.idle == idle - rig.pool.free.needed(len(parts[0]))
    assert tokens == 5


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window", "qwen2-mixed"])
async def test_a_model_with_a_window_is_refused(name: str, start: Any, parts: Any) -> None:
    rig = await start(name)
    with pytest.raises(FailedPrecondition, match=r"sees a window of its context; full_reuse\+snapkv would"):
        await rig.ask(*parts, recipe="full_reuse+snapkv")
    assert (await rig.ask(*parts, recipe="full_reuse")).ids
