"""Prefill: the KV of a prompt as another engine gets it, goes on from it, and gives it back."""

import asyncio
import dataclasses
import hashlib
import mmap
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import DynamicCache

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.servicer import handler
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.checksum import checksum
from fusionkv.protos.runtime.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from tests.fusion_worker.oracle import network, random_ids


@pytest.fixture
def parts() -> tuple[list[int], list[list[int]], list[int]]:
    return random_ids(6, 1), [random_ids(n, n) for n in (21, 17, 9)], random_ids(5, 2)


@asynccontextmanager
async def client(rig: Any) -> AsyncIterator[WorkerClient]:
    """The gateway's client of a worker, over gRPC."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(rig.servicer),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = WorkerClient(f"127.0.0.1:{port}")
    try:
        yield made
    finally:
        await made.close()
        await server.stop(1)


def numbers(kv: pb.PrefilledKV, data: Any) -> torch.Tensor:
    """`[layers, 2, tokens, kv_heads, head_dim]`."""
    flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(getattr(torch, kv.dtype))
    return flat.view(kv.layers, 2, kv.tokens, kv.kv_heads, kv.head_dim)


def mapped(path: str) -> mmap.mmap:
    file = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(file, 0, prot=mmap.PROT_READ)
    finally:
        os.close(file)


@torch.inference_mode()
def continued(network: Any, kv: torch.Tensor, token: int, count: int) -> list[int]:
    """What an untouched model says behind a prompt's KV and its first token."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
    said = [token]
    while len(said) < count:
        logits = network(torch.tensor([said[-1:]]), past_key_values=cache).logits
        said.append(int(logits[0, -1].argmax()))
    return said


@pytest.mark.parametrize("recipe", ["full_attention", "full_reuse", "prophetkv"])
async def test_another_engine_goes_on_as_the_worker_would(family: str, recipe: str, start: Any, parts: Any) -> None:
    rig = await start(family)
    await rig.ask(*parts)  # so that chunks are reused
    told = await rig.ask(*parts, recipe=recipe, max_tokens=6)
    async with client(rig) as worker:
        request = pb.PrefillRequest(prompt=rig.request(*parts, recipe=recipe, max_tokens=6))
        async with aclosing(worker.prefill(request)) as events:
            first = (await anext(events)).first
            prompt = [*parts[0], *(i for chunk in parts[1] for i in chunk), *parts[2]]
            kv = (await anext(events)).kv
            assert kv.prompt_digest == hashlib.sha256(np.array(prompt, "<u4").tobytes()).digest()
            assert first.lossless == (recipe == "full_attention")
            data = mapped(kv.path)
            assert checksum(data) == kv.checksum
            assert continued(network(family), numbers(kv, data), first.token.id, 6) == told.ids
            await rig.settled()  # the pool has its slots back while the KV waits
            await worker.release_prefill(kv.handle)
            summary = (await anext(events)).summary
    assert (summary.tokens_generated, summary.degraded) == (1, False)
    assert summary.tokens_recomputed == told.summary.tokens_recomputed
    assert rig.servicer.answerer.handover.bytes == 0


async def test_kv_is_streamed_by_heads(start: Any, parts: Any) -> None:
    rig = await start("qwen2")
    async with client(rig) as worker:
        async with aclosing(worker.prefill(pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=8)))) as events:
            _, kv = await anext(events), (await anext(events)).kv
            whole = numbers(kv, mapped(kv.path))
            size = whole.numel() * whole.itemsize
            streamed = bytearray(size)
            await worker.fetch_prefill(kv.handle, 0, 1, memoryview(streamed), 10)
            assert checksum(streamed) == kv.checksum
            for rank, heads in enumerate(whole.chunk(2, dim=3)):
                part = bytearray(size // 2)
                await worker.fetch_prefill(kv.handle, rank, 2, memoryview(part), 10)
                assert bytes(part) == heads.contiguous().numpy().tobytes()
            with pytest.raises(InvalidArgument, match="rank 0 of 3: no such share of 4 KV heads"):
                await worker.fetch_prefill(kv.handle, 0, 3, memoryview(streamed), 10)
            with pytest.raises(InvalidArgument, match="rank 2 of 2"):
                await worker.fetch_prefill(kv.handle, 2, 2, memoryview(streamed), 10)
            with pytest.raises(DataLoss, match="arrived damaged"):
                await worker.fetch_prefill(kv.handle, 0, 1, memoryview(bytearray(size + 1)), 10)
            await worker.release_prefill(kv.handle, ranks=2)
            await worker.hold_prefill(kv.handle, 10)  # the other rank has not
            await worker.release_prefill(kv.handle, ranks=2)
            assert not (await anext(events)).summary.degraded
        with pytest.raises(NotFound, match="released, or timed out"):
            await worker.hold_prefill(kv.handle, 10)


async def test_what_nobody_fetches_is_dropped(start: Any, parts: Any) -> None:
    rig = await start("llama", prefill_seconds=0.3)
    async with client(rig) as worker:
        events = worker.prefill(pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=8)))
        _, kv = await anext(events), (await anext(events)).kv
        for _ in range(3):  # longer together than the time of one
            await asyncio.sleep(0.2)
            await worker.hold_prefill(kv.handle, 10)
        summary = (await anext(events)).summary
        assert summary.degraded_reason == "the prompt's KV was not fetched within 0.3 s"
        with pytest.raises(NotFound):
            await worker.hold_prefill(kv.handle, 10)
        with pytest.raises(FileNotFoundError):
            mapped(kv.path)


async def test_why_kv_was_not_used(start: Any, parts: Any) -> None:
    rig = await start("llama")
    async with client(rig) as worker:
        events = worker.prefill(pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=8)))
        _, kv = await anext(events), (await anext(events)).kv
        await worker.release_prefill(kv.handle, ranks=4, error="another dtype")
        summary = (await anext(events)).summary
        assert (summary.degraded, summary.degraded_reason) == (True, "another dtype")
        await worker.release_prefill(kv.handle)  # once more is no error


async def test_a_caller_that_leaves_frees_the_kv(start: Any, parts: Any) -> None:
    rig = await start("llama")
    async with client(rig) as worker:
        events = worker.prefill(pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=8)))
        _, kv = await anext(events), (await anext(events)).kv
        await events.aclose()
        await rig.until(lambda: rig.servicer.answerer.handover.bytes == 0)
        with pytest.raises(NotFound):
            await worker.hold_prefill(kv.handle, 10)


async def test_an_answer_of_one_token_has_no_kv(start: Any, parts: Any) -> None:
    told = await (await start("llama")).ask(*parts)
    rig = await start("llama", replace=lambda model: dataclasses.replace(model, ends=frozenset(told.ids)))
    request = pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=8))
    events = [e async for e in rig.servicer.Prefill(request, None)]
    assert [e.WhichOneof("event") for e in events] == ["first", "summary"]
    assert events[0].first.finish_reason == "end"
    assert events[1].summary.finish_reason == "end"


@pytest.mark.parametrize("recipe", ["ape", "prophetkv+snapkv(8)", "prophetkv+adaptive(20,900)"])
async def test_what_only_the_worker_can_decode(recipe: str, start: Any, parts: Any) -> None:
    rig = await start("llama")
    with pytest.raises(FailedPrecondition, match="only the fusion worker can decode an answer by"):
        await anext(rig.servicer.Prefill(pb.PrefillRequest(prompt=rig.request(*parts, recipe=recipe)), None))


async def test_room(start: Any, parts: Any) -> None:
    tokens = len(parts[0]) + sum(map(len, parts[1])) + len(parts[2])
    each = tokens * (await start("llama")).model.token_bytes
    rig = await start("llama", prefill_bytes=2 * each - 1)
    request = pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=8))
    first = rig.servicer.Prefill(request, None)
    await anext(first)
    with pytest.raises(ResourceExhausted, match="try again, or raise prefill_bytes"):
        await anext(rig.servicer.Prefill(request, None))
    await first.aclose()
    again = rig.servicer.Prefill(request, None)
    await anext(again)
    await again.aclose()


async def test_an_answer_of_one_token_is_not_handed_over(start: Any, parts: Any) -> None:
    rig = await start("llama")
    request = pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=1))
    async with asyncio.timeout(20):
        events = [e async for e in rig.servicer.Prefill(request, None)]
    assert [e.WhichOneof("event") for e in events] == ["first", "summary"]
    assert events[0].first.finish_reason == "max_tokens"
    assert not events[1].summary.degraded
