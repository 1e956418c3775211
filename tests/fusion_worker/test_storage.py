"""Workers that store KV in one byte a number: what comes back is stale, and r = 1 is full attention still."""

import itertools
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.kernels.quantised import KINDS, quantise, restore
from tests.fusion_worker.oracle import error, join, oracle, random_ids

pytestmark = pytest.mark.system
CLOSE = 1e-4


@pytest.fixture
def parts() -> tuple[list[int], list[list[int]], list[int]]:
    return random_ids(5, 0), [random_ids(n, n) for n in (70, 13, 1)], random_ids(6, 99)


def through(kv: Any, kind: torch.dtype) -> Any:
    """What is left of an oracle's KV, [1, kv_heads, tokens, head_dim] a layer, after storing it."""
    whole = torch.stack([torch.stack([k[0].transpose(0, 1), v[0].transpose(0, 1)]) for k, v in kv])
    back = restore(quantise(whole, kind), whole.dtype).transpose(2, 3)
    return [(layer[0][None], layer[1][None]) for layer in back]


@pytest.mark.parametrize("store", KINDS)
async def test_what_comes_back_is_stale(store: str, cache_service: str, start: Any, tenant: str, parts: Any) -> None:
    system, chunks, question = parts
    plain = oracle("qwen3")
    maker = await start("qwen3", cache=cache_service, store=store)
    await maker.fill(system, chunks, question, tenant=tenant, ratio=0.0)

    rig = await start("qwen3", cache=cache_service, store=store)
    context = sum(map(len, chunks))
    full = plain.logits([*system, *itertools.chain(*chunks), *question])
    context_kv, at = [plain.kv(system)], len(system)
    for chunk in chunks:
        stored = through(plain.alone(system, chunk, len(system)), KINDS[store])
        context_kv.append(plain.moved(stored, 0, len(chunk), at - len(system)))
        at += len(chunk)
    reused = plain.after(join(context_kv), question)
    for ratio in (0.0, 1.0):
        answer = await rig.ask(system, chunks, question, tenant=tenant, ratio=ratio)
        s = answer.summary
        assert not s.degraded
        assert s.chunks_missed == 0
        # As computed it would be a float32 a number.
        size = sum(rig.servicer.loader.storage.size(len(c)) for c in chunks)
        assert size < 0.35 * context * rig.model.kv.token_bytes
        assert s.bytes_fetched == (0 if ratio else size), "once; then it is in the pool"
        assert s.tokens_lossless == 0, "not even the first chunk, which stands where it was encoded"
        assert s.tokens_recomputed == round(ratio * context)
        assert error(answer.logits[0], full if ratio else reused) < CLOSE
    assert error(reused, plain.after(plain.reused(system, chunks), question)) > CLOSE, "something was lost"

    # Other forms are other namespaces.
    other = await start("qwen3", cache=cache_service)
    assert (await other.ask(system, chunks, question, tenant=tenant, ratio=0.0)).summary.chunks_missed == len(chunks)


@pytest.mark.parametrize("store", KINDS)
async def test_a_prefix_cache_takes_nothing_that_is_not_exact(
    store: str, cache_service: str, start: Any, tenant: str, parts: Any
) -> None:
    system, chunks, question = parts
    maker = await start("llama", cache=cache_service, store=store)
    await maker.encode(system, chunks[:1], chunks[1], "EXACT", tenant)
    expected = oracle("llama").logits([*system, *chunks[0], *chunks[1], *question])
    rig = await start("llama", cache=cache_service, store=store)
    answer = await rig.ask(system, chunks[:2], question, recipe="prefix_cache", tenant=tenant)
    assert answer.summary.tokens_encoded == len(chunks[0] + chunks[1])
    assert error(answer.logits[0], expected) < CLOSE


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="plain, int8, fp8"):
        WorkerConfig(store="int4")
