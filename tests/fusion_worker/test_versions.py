"""Versions of a chunk by what stood before it: computed, kept, chosen and told apart as an untouched model has it."""

import itertools
from typing import Any

import pytest

from fusionkv.kvcache_service import keys
from tests.fusion_worker.oracle import CLOSE, error, join, oracle
from tests.fusion_worker.test_hits import Text, hits

pytestmark = pytest.mark.system


@pytest.mark.parametrize("kind", ["qwen3", "qwen2-mixed"])
async def test_versions_by_earlier_context(
    kind: str, cached: Any, cache_client: Any, cache_service: str, text: Text
) -> None:
    plain, more = oracle(kind), {"recipe": "full_reuse+versions(3)"}
    system, question, a, b, c, d, e = (text[n] for n in "SQABCDE")

    def behind(*before: list[int], chunk: list[int], shift: int) -> Any:
        """A chunk as full attention has it behind others, moved on."""
        at = len(system) + sum(map(len, before))
        return plain.moved(plain.kv([*system, *itertools.chain(*before), *chunk]), at, at + len(chunk), shift)

    def full(*chunks: list[int]) -> Any:
        return plain.full_attention((system, chunks, question))

    first, rig = await cached(kind), await cached(kind)
    answer = await first.fill(system, [a, b, c], question, **more, expected=full(a, b, c))
    assert answer.summary.tokens_encoded == answer.summary.tokens_lossless == len(a + b + c)

    answer = await rig.ask(system, [a, b, c], question, **more, expected=full(a, b, c))
    assert hits(answer) == {("exact", "memory"): 1, ("alternative", "memory"): 2}
    assert answer.summary.tokens_lossless == len(a), "a version is never lossless"
    # Without the modifier a recipe never gets one.
    expected = plain.full_reuse((system, [a, b, c], question))
    answer = await rig.fill(system, [a, b, c], question, recipe="full_reuse", expected=expected)
    assert answer.summary.chunks_missed == 2

    # What stood before B's version, and before its plain entry, is not here; B stood before C's.
    version = behind(a, b, chunk=c, shift=len(d) - len(a))
    expected = plain.after(join([plain.kv([*system, *d, *b]), version]), question)
    answer = await rig.fill(system, [d, b, c], question, **more, expected=expected)
    assert answer.summary.tokens_encoded == answer.summary.tokens_lossless == len(d + b)
    for other in (plain.full_reuse((system, [d, b, c], question)), full(d, b, c)):
        assert error(other, expected) > 100 * CLOSE

    # E is computed behind a stale copy, and is stored as such.
    stale = plain.kv(e, past=join([plain.kv([*system, *b]), behind(a, b, chunk=c, shift=-len(a))]))
    for worker, encoded in ((rig, len(e)), (await cached(kind), 0)):
        answer = await worker.fill(system, [b, c, e], question, **more, expected=plain.after(stale, question))
        assert (answer.summary.tokens_encoded, answer.summary.tokens_lossless) == (encoded, len(b))
    await rig.ask(system, [b, c, e], question, recipe="epic+versions", ratio=1.0, expected=full(b, c, e))

    # Where all before it is lossless the same chunk is computed anew, although the pool has that stale version.
    await rig.encode(system, [b], c)
    path = [keys.chunk_digest(part) for part in (system, b, c, e)]
    version_key = keys.entry_key(rig.namespace, path, keys.versions_variant(3))
    assert await cache_client(cache_service).delete([version_key]) == 1
    answer = await rig.fill(system, [b, c, e], question, **more, expected=full(b, c, e))
    assert answer.summary.tokens_lossless == len(b + c + e)

    # Of C's two versions the one behind D alone is more like D, B than the one behind A, B.
    answer = await rig.fill(system, [d, c], question, **more)
    assert answer.summary.tokens_encoded == len(c)
    version = behind(d, chunk=c, shift=len(b))
    expected = plain.after(join([plain.kv([*system, *d, *b]), version]), question)
    answer = await rig.ask(system, [d, b, c], question, **more, expected=expected)
    assert (answer.summary.tokens_encoded, answer.summary.tokens_lossless) == (0, len(d))
