"""Chunks of which only anchor tokens are kept (KVLink 2.4), against plain transformers."""

from typing import Any

import pytest

from fusionkv.fusion_worker.load.anchors import cuts as segments
from fusionkv.kvcache_service import keys
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument
from tests.fusion_worker.compressed import ANCHORS, Cuts, anchored, cut, links
from tests.fusion_worker.oracle import CLOSE, Parts, error, oracle, random_ids


@pytest.fixture
def parts() -> Parts:
    """Chunks shorter than a segment, of one, of several, with a rest; one of them twice, also at the start."""
    chunks = [random_ids(n, n) for n in (13, 1, 30, 16, 43)]
    return random_ids(5, 0), [*chunks[2:3], *chunks, chunks[2]], random_ids(6, 99)


def cuts(chunks: list[list[int]], percent: int) -> list[Cuts]:
    return [cut(chunk, ANCHORS[percent]) for chunk in chunks]


def kept(chunks: list[list[int]], percent: int) -> int:
    """Anchor tokens of the chunks."""
    return sum(len(anchors) for chunk in cuts(chunks, percent) for _, anchors in chunk)


@pytest.mark.parametrize(("percent", "each"), [(50, 0), (75, 5)])
async def test_anchors_alone_are_seen(family: str, percent: int, each: int, special: Any, parts: Any) -> None:
    system, chunks, question = parts
    rig, plain = await special(family), oracle(family)
    context = anchored(plain, system, cuts(chunks, percent), links(chunks, each))
    more = {"max_tokens": 3, "expected": lambda said: plain.after(context, [*question, *said])}
    for again in (False, True):
        answer = await rig.ask(*parts, recipe=f"kvlink+linked({each})+anchored({percent})", **more)
        s, tokens, different = answer.summary, sum(map(len, chunks)), sum(map(len, chunks)) - 2 * len(chunks[0])
        assert (s.context_tokens, s.tokens_reused, s.tokens_recomputed, s.tokens_lossless) == (tokens, tokens, 0, 0)
        assert s.tokens_encoded == (0 if again else different)
        assert {(h.kind, h.tier, h.tokens) for h in s.hits} == {
            ("alternative", "device", tokens if again else tokens - different)
        }
    assert error(plain.full_reuse(parts), answer.logits[0]) > 100 * CLOSE


@pytest.mark.system
@pytest.mark.parametrize("store", ["plain", "int8"])
async def test_entries_of_their_own(
    store: str, cache_client: Any, cache_service: str, special: Any, parts: Parts
) -> None:
    """Found by the text, beside what is stored of it otherwise; never taken for it, nor for another rate's."""
    system, chunks, question = parts
    plain = oracle("qwen3")
    context = anchored(plain, system, cuts(chunks, 75))
    first, other = [await special("qwen3", cache=cache_service, store=store) for _ in range(2)]
    for recipe in ("full_reuse", "full_reuse+anchored(50)", "full_reuse+anchored(75)"):
        assert (await first.fill(*parts, recipe=recipe)).summary.tokens_encoded > 0
    answer = await other.ask(*parts, recipe="full_reuse+anchored(75)")
    s = answer.summary
    assert (s.chunks_missed, s.tokens_encoded, s.degraded) == (0, 0, False)
    if store == "plain":
        stored = len(system) + kept(chunks[1:6], 75)
        assert s.bytes_fetched == stored * other.model.kv.token_bytes
        assert error(answer.logits[0], plain.after(context, question)) < CLOSE
    path = [keys.chunk_digest(part) for part in (system, chunks[1])]
    sizes = []
    for variant in (b"", *map(keys.anchors_variant, (50, 75, 60))):
        ways = [(path[0], ()), (variant or bytes(32), ()), (path[1], (variant,) if variant else ())]
        entry = (await cache_client(cache_service).lookup(other.namespace, ways, timeout=30)).hits[2].entry
        sizes.append(entry.tokens if entry is not None and entry.variant == variant else 0)
    assert sizes == [13, 7, 4, 0], "of the text, at 50%, at 75%, at a rate that nobody asked for"


async def test_ratio_1_is_full_attention_of_the_text(special: Any, parts: Parts) -> None:
    rig, expected = await special("llama"), oracle("llama").full_attention(parts)
    for recipe in ("full_reuse+anchored(50)", "kvlink+anchored(75)+snapkv(8)"):
        answer = await rig.ask(*parts, recipe=recipe, ratio=1.0, max_tokens=2, expected=expected)
        assert answer.summary.tokens_recomputed == answer.summary.context_tokens
        with pytest.raises(InvalidArgument, match="keeps no KV of a chunk's text, so it can't recompute tokens"):
            await rig.ask(*parts, recipe=recipe, ratio=0.3)


async def test_context_kept_of_anchors(special: Any, parts: Any) -> None:
    system, chunks, question = parts
    rig, plain = await special("llama"), oracle("llama")
    context = anchored(plain, system, cuts(chunks, 50), links(chunks, 2))
    expected: Any = plain.evicted(context, question, len(system), 12)
    await rig.ask(*parts, recipe="kvlink+anchored(50)+linked(2)+snapkv(12)", max_tokens=4, expected=expected)
    # More are to be kept than there are anchor tokens, though fewer than tokens of the context: nothing goes.
    assert kept(chunks, 50) < 90 < sum(map(len, chunks))
    context = anchored(plain, system, cuts(chunks, 50))
    more = {"max_tokens": 2, "expected": lambda said: plain.after(context, [*question, *said])}
    await rig.ask(*parts, recipe="full_reuse+anchored(50)+snapkv(90)", **more)


async def test_models_without_them_are_refused(start: Any, special: Any, parts: Any) -> None:
    with pytest.raises(FailedPrecondition, match=r"llama has no anchor tokens that save 50%.*models/README\.md"):
        await (await start("llama")).ask(*parts, recipe="kvlink+linked(0)+anchored(50)")
    rig = await special("llama")
    with pytest.raises(FailedPrecondition, match=r"save 60%, .*: use \+anchored\(50\), \+anchored\(75\)"):
        await rig.ask(*parts, recipe="full_reuse+anchored(60)", ratio=1.0)
    assert (await rig.ask(*parts, recipe="full_reuse+anchored(75)")).ids


@pytest.mark.parametrize(
    ("percent", "segment"), [(p, s) for s in (1, 10, 16, 20, 25) for p in range(100) if s * p % 100 == 0]
)
def test_a_segment_is_as_long_as_its_anchor_tokens_say(percent: int, segment: int) -> None:
    anchors = range(segment * (100 - percent) // 100)
    (only,) = segments(range(segment), anchors, percent)
    assert (len(only.text), len(only.anchors)) == (segment, len(anchors))
    assert len(segments(range(segment + 1), anchors, percent)) == 2
