"""Encoding ahead of time: what it stores, in which form, what it answers, and when it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.kernels.quantised import KINDS, quantise, restore
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import HitKind
from fusionkv.protos.contract.recipes import RECIPES
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from tests.fusion_worker.oracle import CLOSE, Parts, byte_tokenizer, error, join, last_of, oracle, random_ids
from tests.services import start_cache

pytestmark = pytest.mark.system
LENGTHS = (70, 13, 1)


@pytest.mark.parametrize(("mode", "store"), [("EXACT", "plain"), ("EXACT", "int8"), ("NEIGHBOURS", "plain")])
async def test_encoding_twice_is_encoding_once(mode: str, store: str, cached: Any) -> None:
    system, a, b, c = (random_ids(n, n) for n in (5, 9, 12, 20))
    rig, plain = await cached("llama", store=store), oracle("llama")
    client = rig.servicer.cache
    puts = (await client.stats()).puts
    first = await rig.encode(system, [a, b], c, mode)
    stored = (await client.stats()).puts - puts
    assert (first.existed, first.tokens, bool(first.variant)) == (False, 20, mode == "NEIGHBOURS")
    for worker in (rig, await cached("llama", store=store)):
        again = await worker.encode(system, [a, b], c, mode)
        assert (again.key, again.variant, again.existed, again.tokens) == (first.key, first.variant, True, 20)
    await rig.stored()
    assert (await client.stats()).puts - puts == stored == 4, "system prompt, two before it and the chunk, once each"

    path = [(keys.chunk_digest(x), ()) for x in (system, a, b)]
    path.append((keys.chunk_digest(c), (first.variant,) if first.variant else ()))
    hit = (await client.lookup(rig.namespace, path, timeout=5)).hits[-1]
    assert hit.kind is (HitKind.EXACT if mode == "EXACT" else HitKind.ALTERNATIVE)
    assert (hit.entry.key, hit.entry.base) == (first.key, 5 + 9 + 12)
    if store != "plain":
        return
    past = plain.kv([*system, *a, *b]) if mode == "EXACT" else plain.reused(system, [a, b])
    expected = last_of(plain.kv(c, past=past), 20)
    torch.testing.assert_close(await rig.kv_of(hit.entry), expected, atol=1e-4, rtol=1e-4)


async def test_encoding_without_a_cache_service(start: Any) -> None:
    for cache, status, message in (
        ("", FailedPrecondition, "no cache service"),
        ("127.0.0.1:1", Unavailable, "cache service at 127.0.0.1:1"),
    ):
        rig = await start("llama", cache=cache, lookup_timeout=0.5)
        for mode in ("EXACT", "NEIGHBOURS"):
            with pytest.raises(status, match=message):
                await rig.encode([1], [[2]], [3, 4], mode)


async def test_a_cache_service_that_refuses_the_bytes(start: Any, launch: Any, tmp_path: Path) -> None:
    rig = await start("llama", cache=start_cache(launch, tmp_path, "--max-entry-bytes", "10000").address)
    assert not (await rig.encode([1], [], [2] * 6)).existed
    for mode in ("EXACT", "NEIGHBOURS"):
        with pytest.raises(Unavailable, match="put at the cache service"):
            await rig.encode([1], [], [2] * 7, mode)
    assert not (await rig.ask([1], [[2] * 7], [3])).summary.degraded


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mode": "UNSPECIFIED"}, InvalidArgument, "mode must be"),
        ({"corpus": "c"}, InvalidArgument, "only MODE_PRIMED takes a corpus"),
        ({"mode": "NEIGHBOURS", "corpus": "c"}, InvalidArgument, "only MODE_PRIMED takes a corpus"),
        ({"chunk": []}, InvalidArgument, "chunk 1 is empty"),
        ({"before": [[]]}, InvalidArgument, "chunk 0 is empty"),
        ({"chunk": [260]}, InvalidArgument, "token id 260"),
        ({"chunk": [1] * 2048}, InvalidArgument, "exceed the model's limit of 2048"),
        ({"tenant": "x" * 257}, InvalidArgument, "tenant"),
        ({"model_fingerprint": b"x" * 32}, FailedPrecondition, "this worker runs llama"),
        ({"chunk": [1] * 1000}, ResourceExhausted, "pool_bytes"),
    ],
    ids=lambda given: str(given)[:40],
)
async def test_encoding_that_is_refused(
    change: dict[str, Any], error: type[Exception], message: str, cached: Any
) -> None:
    rig, fields = await cached("llama", pool_bytes=1 << 20), {"system": [1], "before": [[2]], "chunk": [3]}
    with pytest.raises(error, match=message):
        await rig.encode(**{**fields, **change})
    assert (await rig.encode(**fields, model_fingerprint=rig.model.fingerprint)).tokens == 1


async def test_a_model_says_what_it_is(start: Any) -> None:
    rig = await start("qwen3")
    said = await rig.servicer.GetModel(pb.GetModelRequest(), None)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert (said.name, said.family, said.dtype, said.device) == ("qwen3", "qwen3", "float32", device)
    assert (said.fingerprint, said.kv_bytes_per_token) == (rig.model.fingerprint, 3 * 2 * 2 * 32 * 4)
    assert said.max_tokens == 2048
    assert said.tokenizer_json == byte_tokenizer().backend_tokenizer.to_str().encode()
    assert [r.name for r in said.recipes] == list(RECIPES)
    unusable = {r.name: r.unusable for r in said.recipes}
    assert "start the worker with --auxiliary" in unusable["cacheclip"]
    assert not unusable["prophetkv"]
    told = {r.name: (r.default_ratio, r.neighbours) for r in said.recipes}
    assert (told["full_attention"], told["prophetkv"], told["fusionrag"]) == ((1.0, 0), (0.2, 0), (0.15, 10))
    with pytest.raises(FailedPrecondition, match="this worker runs qwen3"):
        await rig.ask([1], [[2]], [3], model_fingerprint=b"x" * 32)
    assert (await rig.ask([1], [[2]], [3], model_fingerprint=said.fingerprint)).ids


def through(kv: Any, kind: torch.dtype, latent: bool) -> Any:
    """What is left of an oracle's KV, [1, kv_heads, tokens, head_dim] a layer, after storing it.

    latent: whether latents and rotary keys are stored as one row, [rotary key, latent].
    """
    pairs = [[torch.cat([v, k], -1)] if latent else [k, v] for k, v in kv]
    whole = torch.stack([torch.stack([each[0].transpose(0, 1) for each in pair]) for pair in pairs])
    back = restore(quantise(whole, kind), whole.dtype).transpose(2, 3)
    if latent:
        rotary = kv[0][1].shape[-1]
        return [(layer[:, ..., rotary:], layer[:, ..., :rotary]) for layer in back]
    return [(layer[0][None], layer[1][None]) for layer in back]


@pytest.mark.parametrize("kind", ["qwen3", "deepseek-v2"])
@pytest.mark.parametrize("store", KINDS)
async def test_what_comes_back_is_stale(store: str, kind: str, cached: Any, parts: Parts) -> None:
    system, chunks, question = parts
    plain, context = oracle(kind), sum(map(len, chunks))
    await (await cached(kind, store=store)).fill(*parts, ratio=0.0)
    rig = await cached(kind, store=store)
    context_kv, at = [plain.kv(system)], len(system)
    for chunk in chunks:
        stored = through(plain.alone(system, chunk, len(system)), KINDS[store], plain.latent)
        context_kv.append(plain.moved(stored, 0, len(chunk), at - len(system)))
        at += len(chunk)
    reused = plain.after(join(context_kv), question)
    # As computed it would be a float32 a number.
    size = sum(rig.servicer.loader.storage.size(len(c)) for c in chunks)
    assert size < 0.35 * context * rig.model.kv.token_bytes
    for ratio, expected in ((0.0, reused), (1.0, plain.full_attention(parts))):
        s = (await rig.ask(*parts, ratio=ratio, expected=expected)).summary
        assert (s.degraded, s.chunks_missed) == (False, 0)
        assert s.bytes_fetched == (0 if ratio else size), "once; then it is in the pool"
        assert s.tokens_lossless == 0, "not even the first chunk, which stands where it was encoded"
        assert s.tokens_recomputed == round(ratio * context)
    assert error(reused, plain.full_reuse(parts)) > CLOSE, "something was lost"

    # Other forms are other namespaces.
    assert (await (await cached(kind)).ask(*parts, ratio=0.0)).summary.chunks_missed == len(chunks)


@pytest.mark.parametrize("store", KINDS)
async def test_a_prefix_cache_takes_nothing_that_is_not_exact(store: str, cached: Any, parts: Parts) -> None:
    maker, rig = [await cached("llama", store=store) for _ in range(2)]
    asked = parts[0], parts[1][:2], parts[2]
    await maker.encode(parts[0], parts[1][:1], parts[1][1])
    answer = await rig.ask(*asked, recipe="prefix_cache", expected=oracle("llama").full_attention(asked))
    assert answer.summary.tokens_encoded == sum(map(len, asked[1]))
