"""What the cache service holds is found, placed and counted right: exact, alternative, variant and miss."""

import asyncio
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service import keys
from tests.examples import examples
from tests.fusion_worker.oracle import CLOSE, error, join, oracle, whole, windows

pytestmark = pytest.mark.system
Text = dict[str, list[int]]


def hits(answer: Any) -> dict[tuple[str, str], int]:
    return {(h.kind, h.tier): h.chunks for h in answer.summary.hits}


async def test_the_kinds_of_hits(cached: Any, text: Text) -> None:
    plain = oracle("qwen3")
    system, question, a, b, c = (text[n] for n in "SQABC")
    first, other = await cached("qwen3"), await cached("qwen3")

    async def ask(rig: Any, *chunks: list[int]) -> Any:
        parts = system, chunks, question
        return await rig.fill(*parts, recipe="full_reuse", expected=plain.full_reuse(parts))

    answer = await ask(first, a, b)
    assert (answer.summary.chunks_missed, answer.summary.tokens_encoded, hits(answer)) == (2, len(a + b), {})
    again = await ask(first, a, b)
    assert hits(again) == {("exact", "device"): 1, ("alternative", "device"): 1}
    assert again.summary.bytes_fetched == 0

    answer = await ask(other, a, b)
    assert hits(answer) == {("exact", "memory"): 1, ("alternative", "memory"): 1}
    assert answer.summary.tokens_lossless == len(a)
    assert answer.summary.bytes_fetched == len(system + a + b) * other.model.kv.token_bytes

    answer = await ask(other, b, c, a)
    assert (answer.summary.chunks_missed, answer.summary.tokens_encoded) == (1, len(c))
    assert answer.summary.tokens_lossless == len(b), "behind the system prompt alone is where B was encoded"

    stranger = await other.ask(system, [a, b], question, tenant=other.tenant + "x")
    assert (stranger.summary.chunks_missed, stranger.summary.tokens_encoded) == (2, len(a + b))


async def test_an_exact_path_is_lossless(cached: Any, text: Text) -> None:
    """No budget is spent on it, no key is turned, and it answers as full attention does, at any ratio."""
    plain = oracle("qwen2")
    system, question, a, b, c = (text[n] for n in "SQABC")
    maker, rig = await cached("qwen2"), await cached("qwen2")
    made = await maker.encode(system, [a, b], c)
    space = keys.namespace(maker.model.fingerprint, maker.model.settings, maker.tenant)
    assert made.key == keys.entry_key(space, [keys.chunk_digest(p) for p in (system, a, b, c)])

    parts = system, [a, b, c], question
    for recipe, ratio in (("full_reuse", 0.0), ("prophetkv", 0.5), ("epic", 1.0)):
        answer = await rig.ask(*parts, recipe=recipe, ratio=ratio, expected=plain.full_attention(parts))
        assert answer.summary.tokens_lossless == answer.summary.context_tokens == len(a + b + c)
        assert answer.summary.tokens_recomputed == answer.summary.tokens_encoded == 0
        assert {kind for kind, _ in hits(answer)} == {"exact"}

    # Behind another chunk the same entries are stale, and B's was written for the place where it was.
    far = plain.kv([*system, *a, *b, *c])
    ends = list(itertools.accumulate(map(len, (system, a, b, c))))
    moved = [
        plain.moved(far, 0, ends[0], 0),
        plain.moved(far, ends[2], ends[3], ends[0] - ends[2]),
        plain.moved(far, ends[1], ends[2], ends[0] + len(c) - ends[1]),
    ]
    expected = plain.after(join(moved), question)
    answer = await rig.ask(system, [c, b], question, recipe="full_reuse", expected=expected)
    assert answer.summary.tokens_lossless == 0


@pytest.mark.parametrize("kind", ["llama", "glm4", "qwen2-mixed"])
async def test_similarity_guided_encoding(kind: str, cached: Any, text: Text) -> None:
    """A chunk after its neighbours, each reused as encoded alone; found by its variant, before the plain entry."""
    plain = oracle(kind)
    system, question, a, b, c, d = (text[n] for n in "SQABCD")
    rig, parts = await cached(kind), (system, [a, d], question)
    await rig.fill(*parts)
    orders = [a, b, c], [b, a, c], [a, b], [a, b, c, a]
    made, *others = [await rig.encode(system, before, d, "NEIGHBOURS") for before in orders]
    assert len({made.key, *(o.key for o in others)}) == len({made.variant, *(o.variant for o in others)}) == 4

    base, place = len(system + a + b + c), len(system + a)
    behind = plain.kv(d, past=plain.reused(system, [a, b, c]))
    moved = plain.moved(behind, base, base + len(d), place - base)
    guided, isolated = plain.after(join([plain.reused(system, [a]), moved]), question), plain.full_reuse(parts)
    assert error(guided, isolated) > 100 * CLOSE
    for worker in (rig, await cached(kind)):
        more = {"recipe": "fusionrag", "ratio": 0.0}
        answer = await worker.ask(*parts, variants=[[], [made.variant]], **more, expected=guided)
        assert answer.summary.tokens_lossless == len(a)
        await worker.ask(*parts, variants=[[], [bytes(32)]], **more, expected=isolated)
        await worker.ask(*parts, variants=[[], [made.variant]], ratio=1.0, expected=plain.full_attention(parts))


@pytest.mark.parametrize("mode", ["EXACT", "NEIGHBOURS"])
async def test_the_first_chunk_and_an_empty_system_prompt(mode: str, cached: Any, text: Text) -> None:
    plain = oracle("llama")
    system, question, a, b = (text[n] for n in "SQAB")
    rig, parts = await cached("llama"), ([], [a, b], question)
    await rig.encode([], [a], b, mode)
    for worker in (rig, await cached("llama")):
        answer = await worker.fill(*parts, ratio=1.0, expected=plain.full_attention(parts))
        assert answer.summary.degraded_reason == ""
    expected = plain.full_attention(parts) if mode == "EXACT" else plain.full_reuse(parts)
    await worker.ask(*parts, ratio=0.0, expected=expected)
    made = await rig.encode(system, [], a, mode)
    parts, variants = (system, [a], question), [[made.variant] if made.variant else []]
    await rig.ask(*parts, variants=variants, expected=plain.full_attention(parts))


names = st.lists(st.sampled_from("ABCDE"), max_size=5)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompt=names,
    recipe=st.sampled_from(["epic", "epic", "epic+versions(1)", "epic+versions(2)"]),
    ratio=st.sampled_from([0.0, 0.1, 0.33, 0.9, 1.0]),
    exact=names,
    store=st.sampled_from(["plain", "plain", "int8"]),
)
async def test_any_pattern_of_hits(
    prompt: list[str], recipe: str, ratio: float, exact: list[str], store: str, cached: Any, text: Text
) -> None:
    """What is there grows from example to example: prompts that ran, and paths encoded ahead of time."""
    rig = await cached("mistral-window", pool_bytes=1 << 20, store=store)
    chunks = [text[n] for n in prompt]
    parts = text["S"], chunks, text["Q"]
    if exact:
        *before, last = [text[n] for n in exact]
        await rig.encode(text["S"], before, last)
    answer = await rig.fill(*parts, recipe=recipe, ratio=ratio)
    s, context = answer.summary, sum(map(len, chunks))
    assert not s.degraded
    assert s.context_tokens == context
    assert s.tokens_recomputed == min(round(ratio * context), context - s.tokens_lossless)
    assert s.chunks_missed + sum(h.chunks for h in s.hits) == len(chunks)
    if prompt and prompt == exact and store == "plain":
        assert s.tokens_lossless == context
    if recipe == "epic" and store == "plain":
        exact_hits = sum(h.tokens for h in s.hits if h.kind == "exact")
        assert exact_hits <= s.tokens_lossless <= exact_hits + (len(chunks[0]) if chunks else 0)
    if s.tokens_reused == 0:
        assert error(answer.logits[0], oracle("mistral-window").full_attention(parts)) < CLOSE


@pytest.mark.parametrize("recipe", ["epic", "cacheblend", "prophetkv+window(4,2)"])
async def test_kinds_mixed_and_several_at_once(recipe: str, cached: Any, text: Text) -> None:
    """Exact, alternative, variant and miss in one prompt, a third recomputed, beside other requests."""
    plain = oracle("qwen3")
    system, question, a, b, c, d, e = (text[n] for n in "SQABCDE")
    maker, rig = await cached("qwen3"), await cached("qwen3")
    await maker.encode(system, [a], b)
    await maker.ask(system, [c], question)
    variant = (await maker.encode(system, [e, a], d, "NEIGHBOURS")).variant
    await maker.stored()
    chunks = [a, b, c, d, [7, 7, 7, 9]]
    parts = system, chunks, question
    ends = list(itertools.accumulate(map(len, (system, *chunks))))
    behind = plain.kv(d, past=plain.reused(system, [e, a]))
    base = len(system + e + a)
    stale = [
        plain.kv([*system, *a, *b]),
        plain.alone(system, c, ends[2]),
        plain.moved(behind, base, base + len(d), ends[3] - base),
        plain.alone(system, chunks[4], ends[4]),
    ]
    name, _, windowed = recipe.partition("+")
    scores = plain.scores(name, system, chunks, question, join(stale))
    best = sorted(range(ends[2], ends[-1]), key=lambda p: (-float(scores[p]), p))[: round(0.3 * (ends[-1] - ends[0]))]
    fresh = torch.zeros(ends[-1], dtype=torch.bool)
    fresh[best] = True
    fresh = windows(fresh, ends[2], 4, 2) if windowed else fresh
    count = int(fresh.sum())
    assert 0 < count <= len(best)
    assert (count < len(best)) == bool(windowed), "the windows keep all, so this test shows nothing"
    expected = plain.overlaid(whole(parts), join(stale), fresh)
    other = system, [d, c], question[:1]
    mixed, _, _ = await asyncio.gather(
        rig.ask(*parts, recipe=recipe, ratio=0.3, variants=[[], [], [], [variant], []], expected=expected),
        rig.ask(*other, recipe="full_reuse", tenant=rig.tenant + "y", expected=plain.full_reuse(other)),
        rig.ask(*parts, recipe="full_attention", expected=plain.full_attention(parts)),
    )
    assert hits(mixed) == {("exact", "memory"): 2, ("alternative", "memory"): 2}
    s = mixed.summary
    assert (s.recipe, s.chunks_missed, s.tokens_lossless, s.tokens_recomputed) == (recipe, 1, len(a + b), count)


async def test_a_prefix_cache(cached: Any, text: Text) -> None:
    """Full attention's answers, without computing again what follows the same path; and nothing from elsewhere."""
    plain = oracle("qwen3")
    system, question, a, b, c = (text[n] for n in "SQABC")

    async def ask(rig: Any, *chunks: list[int]) -> Any:
        parts = system, chunks, question
        more = {"max_tokens": 2, "expected": lambda said: plain.logits([*whole(parts), *said])}
        answer = await rig.ask(*parts, recipe="prefix_cache", **more)
        assert answer.summary.tokens_lossless == sum(map(len, chunks))
        assert answer.summary.tokens_recomputed == answer.summary.tokens_reused == 0
        return answer.summary.tokens_encoded

    rig, other = await cached("qwen3"), await cached("qwen3")
    assert await ask(rig, a, b, c) == len(a + b + c)
    assert await ask(rig, a, b, c) == 0
    assert await ask(rig, a, c, b) == len(b + c)
    assert await ask(rig, a, b) == 0
    assert await ask(rig, b, a) == len(a + b), "a is there, behind another chunk"
    await rig.stored()
    # Computed twice on the way or asked for twice: what is stored of it is used.
    assert await ask(other, a, b, c) <= len(b + c)
