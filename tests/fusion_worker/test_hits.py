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
from tests.fusion_worker.oracle import error, join, oracle

pytestmark = pytest.mark.system
CLOSE = 1e-4


def hits(answer: Any) -> dict[tuple[str, str], int]:
    return {(h.kind, h.tier): h.chunks for h in answer.summary.hits}


async def test_the_kinds_of_hits(cache_service: str, start: Any, tenant: str, text: dict[str, list[int]]) -> None:
    plain = oracle("qwen3")
    system, question, a, b, c = (text[n] for n in "SQABC")
    first = await start("qwen3", cache=cache_service)
    answer = await first.ask(system, [a, b], question, recipe="full_reuse", tenant=tenant)
    assert answer.summary.chunks_missed == 2
    assert hits(answer) == {}
    assert answer.summary.tokens_encoded == len(a + b)
    assert error(answer.logits[0], plain.after(plain.reused(system, [a, b]), question)) < CLOSE
    await first.stored()

    again = await first.ask(system, [a, b], question, recipe="full_reuse", tenant=tenant)
    assert hits(again) == {("exact", "device"): 1, ("alternative", "device"): 1}
    assert again.summary.bytes_fetched == 0

    other = await start("qwen3", cache=cache_service)
    answer = await other.ask(system, [a, b], question, recipe="full_reuse", tenant=tenant)
    assert hits(answer) == {("exact", "memory"): 1, ("alternative", "memory"): 1}
    assert answer.summary.tokens_lossless == len(a)
    assert answer.summary.bytes_fetched == len(system + a + b) * other.model.kv.token_bytes
    assert error(answer.logits[0], plain.after(plain.reused(system, [a, b]), question)) < CLOSE

    answer = await other.ask(system, [b, c, a], question, recipe="full_reuse", tenant=tenant)
    assert answer.summary.chunks_missed == 1
    assert answer.summary.tokens_encoded == len(c)
    assert answer.summary.tokens_lossless == len(b), "behind the system prompt alone is where B was encoded"
    assert error(answer.logits[0], plain.after(plain.reused(system, [b, c, a]), question)) < CLOSE

    stranger = await other.ask(system, [a, b], question, tenant=tenant + "x")
    assert stranger.summary.chunks_missed == 2
    assert stranger.summary.tokens_encoded == len(a + b)


async def test_an_exact_path_is_lossless(
    cache_service: str, start: Any, tenant: str, text: dict[str, list[int]]
) -> None:
    """No budget is spent on it, no key is turned, and it answers as full attention does, at any ratio."""
    plain = oracle("qwen2")
    system, question, a, b, c = (text[n] for n in "SQABC")
    maker = await start("qwen2", cache=cache_service)
    made = await maker.encode(system, [a, b], c, "EXACT", tenant)
    assert not made.existed
    assert made.tokens == len(c)
    space = keys.namespace(maker.model.fingerprint, maker.model.settings, tenant)
    assert made.key == keys.entry_key(space, [keys.chunk_digest(p) for p in (system, a, b, c)])
    assert (await maker.encode(system, [a, b], c, "EXACT", tenant)).existed

    rig = await start("qwen2", cache=cache_service)
    expected = plain.logits([*system, *a, *b, *c, *question])
    for recipe, ratio in (("full_reuse", 0.0), ("prophetkv", 0.5), ("epic", 1.0)):
        answer = await rig.ask(system, [a, b, c], question, recipe=recipe, ratio=ratio, tenant=tenant)
        assert answer.summary.tokens_lossless == answer.summary.context_tokens == len(a + b + c)
        assert answer.summary.tokens_recomputed == answer.summary.tokens_encoded == 0
        assert {kind for kind, _ in hits(answer)} == {"exact"}
        assert error(answer.logits[0], expected) < CLOSE

    # Behind another chunk the same entries are stale, and B's was written for the place where it was.
    answer = await rig.ask(system, [c, b], question, recipe="full_reuse", tenant=tenant)
    assert answer.summary.tokens_lossless == 0
    far = plain.kv([*system, *a, *b, *c])
    ends = list(itertools.accumulate(map(len, (system, a, b, c))))
    moved = [
        plain.moved(far, 0, ends[0], 0),
        plain.moved(far, ends[2], ends[3], ends[0] - ends[2]),
        plain.moved(far, ends[1], ends[2], ends[0] + len(c) - ends[1]),
    ]
    assert error(answer.logits[0], plain.after(join(moved), question)) < CLOSE


@pytest.mark.parametrize("kind", ["llama", "glm4", "qwen2-mixed"])
async def test_similarity_guided_encoding(
    kind: str, cache_service: str, start: Any, tenant: str, text: dict[str, list[int]]
) -> None:
    """A chunk after its neighbours, each reused as encoded alone; found by its variant, before the plain entry."""
    plain = oracle(kind)
    system, question, a, b, c, d = (text[n] for n in "SQABCD")
    rig = await start(kind, cache=cache_service)
    await rig.fill(system, [a, d], question, tenant=tenant)
    made = await rig.encode(system, [a, b, c], d, "NEIGHBOURS", tenant)
    assert not made.existed
    assert (await rig.encode(system, [a, b, c], d, "NEIGHBOURS", tenant)) == type(made)(
        key=made.key, variant=made.variant, existed=True, tokens=len(d)
    )
    others = [await rig.encode(system, n, d, "NEIGHBOURS", tenant) for n in ([b, a, c], [a, b], [a, b, c, a])]
    assert len({made.key, *(o.key for o in others)}) == len({made.variant, *(o.variant for o in others)}) == 4

    base = len(system + a + b + c)
    behind = plain.kv(d, past=plain.reused(system, [a, b, c]))
    place = len(system + a)

    def context(own: Any) -> Any:
        return join([plain.reused(system, [a]), own])

    guided = plain.after(context(plain.moved(behind, base, base + len(d), place - base)), question)
    isolated = plain.after(context(plain.alone(system, d, place)), question)
    assert error(guided, isolated) > 100 * CLOSE
    for worker in (rig, await start(kind, cache=cache_service)):
        more = {"recipe": "fusionrag", "ratio": 0.0, "tenant": tenant}
        answer = await worker.ask(system, [a, d], question, variants=[[], [made.variant]], **more)
        assert error(answer.logits[0], guided) < CLOSE
        assert answer.summary.tokens_lossless == len(a)
        answer = await worker.ask(system, [a, d], question, variants=[[], [bytes(32)]], **more)
        assert error(answer.logits[0], isolated) < CLOSE
        answer = await worker.ask(system, [a, d], question, variants=[[], [made.variant]], ratio=1.0, tenant=tenant)
        assert error(answer.logits[0], plain.logits([*system, *a, *d, *question])) < CLOSE


@pytest.mark.parametrize("mode", ["EXACT", "NEIGHBOURS"])
async def test_an_empty_system_prompt(
    mode: str, cache_service: str, start: Any, tenant: str, text: dict[str, list[int]]
) -> None:
    plain = oracle("llama")
    question, a, b = (text[n] for n in "QAB")
    rig = await start("llama", cache=cache_service)
    expected = plain.logits([*a, *b, *question])
    await rig.encode([], [a], b, mode, tenant)
    for worker in (rig, await start("llama", cache=cache_service)):
        answer = await worker.ask([], [a, b], question, ratio=1.0, tenant=tenant)
        assert answer.summary.degraded_reason == ""
        assert error(answer.logits[0], expected) < CLOSE
        await worker.stored()
    answer = await worker.ask([], [a, b], question, ratio=0.0, tenant=tenant)
    reuse = plain.after(plain.reused([], [a, b]), question)
    assert error(answer.logits[0], expected if mode == "EXACT" else reuse) < CLOSE


@pytest.mark.parametrize("mode", ["EXACT", "NEIGHBOURS"])
async def test_encoding_the_first_chunk(
    mode: str, cache_service: str, start: Any, tenant: str, text: dict[str, list[int]]
) -> None:
    system, question, a = (text[n] for n in "SQA")
    rig = await start("llama", cache=cache_service)
    made = await rig.encode(system, [], a, mode, tenant)
    answer = await rig.ask(system, [a], question, variants=[[made.variant] if made.variant else []], tenant=tenant)
    assert error(answer.logits[0], oracle("llama").logits([*system, *a, *question])) < CLOSE


names = st.lists(st.sampled_from("ABCDE"), max_size=5)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(prompt=names, ratio=st.sampled_from([0.0, 0.1, 0.33, 0.9, 1.0]), exact=names, fresh=st.booleans())
async def test_any_pattern_of_hits(
    prompt: list[str],
    ratio: float,
    exact: list[str],
    fresh: bool,
    cache_service: str,
    start: Any,
    tenant: str,
    text: dict[str, list[int]],
) -> None:
    """What is there grows from example to example: prompts that ran, and paths encoded ahead of time."""
    system, question = text["S"], text["Q"]
    rig = await start("mistral-window", cache=cache_service, pool_bytes=1 << 20)
    if exact:
        *before, last = [text[n] for n in exact]
        await rig.encode(system, before, last, "EXACT", tenant)
    chunks = [text[n] for n in prompt]
    answer = await rig.fill(system, chunks, question, recipe="epic", ratio=ratio, tenant=tenant)
    s, context = answer.summary, sum(map(len, chunks))
    assert not s.degraded
    assert s.context_tokens == context
    assert s.tokens_recomputed == min(round(ratio * context), context - s.tokens_lossless)
    assert s.chunks_missed + sum(h.chunks for h in s.hits) == len(chunks)
    if prompt and prompt == exact:
        assert s.tokens_lossless == context
    exact_hits = sum(h.tokens for h in s.hits if h.kind == "exact")
    assert exact_hits <= s.tokens_lossless <= exact_hits + (len(chunks[0]) if chunks else 0)
    if s.tokens_reused == 0:
        expected = oracle("mistral-window").logits([*system, *itertools.chain(*chunks), *question])
        assert error(answer.logits[0], expected) < CLOSE


@pytest.mark.parametrize("recipe", ["epic", "cacheblend", "prophetkv+window(4,2)"])
async def test_kinds_mixed_and_several_at_once(
    recipe: str, cache_service: str, start: Any, tenant: str, text: dict[str, list[int]]
) -> None:
    """Exact, alternative, variant and miss in one prompt, a third recomputed, beside other requests."""
    plain = oracle("qwen3")
    system, question, a, b, c, d, e = (text[n] for n in "SQABCDE")
    maker = await start("qwen3", cache=cache_service)
    await maker.encode(system, [a], b, "EXACT", tenant)
    await maker.ask(system, [c], question, tenant=tenant)
    variant = (await maker.encode(system, [e, a], d, "NEIGHBOURS", tenant)).variant
    await maker.stored()
    rig = await start("qwen3", cache=cache_service)
    chunks, missed = [a, b, c, d, [7, 7, 7, 9]], 4
    ends = list(itertools.accumulate(map(len, (system, *chunks))))
    behind = plain.kv(d, past=plain.reused(system, [e, a]))
    base = len(system + e + a)
    stale = join(
        [
            plain.kv([*system, *a, *b]),
            plain.alone(system, c, ends[2]),
            plain.moved(behind, base, base + len(d), ends[3] - base),
            plain.alone(system, chunks[missed], ends[4]),
        ]
    )
    name, _, windowed = recipe.partition("+")
    scores = plain.scores(name, system, chunks, question, stale)
    best = sorted(range(ends[2], ends[-1]), key=lambda p: (-float(scores[p]), p))[: round(0.3 * (ends[-1] - ends[0]))]
    fresh = torch.zeros(ends[-1], dtype=torch.bool)
    fresh[best] = True
    for low in range(ends[2], ends[-1], 4) if windowed else ():
        fresh[low : low + 4] &= fresh[low : low + 4].sum() >= 2
    count = int(fresh.sum())
    assert 0 < count <= len(best)
    assert (count < len(best)) == bool(windowed), "the windows keep all, so this test shows nothing"
    whole = [*system, *itertools.chain(*chunks), *question]
    expected = plain.overlaid(whole, stale, fresh)
    mixed, alone, full = await asyncio.gather(
        rig.ask(
            system, chunks, question, recipe=recipe, ratio=0.3, variants=[[], [], [], [variant], []], tenant=tenant
        ),
        rig.ask(system, [d, c], question[:1], recipe="full_reuse", tenant=tenant + "y"),
        rig.ask(system, chunks, question, recipe="full_attention"),
    )
    assert hits(mixed) == {("exact", "memory"): 2, ("alternative", "memory"): 2}
    assert mixed.summary.chunks_missed == 1
    assert mixed.summary.tokens_lossless == len(a + b)
    assert mixed.summary.tokens_recomputed == count
    assert error(mixed.logits[0], expected) < CLOSE
    assert error(alone.logits[0], plain.after(plain.reused(system, [d, c]), question[:1])) < CLOSE
    assert error(full.logits[0], plain.logits(whole)) < CLOSE


async def test_a_prefix_cache(cache_service: str, start: Any, tenant: str, text: dict[str, list[int]]) -> None:
    """Full attention's answers, without computing again what follows the same path; and nothing from elsewhere."""
    plain = oracle("qwen3")
    system, question, a, b, c = (text[n] for n in "SQABC")

    async def ask(rig: Any, *chunks: list[int]) -> Any:
        answer = await rig.ask(system, chunks, question, recipe="prefix_cache", tenant=tenant, max_tokens=2)
        context = [*system, *itertools.chain(*chunks), *question]
        for at, logits in enumerate(answer.logits):
            assert error(logits, plain.logits([*context, *answer.ids[:at]])) < CLOSE
        assert answer.summary.tokens_lossless == sum(map(len, chunks))
        assert answer.summary.tokens_recomputed == answer.summary.tokens_reused == 0
        return answer.summary.tokens_encoded

    rig = await start("qwen3", cache=cache_service)
    assert await ask(rig, a, b, c) == len(a + b + c)
    assert await ask(rig, a, b, c) == 0
    assert await ask(rig, a, c, b) == len(b + c)
    assert await ask(rig, a, b) == 0
    assert await ask(rig, b, a) == len(a + b), "a is there, behind another chunk"
    await rig.stored()
    other = await start("qwen3", cache=cache_service)
    # Computed twice on the way or asked for twice: what is stored of it is used.
    assert await ask(other, a, b, c) <= len(b + c)
