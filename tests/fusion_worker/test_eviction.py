"""Decoding over what SnapKV keeps of a context, against an untouched model that sees no more than that."""

from typing import Any

import pytest

from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker.oracle import error, oracle, overlay

CLOSE = 1e-4
FULL = ("llama", "llama-yarn", "qwen2", "qwen3", "glm4")


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize(
    ("recipe", "ratio"), [("full_reuse", 0.0), ("prophetkv", 0.3), ("prophetkv", 1.0), ("a3", 1.0)]
)
async def test_kept_by_layer_and_head(name: str, recipe: str, ratio: float, start: Any, parts: Any) -> None:
    system, chunks, question = parts
    rig, plain = await start(name), oracle(name)
    before, low, stale = [*system, *(i for c in chunks for i in c)], len(system), plain.reused(system, chunks)
    context = plain.kv(before, past=overlay(stale, plain.chosen("prophetkv", *parts, ratio)))
    answer = await rig.ask(*parts, recipe=f"{recipe}+snapkv(12)", ratio=ratio, max_tokens=6)
    assert error(answer.logits[0], plain.after(context, question)) < CLOSE, "the first token sees all"
    shrunk = plain.seeing(plain.kept(context, question, low, 12))
    whole = plain.kv(question, past=context)
    for at in range(1, len(answer.logits)):
        expected = shrunk.after(whole, answer.ids[:at])
        assert error(answer.logits[at], expected) < CLOSE
    assert error(plain.after(whole, answer.ids[:1]), answer.logits[1]) > 100 * CLOSE, "all was kept"
    await rig.settled()


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
    idle = rig.pool.idle
    tokens = 0
    request = rig.request(*parts, recipe="full_reuse+snapkv(8)", max_tokens=5)
    async for response in rig.servicer.Generate(request, None):
        tokens += response.HasField("token")
        if tokens == 1:
            assert rig.pool.idle == 0
        elif tokens == 3:
            # All but the system prompt, which is still read.
            assert rig.pool.idle == idle - rig.pool.slots_for(len(parts[0]))
    assert tokens == 5
    await rig.settled()


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window", "qwen2-mixed"])
async def test_a_model_with_a_window_is_refused(name: str, start: Any, parts: Any) -> None:
    rig = await start(name)
    with pytest.raises(FailedPrecondition, match=r"sees a window of its context; full_reuse\+snapkv would"):
        await rig.ask(*parts, recipe="full_reuse+snapkv")
    assert (await rig.ask(*parts, recipe="full_reuse")).ids
