"""Versions of a chunk by what stood before it: computed, kept, chosen and told apart as an untouched model has it."""

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient
from tests.examples import examples
from tests.fusion_worker.oracle import error, join, oracle
from tests.fusion_worker.test_hits import hits
from tests.ports import free_port

pytestmark = pytest.mark.system
CLOSE = 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "qwen2-mixed"])
async def test_versions_by_earlier_context(
    kind: str, cache_service: str, start: Any, tenant: str, text: dict[str, list[int]]
) -> None:
    plain, more = oracle(kind), {"recipe": "full_reuse+versions(3)", "tenant": tenant}
    system, question, a, b, c, d, e = (text[n] for n in "SQABCDE")

    def behind(*before: list[int], chunk: list[int], shift: int) -> Any:
        """A chunk as full attention has it behind others, moved on."""
        at = len(system) + sum(map(len, before))
        return plain.moved(plain.kv([*system, *itertools.chain(*before), *chunk]), at, at + len(chunk), shift)

    first = await start(kind, cache=cache_service)
    answer = await first.ask(system, [a, b, c], question, **more)
    assert answer.summary.tokens_encoded == answer.summary.tokens_lossless == len(a + b + c)
    assert error(answer.logits[0], plain.logits([*system, *a, *b, *c, *question])) < CLOSE
    await first.stored()

    rig = await start(kind, cache=cache_service)
    answer = await rig.ask(system, [a, b, c], question, **more)
    assert hits(answer) == {("exact", "memory"): 1, ("alternative", "memory"): 2}
    assert answer.summary.tokens_lossless == len(a), "a version is never lossless"
    assert error(answer.logits[0], plain.logits([*system, *a, *b, *c, *question])) < CLOSE
    # Without the modifier a recipe never gets one.
    answer = await rig.ask(system, [a, b, c], question, recipe="full_reuse", tenant=tenant)
    assert answer.summary.chunks_missed == 2
    assert error(answer.logits[0], plain.after(plain.reused(system, [a, b, c]), question)) < CLOSE
    await rig.stored()

    # What stood before B's version, and before its plain entry, is not here; B stood before C's.
    answer = await rig.ask(system, [d, b, c], question, **more)
    assert answer.summary.tokens_encoded == answer.summary.tokens_lossless == len(d + b)
    version = behind(a, b, chunk=c, shift=len(d) - len(a))
    expected = plain.after(join([plain.kv([*system, *d, *b]), version]), question)
    assert error(answer.logits[0], expected) < CLOSE
    assert error(plain.after(plain.reused(system, [d, b, c]), question), expected) > 100 * CLOSE
    assert error(plain.logits([*system, *d, *b, *c, *question]), expected) > 100 * CLOSE
    await rig.stored()

    # E is computed behind a stale copy, and is stored as such.
    stale = plain.kv(e, past=join([plain.kv([*system, *b]), behind(a, b, chunk=c, shift=-len(a))]))
    for worker, encoded in ((rig, len(e)), (await start(kind, cache=cache_service), 0)):
        answer = await worker.ask(system, [b, c, e], question, **more)
        assert (answer.summary.tokens_encoded, answer.summary.tokens_lossless) == (encoded, len(b))
        assert error(answer.logits[0], plain.after(stale, question)) < CLOSE
        await worker.stored()
    answer = await rig.ask(system, [b, c, e], question, recipe="epic+versions", ratio=1.0, tenant=tenant)
    full = plain.logits([*system, *b, *c, *e, *question])
    assert error(answer.logits[0], full) < CLOSE

    # Where all before it is lossless the same chunk is computed anew, although the pool has that stale version.
    await rig.encode(system, [b], c, "EXACT", tenant)
    space = keys.namespace(rig.model.fingerprint, rig.model.settings, tenant)
    path = [keys.chunk_digest(part) for part in (system, b, c, e)]
    cache = CacheClient(cache_service)
    assert await cache.delete([keys.entry_key(space, path, keys.versions_variant(3))]) == 1
    await cache.close()
    answer = await rig.ask(system, [b, c, e], question, **more)
    assert answer.summary.tokens_lossless == len(b + c + e)
    assert error(answer.logits[0], full) < CLOSE
    await rig.stored()

    # Of C's two versions the one behind D alone is more like D, B than the one behind A, B.
    answer = await rig.ask(system, [d, c], question, **more)
    assert answer.summary.tokens_encoded == len(c)
    await rig.stored()
    answer = await rig.ask(system, [d, b, c], question, **more)
    assert (answer.summary.tokens_encoded, answer.summary.tokens_lossless) == (0, len(d))
    version = behind(d, chunk=c, shift=len(b))
    expected = plain.after(join([plain.kv([*system, *d, *b]), version]), question)
    assert error(answer.logits[0], expected) < CLOSE


names = st.lists(st.sampled_from("ABCDE"), max_size=4)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompt=names,
    recipe=st.sampled_from(["epic", "epic+versions(1)", "epic+versions(2)"]),
    ratio=st.sampled_from([0.0, 0.3, 1.0]),
    store=st.sampled_from(["plain", "int8"]),
)
async def test_any_prompts_one_after_the_other(
    prompt: list[str],
    recipe: str,
    ratio: float,
    store: str,
    cache_service: str,
    start: Any,
    tenant: str,
    text: dict[str, list[int]],
) -> None:
    """What is there grows from example to example; what is called lossless or is recomputed is full attention's."""
    chunks, context = [text[n] for n in prompt], sum(len(text[n]) for n in prompt)
    rig = await start("llama", cache=cache_service, pool_bytes=1 << 20, store=store)
    answer = await rig.fill(text["S"], chunks, text["Q"], recipe=recipe, ratio=ratio, tenant=tenant)
    s = answer.summary
    assert not s.degraded
    assert s.tokens_recomputed == min(round(ratio * context), context - s.tokens_lossless)
    assert s.chunks_missed + sum(h.chunks for h in s.hits) == len(chunks)
    if s.tokens_reused == 0:
        expected = oracle("llama").logits([*text["S"], *itertools.chain(*chunks), *text["Q"]])
        assert error(answer.logits[0], expected) < CLOSE


async def test_without_its_cache_it_is_plain_prefill(start: Any, text: Any) -> None:
    system, question, a, b = (text[n] for n in "SQAB")
    rig = await start("qwen3", cache=f"127.0.0.1:{free_port()}")
    answer = await rig.ask(system, [a, b], question, recipe="cache_craft+versions")
    assert answer.summary.degraded
    assert error(answer.logits[0], oracle("qwen3").logits([*system, *a, *b, *question])) < CLOSE
