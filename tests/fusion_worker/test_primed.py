"""Chunks encoded after a primer: computed, stored, found and told apart as an untouched model has it."""

import asyncio
from typing import Any

import pytest

from fusionkv.fusion_worker.load.lookup import CacheFault
from fusionkv.fusion_worker.load.passages import TOKENS
from fusionkv.fusion_worker.load.primer import _packed, _unpacked, choose
from fusionkv.fusion_worker.prompt import Chunk
from fusionkv.kvcache_service import keys
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument, Unavailable
from tests.fusion_worker.oracle import CLOSE, error, join, oracle, random_ids, whole
from tests.fusion_worker.test_hits import Text, hits

pytestmark = pytest.mark.system
PRIMED = {"recipe": "full_reuse+primed"}
# Long enough to make a primer of.
LONG = [random_ids(length, length) for length in (150, 100, 300)]


def reused(plain: Any, system: list[int], chunks: list[list[int]], primers: list[list[int]]) -> Any:
    """The KV of a prompt's context: all chunks but the first computed after a primer, and moved."""
    parts, place = [plain.kv([*system, *chunks[0]])], len(system) + len(chunks[0])
    for chunk, primer in zip(chunks[1:], primers, strict=True):
        base = len(system) + len(primer)
        made = plain.kv([*system, *primer, *chunk])
        parts.append(plain.moved(made, base, base + len(chunk), place - base))
        place += len(chunk)
    return join(parts)


def primed(system: list[int], chunks: list[list[int]], question: list[int], primers: list[list[int]]) -> Any:
    """The answer of "llama" over chunks that were encoded after these primers."""
    plain = oracle("llama")
    return plain.after(reused(plain, system, chunks, primers), question)


def made_of(*chunks: list[int]) -> list[int]:
    """The primer of a corpus whose first prompt has these chunks."""
    return [i for chunk in chunks for i in chunk][:TOKENS]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2-mixed", "glm4"])
async def test_chunks_after_the_primer(kind: str, cached: Any, text: Text) -> None:
    """Short chunks make no primer of their own."""
    plain, rig = oracle(kind), await cached(kind)
    system, question, a, b, c = (text[n] for n in "SQABC")
    parts, primer = (system, [a, b, c], question), list(rig.servicer.loader.fallback.ids)
    assert len(primer) == TOKENS
    expected = plain.after(reused(plain, system, [a, b, c], [primer] * 2), question)
    isolated = plain.full_reuse(parts)
    assert error(isolated, expected) > 100 * CLOSE

    await rig.fill(*parts, recipe="full_reuse", expected=isolated)
    answer = await rig.fill(*parts, **PRIMED, expected=expected)
    s = answer.summary
    assert (s.chunks_missed, s.tokens_encoded, s.tokens_lossless) == (2, len(b + c), len(a))
    for worker in (rig, await cached(kind)):
        tier = "device" if worker is rig else "memory"
        answer = await worker.ask(*parts, **PRIMED, expected=expected)
        assert hits(answer) == {("exact", tier): 1, ("alternative", tier): 2}
        # Each recipe gets what it asks for, whichever was stored first or last.
        await worker.ask(*parts, recipe="full_reuse", expected=isolated)
        await worker.ask(*parts, recipe="deeplayer+primed", ratio=1.0, expected=plain.full_attention(parts))
    swapped = plain.after(reused(plain, system, [b, a, c], [primer] * 2), question)
    answer = await rig.ask(system, [b, a, c], question, **PRIMED, expected=swapped)
    assert answer.summary.tokens_lossless == len(b), "the first chunk is always exact"


async def test_a_corpus_is_encoded_after_its_own_passages(cached: Any, text: Text) -> None:
    """All workers use the primer that the first one has made; other corpora and tenants have their own."""
    first, other = await cached("llama"), [random_ids(200, 1), random_ids(190, 2)]
    system, question, a, b = (text[n] for n in "SQAB")
    own, fallback = made_of(*LONG), list(first.servicer.loader.fallback.ids)

    async def fill(worker: Any, chunks: list[list[int]], primers: list[list[int]], **about: str) -> None:
        parts = system, chunks, question
        await worker.fill(*parts, **PRIMED, **{"corpus": "one", **about}, expected=primed(*parts, primers))

    # Chunks that the primer is made of would find a copy of themselves in it.
    await fill(first, LONG, [fallback] * 2)
    for worker in (first, await cached("llama")):
        await fill(worker, [a, b, LONG[0]], [own, fallback])
    # Later prompts change nothing.
    await fill(await cached("llama"), other, [own])
    for about in ({"corpus": "two"}, {"tenant": "another"}):
        await fill(first, other, [fallback], **about)
        await fill(first, [a, b], [made_of(*other)], **about)


async def test_workers_that_begin_at_once_agree(cached: Any, text: Text) -> None:
    system, question, a, b = (text[n] for n in "SQAB")
    rigs = [await cached("llama") for _ in range(3)]
    prompts = [[random_ids(200 + i, 10 + i), random_ids(150, 20 + i)] for i in range(3)]
    asked = {**PRIMED, "corpus": "raced"}
    await asyncio.gather(
        *(rig.fill(system, chunks, question, **asked) for rig, chunks in zip(rigs, prompts, strict=True))
    )
    answers = [await rig.ask(system, [a, b], question, **asked) for rig in rigs]
    possible = [primed(system, [a, b], question, [made_of(*chunks)]) for chunks in prompts]
    (found,) = {min(range(3), key=lambda n: error(answer.logits[0], possible[n])) for answer in answers}
    assert all(error(answer.logits[0], possible[found]) < CLOSE for answer in answers)


@pytest.mark.parametrize("slow", ["lookup", "put"])
async def test_a_slow_cache_costs_no_more_than_its_bound(
    slow: str, cached: Any, text: Text, monkeypatch: Any
) -> None:
    """The primer's lookup and its put count as well, whatever the timeouts of single calls are."""
    rig, parts = await cached("llama", cache_seconds=0.6), (text["S"], LONG, text["Q"])

    async def crawl(*_: Any, **__: Any) -> None:
        await asyncio.sleep(5)
        raise Unavailable("the cache service has stopped")

    monkeypatch.setattr(rig.servicer.cache, slow, crawl)
    answer = await rig.ask(*parts, **PRIMED, corpus="slow", expected=oracle("llama").full_attention(parts))
    assert answer.summary.degraded_reason == "the primer took longer than the 0.6 s of the cache"
    assert answer.summary.seconds.lookup < 4


async def test_without_a_cache_service_the_primer_is_kept_in_memory(start: Any, text: Text) -> None:
    rig, (system, question, a, b) = await start("llama"), (text[n] for n in "SQAB")
    await rig.ask(system, LONG, question, **PRIMED, corpus="one")
    expected = primed(system, [a, b], question, [made_of(*LONG)])
    await rig.ask(system, [a, b], question, **PRIMED, corpus="one", expected=expected)


async def test_a_primer_that_was_evicted_is_not_computed_again_for_chunks_in_the_pool(start: Any, text: Text) -> None:
    """It goes first: a prompt's parts are used in their order."""
    rig, (system, question, a, b, c) = await start("llama"), (text[n] for n in "SQABC")
    expected = primed(system, [a, b], question, [list(rig.servicer.loader.fallback.ids)])
    await rig.ask(system, [a, b], question, **PRIMED, expected=expected)
    for pooled in [pooled for pooled in rig.pool.chunks if pooled.tokens == TOKENS]:
        rig.pool._give(rig.pool.chunks.remove(pooled))
    room = rig.pool.free.count
    await rig.ask(system, [a, b], question, **PRIMED, expected=expected)
    assert rig.pool.free.count == room
    await rig.ask(system, [a, c], question, **PRIMED)
    assert rig.pool.free.count < room - TOKENS, "another chunk is encoded after it"


async def test_the_primer_of_a_corpus_is_forgotten(start: Any, text: Text) -> None:
    rig, (system, question, a, b) = await start("llama"), (text[n] for n in "SQAB")
    for chunks in (LONG, [random_ids(200, 1), random_ids(190, 2)]):
        await rig.ask(system, chunks, question, **PRIMED, corpus="one")
        expected = primed(system, [a, b], question, [made_of(*chunks)])
        await rig.ask(system, [a, b], question, **PRIMED, corpus="one", expected=expected)
        for tenant in (rig.tenant, rig.tenant, "another"):
            await rig.servicer.ForgetCorpus(pb.ForgetCorpusRequest(tenant=tenant, corpus="one"), None)
    for wrong in ({}, {"corpus": "a" * 257}, {"corpus": "one", "tenant": "a" * 257}):
        with pytest.raises(InvalidArgument):
            await rig.servicer.ForgetCorpus(pb.ForgetCorpusRequest(**wrong), None)


async def test_a_deleted_primer_is_not_stored_again(cached: Any, text: Text, monkeypatch: Any) -> None:
    """Neither by a worker that the deletion did not reach, nor by a request that is making it meanwhile."""
    system, question = text["S"], text["Q"]
    rigs, new = [await cached("llama") for _ in range(2)], [random_ids(200, 1), random_ids(190, 2)]
    monkeypatch.setattr("fusionkv.fusion_worker.load.primer._SECONDS", 0.0)
    for rig in rigs:
        await rig.ask(system, LONG, question, **PRIMED, corpus="gone")
    forget = pb.ForgetCorpusRequest(tenant=rigs[0].tenant, corpus="gone")
    await rigs[0].servicer.ForgetCorpus(forget, None)
    await rigs[1].ask(system, new, question, **PRIMED, corpus="gone")
    assert await stored(rigs[1], "gone") == made_of(*new)

    send = rigs[0].servicer.loader.write_back.send

    async def late(*arguments: Any, **named: Any) -> bool:
        """Stores what was made before a deletion, after it."""
        await rigs[0].servicer.ForgetCorpus(forget, None)
        return bool(await send(*arguments, **named))

    await rigs[0].servicer.ForgetCorpus(forget, None)
    monkeypatch.setattr(rigs[0].servicer.loader.write_back, "send", late)
    await rigs[0].ask(system, LONG, question, **PRIMED, corpus="gone")
    assert await stored(rigs[0], "gone") is None


async def stored(rig: Any, corpus: str) -> list[int] | None:
    """Token ids of the primer that the cache service has."""
    data = await rig.servicer.loader.lookups.named(keys.primer_name(corpus), rig.namespace)
    return None if data is None else list(_unpacked(data, Chunk(()), 1 << 20).chunk.ids)


async def test_what_is_recomputed_over_primed_chunks(cached: Any, text: Text) -> None:
    plain, rig = oracle("llama"), await cached("llama")
    system, question, a, b, c = (text[n] for n in "SQABC")
    primer = list(rig.servicer.loader.fallback.ids)
    kv = reused(plain, system, [a, b, c], [primer] * 2)
    parts = (system, [a, b, c], question)
    for recipe in ("prophetkv", "deeplayer"):
        fresh = plain.chosen(recipe, *parts, 0.3, kv)
        expected = plain.overlaid(whole(parts), kv, fresh)
        answer = await rig.ask(*parts, recipe=f"{recipe}+primed", ratio=0.3, expected=expected)
        assert answer.summary.tokens_recomputed == fresh.sum() == round(0.3 * len(a + b + c))
        assert error(plain.after(kv, question), expected) > 100 * CLOSE, "recomputing changed nothing"


async def test_encoded_ahead(cached: Any, text: Text) -> None:
    """The primer is made of the chunks that come along, for whoever asks first."""
    rig, (system, question, a, b) = await cached("llama"), (text[n] for n in "SQAB")
    for chunk in (a, b, LONG[1]):
        made = [await rig.encode(system, LONG, chunk, "PRIMED", corpus="ahead") for _ in range(2)]
        assert [m.existed for m in made] == [False, True]
        assert made[0].key == made[1].key
    worker, fallback = await cached("llama"), list(rig.servicer.loader.fallback.ids)
    for chunks, primers in (([a, b], [made_of(*LONG)]), ([b, a, LONG[1]], [made_of(*LONG), fallback])):
        expected = primed(system, chunks, question, primers)
        answer = await worker.ask(system, chunks, question, **PRIMED, corpus="ahead", expected=expected)
        assert answer.summary.tokens_encoded == 0


async def test_a_chunk_that_does_not_fit_behind_the_primer_is_encoded_alone(cached: Any, text: Text) -> None:
    system, question, a, b, c = (text[n] for n in "SQABC")
    rig = await cached("llama", max_tokens=len(system) + TOKENS + len(c))
    plain, primer = oracle("llama"), list(rig.servicer.loader.fallback.ids)
    assert len(b) > len(c)
    behind, base, place = plain.kv([*system, *primer, *c]), len(system) + len(primer), len(system + a + b)
    moved = plain.moved(behind, base, base + len(c), place - base)
    expected = plain.after(join([plain.reused(system, [a, b]), moved]), question)
    for worker in (rig, await cached("llama", max_tokens=rig.model.max_tokens)):
        await worker.fill(system, [a, b, c], question, **PRIMED, expected=expected)


async def test_the_primer_leaves_a_full_pool(cached: Any, text: Text) -> None:
    system, question, a, b, c, d = (text[n] for n in "SQABCD")
    room = 700 * (await cached("llama")).model.token_bytes
    rig = await cached("llama", pool_bytes=room)
    primer = list(rig.servicer.loader.fallback.ids)
    for chunks in ([a, b], [c, d], [d, b], [b, a, c, d]):
        expected = primed(system, chunks, question, [primer] * (len(chunks) - 1))
        await rig.fill(system, chunks, question, **PRIMED, expected=expected)
        await rig.ask(system, [random_ids(600, len(chunks))], question, recipe="full_reuse")
    await rig.settled()


async def test_a_pool_without_room_for_a_primer(cached: Any, text: Text) -> None:
    """Chunks are then encoded after the system prompt alone."""
    parts = text["S"], [text[n] for n in "ABC"], text["Q"]
    rig = await cached("llama", pool_bytes=200 * (await cached("llama")).model.token_bytes)
    s = (await rig.ask(*parts, **PRIMED, expected=oracle("llama").full_reuse(parts))).summary
    assert (s.degraded, s.chunks_missed) == (False, 3)


async def test_an_entry_that_is_no_primer_is_a_fault(cached: Any, text: Text) -> None:
    rig = await cached("llama")
    system, question, a, b = (text[n] for n in "SQAB")
    namespace, path = rig.namespace, (keys.primer_name("odd"),)
    await rig.servicer.cache.put(
        namespace=namespace, path=path, tokens=1, base=0, data=memoryview(b"\xff" * 40), timeout=5
    )
    expected = oracle("llama").full_attention((system, [a, b], question))
    answer = await rig.ask(system, [a, b], question, **PRIMED, corpus="odd", expected=expected)
    assert "wrong entry as a primer" in answer.summary.degraded_reason
    answer = await rig.ask(system, [a, b], question, **PRIMED, corpus="odd")
    assert not answer.summary.degraded, "it is deleted"


def test_a_primer_survives_its_entry() -> None:
    fallback = Chunk((1, 2, 3))
    primer = choose([*map(Chunk, map(tuple, LONG)), Chunk(tuple(LONG[0]))], fallback)
    assert primer is not None
    assert (len(primer.chunk), len(primer.holds)) == (TOKENS, 3)
    assert _unpacked(_packed(primer), fallback, 1 << 20) == primer
    assert choose([Chunk((1,) * 100)], fallback) is None
    for odd in (b"", b"\x01", b"\xff" * 40, _packed(primer)[:-3]):
        with pytest.raises(CacheFault, match="wrong entry"):
            _unpacked(odd, fallback, 1 << 20)
