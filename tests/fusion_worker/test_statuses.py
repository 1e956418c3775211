"""Errors through real gRPC: each line of the Errors lists in fusion.proto, with its status and its reason."""

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.servicer import handler
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.fusion.v1 import fusion_pb2_grpc
from fusionkv.protos.runtime import errors
from tests.services import listening

PROMPT = [1], [[2]], [3]


async def call(rig: Any, timeout: float | None = None, **request: Any) -> None:
    """Asks by gRPC itself."""
    async with listening(handler(rig.servicer)) as address, grpc.aio.insecure_channel(address) as channel:
        asked = rig.request(*PROMPT, **request)
        async for _ in fusion_pb2_grpc.FusionServiceStub(channel).Generate(asked, timeout=timeout):
            pass


async def answered(client: WorkerClient, rig: Any, timeout: float) -> None:
    """Through the gateway's client."""
    async for _ in client.generate(rig.request(*PROMPT), Deadline.after(timeout)):
        pass


async def test_a_deadline_that_the_queue_is_too_long_for(start: Any) -> None:
    """Refused at once, while one with time waits, and one that finds a place free is never refused."""
    rig = await start("llama", max_requests=1)
    admission = rig.servicer.answerer.admission
    async with rig.client() as client:
        gate, running = await rig.block(*PROMPT)
        await asyncio.sleep(1.0)
        gate.opened.set()
        await running
        gate, running = await rig.block(*PROMPT)
        waiting = [asyncio.create_task(rig.ask(*PROMPT)) for _ in range(30)]
        await rig.until(lambda: admission.waiting == 30)
        # A request takes a second or more, so this one would wait for half a minute or more.
        message = "30 requests are already waiting: the first token is"
        with pytest.raises(errors.ResourceExhausted, match=message) as caught:
            await answered(client, rig, timeout=20)
        assert (caught.value.retry_after or 0) > 5
        patient = asyncio.create_task(answered(client, rig, timeout=100_000))
        await rig.until(lambda: admission.waiting == 31)
        gate.opened.set()
        await asyncio.gather(running, patient, *waiting)
        admission._held = admission._first = 1e6
        await answered(client, rig, timeout=60)
        assert (admission.waiting, admission.running) == (0, 0)


@pytest.mark.parametrize("where", ["queue", "room", "engine", "decode"])
async def test_a_deadline_frees_everything(where: str, start: Any) -> None:
    more = {"max_requests": 1 if where == "queue" else 8, "pool_bytes": 4 << 20}
    rig = await start("llama", replace=lambda m: dataclasses.replace(m, ends=frozenset()), **more)
    blocked = await rig.block(*PROMPT) if where in ("queue", "engine") else None
    held = rig.pool.reserve(rig.pool.capacity) if where == "room" else None
    with pytest.raises(grpc.RpcError) as caught:
        # Of an answer that would take several times as long as it may.
        await call(rig, timeout=0.3, max_tokens=2000 if where == "decode" else 1, stop=["\x00"])
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    if held is not None:
        rig.pool.release(held)
    if blocked is not None:
        blocked[0].opened.set()
        await blocked[1]
    await rig.settled()
    await call(rig)


async def test_a_caller_that_goes_away(start: Any) -> None:
    rig = await start("llama")
    async with rig.client() as client:
        events = client.generate(rig.request(*PROMPT, max_tokens=1500, stop=["\x00"]))
        await anext(events)
        assert rig.pool._fresh > 0
        await events.aclose()
        await rig.settled()
        await anext(client.generate(rig.request(*PROMPT)))
