"""Encoding ahead of time: what it stores, what it answers, and when it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.recipes.recipes import RECIPES
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient, HitKind
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from tests.fusion_worker.oracle import byte_tokenizer, oracle, random_ids


@pytest.mark.system
@pytest.mark.parametrize("mode", ["EXACT", "NEIGHBOURS"])
async def test_encoding_twice_is_encoding_once(mode: str, cache_service: str, start: Any, tenant: str) -> None:
    system, a, b, c = (random_ids(n, n) for n in (5, 9, 12, 20))
    rig = await start("llama", cache=cache_service)
    client = CacheClient(cache_service)
    puts = (await client.stats()).puts
    first = await rig.encode(system, [a, b], c, mode, tenant)
    stored = (await client.stats()).puts - puts
    assert not first.existed
    assert first.tokens == 20
    assert bool(first.variant) == (mode == "NEIGHBOURS")
    for worker in (rig, await start("llama", cache=cache_service)):
        again = await worker.encode(system, [a, b], c, mode, tenant)
        assert (again.key, again.variant, again.existed) == (first.key, first.variant, True)
    await rig.stored()
    assert (await client.stats()).puts - puts == stored == 4, "system prompt, two before it and the chunk, once each"

    space = keys.namespace(rig.model.fingerprint, rig.model.settings, tenant)
    path = [(keys.chunk_digest(x), ()) for x in (system, a, b)] + [(keys.chunk_digest(c), (first.variant,))]
    if mode == "NEIGHBOURS":
        path[-1] = (keys.chunk_digest(c), (first.variant,))
    else:
        path[-1] = (keys.chunk_digest(c), ())
    hit = (await client.lookup(space, path, timeout=5)).hits[-1]
    assert hit.kind is (HitKind.EXACT if mode == "EXACT" else HitKind.ALTERNATIVE)
    assert hit.entry.key == first.key
    assert hit.entry.base == 5 + 9 + 12
    buffer = torch.empty(hit.entry.size, dtype=torch.uint8)
    await client.fetch(hit.entry, buffer.numpy().data, timeout=5)
    found = buffer.view(torch.float32).view(3, 2, 20, 2, 32)
    plain = oracle("llama")
    past = plain.kv([*system, *a, *b]) if mode == "EXACT" else plain.reused(system, [a, b])
    for layer, (k, v) in enumerate(plain.kv(c, past=past)):
        for i, tensor in enumerate((k, v)):
            torch.testing.assert_close(found[layer, i], tensor[0, :, -20:].transpose(0, 1), atol=1e-4, rtol=1e-4)
    await client.close()


async def test_encoding_without_a_cache_service(start: Any, tenant: str) -> None:
    for cache, message in (("", "no cache service"), ("127.0.0.1:1", "cache service at 127.0.0.1:1")):
        rig = await start("llama", cache=cache, lookup_timeout=0.5)
        for mode in ("EXACT", "NEIGHBOURS"):
            with pytest.raises(Unavailable, match=message):
                await rig.encode([1], [[2]], [3, 4], mode, tenant)
        await rig.settled()


@pytest.mark.system
async def test_a_cache_service_that_refuses_the_bytes(start: Any, launch: Any, tmp_path: Path, tenant: str) -> None:
    flags = ("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path), "--max-entry-bytes", "10000")
    rig = await start("llama", cache=launch("fusionkv.kvcache_service", *flags).address)
    assert not (await rig.encode([1], [], [2] * 6, "EXACT", tenant)).existed
    for mode in ("EXACT", "NEIGHBOURS"):
        with pytest.raises(Unavailable, match="put at the cache service"):
            await rig.encode([1], [], [2] * 7, mode, tenant)
    answer = await rig.ask([1], [[2] * 7], [3], tenant=tenant)
    assert not answer.summary.degraded


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mode": pb.EncodeRequest.MODE_UNSPECIFIED}, InvalidArgument, "mode must be"),
        ({"chunk": pb.Tokens()}, InvalidArgument, "chunk 1 is empty"),
        ({"before": [pb.Tokens()]}, InvalidArgument, "chunk 0 is empty"),
        ({"chunk": pb.Tokens(ids=[260])}, InvalidArgument, "token id 260"),
        ({"chunk": pb.Tokens(ids=[1] * 2048)}, InvalidArgument, "exceed the model's limit of 2048"),
        ({"tenant": "x" * 257}, InvalidArgument, "tenant"),
        ({"model_fingerprint": b"x" * 32}, FailedPrecondition, "this worker runs llama"),
        ({"chunk": pb.Tokens(ids=[1] * 1000)}, ResourceExhausted, "pool_bytes"),
    ],
    ids=str,
)
@pytest.mark.system
async def test_encoding_that_is_refused(
    change: dict[str, Any], error: type[Exception], message: str, cache_service: str, start: Any, tenant: str
) -> None:
    rig = await start("llama", cache=cache_service, pool_bytes=1 << 20)
    fields = {
        "system": pb.Tokens(ids=[1]),
        "before": [pb.Tokens(ids=[2])],
        "chunk": pb.Tokens(ids=[3]),
        "mode": pb.EncodeRequest.MODE_EXACT,
        "tenant": tenant,
    }
    with pytest.raises(error, match=message):
        await rig.servicer.Encode(pb.EncodeRequest(**{**fields, **change}), None)
    fits = {**fields, "model_fingerprint": rig.model.fingerprint}
    assert (await rig.servicer.Encode(pb.EncodeRequest(**fits), None)).tokens == 1


async def test_a_model_says_what_it_is(start: Any) -> None:
    rig = await start("qwen3")
    said = await rig.servicer.GetModel(pb.GetModelRequest(), None)
    assert (said.name, said.family, said.dtype, said.device) == ("qwen3", "qwen3", "float32", "cpu")
    assert said.fingerprint == rig.model.fingerprint
    assert said.kv_bytes_per_token == 3 * 2 * 2 * 32 * 4
    assert (said.bos_token, said.max_tokens) == (256, 2048)
    assert said.tokenizer_json == byte_tokenizer().backend_tokenizer.to_str().encode()
    assert [r.name for r in said.recipes] == list(RECIPES)
    assert "start the worker with --auxiliary" in next(r.unusable for r in said.recipes if r.name == "cacheclip")
    assert not next(r.unusable for r in said.recipes if r.name == "prophetkv")
    told = {r.name: (r.default_ratio, r.neighbours) for r in said.recipes}
    assert (told["full_attention"], told["prophetkv"], told["fusionrag"]) == ((1.0, 0), (0.2, 0), (0.15, 10))
    with pytest.raises(FailedPrecondition, match="this worker runs qwen3"):
        await rig.ask([1], [[2]], [3], model_fingerprint=b"x" * 32)
    assert (await rig.ask([1], [[2]], [3], model_fingerprint=said.fingerprint)).ids
