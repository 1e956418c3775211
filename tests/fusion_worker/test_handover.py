"""Prefill: the KV of a prompt as another engine gets it, goes on from it, and gives it back."""

import asyncio
import dataclasses
import hashlib
import mmap
import os
import resource
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.checksum import checksum
from fusionkv.protos.runtime.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from fusionkv.vllm_connector.background import Background
from fusionkv.vllm_connector.options import ConnectorOptions
from fusionkv.vllm_connector.pages import Pages
from fusionkv.vllm_connector.prompts import FusedPrompt, KVLoad
from fusionkv.vllm_connector.worker import ConnectorWorker
from tests.fusion_worker.oracle import Parts, oracle, whole
from tests.waiting import until


@asynccontextmanager
async def prefilled(rig: Any, parts: Parts, **more: Any) -> AsyncIterator[tuple[WorkerClient, Any, Any, Any]]:
    """The gateway's client, events that are yet to come, the first token, and the KV."""
    request = pb.PrefillRequest(prompt=rig.request(*parts, **{"max_tokens": 8, **more}))
    async with rig.client() as worker, aclosing(worker.prefill(request)) as events:
        yield worker, events, (await anext(events)).first, (await anext(events)).kv


def numbers(kv: pb.PrefilledKV, data: Any) -> torch.Tensor:
    """`[layers, 2, tokens, kv_heads, head_dim]`."""
    flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(getattr(torch, kv.dtype))
    return flat.view(kv.layers, 2, kv.tokens, kv.kv_heads, kv.head_dim)


def mapped(path: str) -> mmap.mmap:
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


@pytest.mark.parametrize("recipe", ["full_attention", "full_reuse", "prophetkv"])
async def test_another_engine_goes_on_as_the_worker_would(varied: str, recipe: str, start: Any, parts: Any) -> None:
    rig = await start(varied)
    if oracle(varied).latent:
        with pytest.raises(FailedPrecondition, match="stores latents, from which other engines can't decode"):
            await anext(rig.servicer.Prefill(pb.PrefillRequest(prompt=rig.request(*parts, recipe=recipe)), None))
        return
    await rig.ask(*parts)  # so that chunks are reused
    told = await rig.ask(*parts, recipe=recipe, max_tokens=6)
    async with prefilled(rig, parts, recipe=recipe, max_tokens=6) as (worker, events, first, kv):
        assert kv.prompt_digest == hashlib.sha256(np.array(whole(parts), "<u4").tobytes()).digest()
        assert first.lossless == (recipe == "full_attention")
        data = mapped(kv.path)
        assert checksum(data) == kv.checksum
        context = [(k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for k, v in numbers(kv, data)]
        said = [first.token.id]
        while len(said) < 6:
            said.append(int(oracle(varied).after(context, said).argmax()))
        assert said == told.ids
        await rig.settled()  # the pool has its slots back while the KV waits
        await worker.release_prefill(kv.handle)
        summary = (await anext(events)).summary
    found = summary.tokens_generated, summary.degraded, summary.tokens_recomputed
    assert found == (1, False, told.summary.tokens_recomputed)
    assert rig.servicer.answerer.handover.bytes == 0


async def test_kv_is_streamed_by_heads(start: Any, parts: Parts) -> None:
    async with prefilled(await start("qwen2"), parts) as (worker, events, _, kv):
        every = numbers(kv, mapped(kv.path))
        size = every.numel() * every.itemsize
        streamed = bytearray(size)
        await worker.fetch_prefill(kv.handle, 0, 1, memoryview(streamed), 10)
        assert checksum(streamed) == kv.checksum
        for rank, heads in enumerate(every.chunk(2, dim=3)):
            part = bytearray(size // 2)
            await worker.fetch_prefill(kv.handle, rank, 2, memoryview(part), 10)
            assert bytes(part) == heads.contiguous().numpy().tobytes()
        for rank, ranks, room, error, message in (
            (0, 3, size, InvalidArgument, "rank 0 of 3: no such share of 4 KV heads"),
            (2, 2, size, InvalidArgument, "rank 2 of 2"),
            (0, 1, size + 1, DataLoss, "arrived damaged"),
        ):
            with pytest.raises(error, match=message):
                await worker.fetch_prefill(kv.handle, rank, ranks, memoryview(bytearray(room)), 10)
        await worker.release_prefill(kv.handle, ranks=2)
        await worker.hold_prefill(kv.handle, 10)  # the other rank has not
        await worker.release_prefill(kv.handle, ranks=2)
        assert not (await anext(events)).summary.degraded
        with pytest.raises(NotFound, match="released, or timed out"):
            await worker.hold_prefill(kv.handle, 10)


class Layer:
    """An attention layer of a rank of vLLM that holds one KV head."""

    num_kv_heads = 1

    def __init__(self, head_size: int) -> None:
        self.impl, self.head_size = self, head_size

    def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        cache.view(-1, 2 * self.head_size)[slots] = torch.cat([keys, values], dim=-1)[:, 0]


async def test_ranks_that_hold_the_same_heads_all_get_the_kv(start: Any, parts: Parts) -> None:
    """As with vLLM at 8 ranks and a model of 4 KV heads."""
    background = Background("", None)
    try:
        async with prefilled(await start("qwen2"), parts) as (worker, events, _, kv):
            every = numbers(kv, mapped(kv.path))
            named = ("handle", "prompt_digest", "model_fingerprint", "checksum")
            about = {name: getattr(kv, name) for name in ("tokens", "dtype", "layers", "kv_heads", "head_dim")}
            hexed = {name: getattr(kv, name).hex() for name in named}
            prompt = FusedPrompt(worker=worker.address, path="", **about, **hexed)
            mine = range(-(-kv.tokens // 16))
            for reader in range(8):
                caches = {f"layers.{n}": torch.zeros(len(mine), 16, 2 * kv.head_dim) for n in range(kv.layers)}
                pages = Pages(caches, dict.fromkeys(caches, Layer(kv.head_dim)), len(mine))
                rank = ConnectorWorker(background, pages, reader // 2, 4, 8, ConnectorOptions())
                rank.start([KVLoad("0", tuple(mine), 0, kv.tokens, prompt)])
                await until(lambda rank=rank: rank.finished()[1] is not None)  # type: ignore[misc]
                assert rank.failed_pages() == set(), f"rank {reader} came too late"
                assert pages.read(mine, 0, kv.tokens).equal(every.chunk(4, dim=3)[reader // 2])
            assert not (await anext(events)).summary.degraded
    finally:
        background.close()


async def test_what_nobody_fetches_is_dropped(start: Any, parts: Parts) -> None:
    async with prefilled(await start("llama", prefill_seconds=0.3), parts) as (worker, events, _, kv):
        for _ in range(3):  # longer together than the time of one
            await asyncio.sleep(0.2)
            await worker.hold_prefill(kv.handle, 10)
        summary = (await anext(events)).summary
        assert summary.degraded_reason == "the prompt's KV was not fetched within 0.3 s"
        with pytest.raises(NotFound):
            await worker.hold_prefill(kv.handle, 10)
        with pytest.raises(FileNotFoundError):
            mapped(kv.path)


async def test_why_kv_was_not_used(start: Any, parts: Parts) -> None:
    async with prefilled(await start("llama"), parts) as (worker, events, _, kv):
        await worker.release_prefill(kv.handle, ranks=4, error="another dtype")
        summary = (await anext(events)).summary
        assert (summary.degraded, summary.degraded_reason) == (True, "another dtype")
        await worker.release_prefill(kv.handle)  # once more is no error


async def test_a_caller_that_leaves_frees_the_kv(start: Any, parts: Parts) -> None:
    rig = await start("llama")
    async with prefilled(rig, parts) as (worker, events, _, kv):
        (held,), freed = rig.servicer.answerer.handover._held.values(), list[threading.Thread]()
        weakref.finalize(held.data, lambda: freed.append(threading.current_thread()))
        await events.aclose()
        await rig.until(lambda: rig.servicer.answerer.handover.bytes == 0)
        await rig.until(lambda: bool(freed))
        assert freed[0] is not threading.current_thread(), "the event loop waits for it"
        with pytest.raises(NotFound):
            await worker.hold_prefill(kv.handle, 10)


@pytest.mark.parametrize("reason", ["end", "max_tokens"])
async def test_an_answer_of_one_token_is_not_handed_over(reason: str, start: Any, parts: Parts) -> None:
    told = await (await start("llama")).ask(*parts)
    ends = frozenset(told.ids) if reason == "end" else frozenset()
    rig = await start("llama", replace=lambda model: dataclasses.replace(model, ends=ends))
    request = pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=8 if reason == "end" else 1))
    async with asyncio.timeout(20):
        first, last = [e async for e in rig.servicer.Prefill(request, None)]
    assert (first.WhichOneof("event"), last.WhichOneof("event")) == ("first", "summary")
    assert (first.first.finish_reason, last.summary.finish_reason) == (reason, reason)
    assert not last.summary.degraded


@pytest.mark.parametrize("recipe", ["ape", "prophetkv+snapkv(8)"])
async def test_what_only_the_worker_can_decode(recipe: str, start: Any, parts: Any) -> None:
    rig = await start("llama")
    with pytest.raises(FailedPrecondition, match="only the fusion worker can decode an answer by"):
        await anext(rig.servicer.Prefill(pb.PrefillRequest(prompt=rig.request(*parts, recipe=recipe)), None))


async def test_room(start: Any, parts: Parts) -> None:
    each = len(whole(parts)) * (await start("llama")).model.token_bytes
    rig = await start("llama", prefill_bytes=2 * each - 1)
    request = pb.PrefillRequest(prompt=rig.request(*parts, max_tokens=8))
    for _ in range(2):
        async with aclosing(rig.servicer.Prefill(request, None)) as first:
            await anext(first)
            with pytest.raises(ResourceExhausted, match="try again, or raise prefill_bytes"):
                await anext(rig.servicer.Prefill(request, None))


async def test_no_file_for_the_kv(start: Any, parts: Parts) -> None:
    """The gateway then has vLLM prefill the prompt; other errors end the answer."""
    rig = await start("llama")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        with ExitStack() as opened, pytest.raises(ResourceExhausted, match="Too many open files"):
            [opened.enter_context(rig.servicer.answerer.handover.room(1)) for _ in range(soft)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert rig.servicer.answerer.handover.bytes == 0
