"""Errors through real gRPC: each line of the Errors lists in fusion.proto, with its status and its reason."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.servicer import handler
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.fusion.v1 import fusion_pb2_grpc
from fusionkv.protos.runtime import errors


@asynccontextmanager
async def served(rig: Any) -> AsyncIterator[str]:
    """Address of a server over the rig's servicer."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(rig.servicer),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(1)


async def call(address: str, request: pb.GenerateRequest, timeout: float | None = None) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        async for _ in fusion_pb2_grpc.FusionServiceStub(channel).Generate(request, timeout=timeout):
            pass


async def answered(address: str, request: pb.GenerateRequest, timeout: float) -> None:
    """Through the gateway's client."""
    client = WorkerClient(address)
    try:
        async for _ in client.generate(request, timeout):
            pass
    finally:
        await client.close()


STATUSES = {
    "recipe": ({"recipe": "magic"}, grpc.StatusCode.INVALID_ARGUMENT, "unknown recipe"),
    "length": ({"max_tokens": 5000}, grpc.StatusCode.INVALID_ARGUMENT, "the model's limit of 2048 together"),
    "model": ({"model_fingerprint": bytes(32)}, grpc.StatusCode.FAILED_PRECONDITION, "fingerprint"),
    "pool": ({"max_tokens": 900}, grpc.StatusCode.RESOURCE_EXHAUSTED, "pool_bytes"),
}


@pytest.mark.parametrize("case", STATUSES)
async def test_generate(case: str, start: Any) -> None:
    change, status, message = STATUSES[case]
    rig = await start("llama", pool_bytes=1 << 20)
    fields = {"system": [1], "chunks": [[2, 3]], "question": [4], **change}
    request = rig.request(**fields)
    async with served(rig) as address:
        with pytest.raises(grpc.RpcError, match=message) as caught:
            await call(address, request)
    assert caught.value.code() is status


async def test_the_queue_is_full(start: Any) -> None:
    rig = await start("llama", max_requests=1, max_queue=0)
    async with served(rig) as address:
        gate, running = await rig.block([1], [[2]], [3])
        with pytest.raises(grpc.RpcError, match="try again later") as caught:
            await call(address, rig.request([1], [[2]], [3]))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.opened.set()
        await running
        await call(address, rig.request([1], [[2]], [3]))


async def test_a_deadline_that_the_queue_is_too_long_for(start: Any) -> None:
    """Refused at once, while one with time waits, and one that finds a place free is never refused."""
    rig = await start("llama", max_requests=1)
    admission = rig.servicer.answerer.admission
    async with served(rig) as address:
        gate, running = await rig.block([1], [[2]], [3])
        await asyncio.sleep(1.0)
        gate.opened.set()
        await running
        gate, running = await rig.block([1], [[2]], [3])
        waiting = [asyncio.create_task(rig.ask([1], [[2]], [3])) for _ in range(30)]
        await rig.until(lambda: admission.waiting == 30)
        # A request takes a second or more, so this one would wait for half a minute or more.
        with pytest.raises(
            errors.ResourceExhausted, match="30 requests are already waiting: the first token is"
        ) as caught:
            await answered(address, rig.request([1], [[2]], [3]), timeout=20)
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 5
        patient = asyncio.create_task(answered(address, rig.request([1], [[2]], [3]), timeout=100_000))
        await rig.until(lambda: admission.waiting == 31)
        gate.opened.set()
        await asyncio.gather(running, patient, *waiting)
        admission._held.value = admission._first.value = 1e6
        await answered(address, rig.request([1], [[2]], [3]), timeout=60)
        assert (admission.waiting, admission.running) == (0, 0)


@pytest.mark.parametrize("where", ["queue", "room", "engine", "decode"])
async def test_a_deadline_frees_everything(where: str, start: Any) -> None:
    more = {"max_requests": 1 if where == "queue" else 8, "pool_bytes": 4 << 20}
    rig = await start("llama", replace=lambda m: dataclasses.replace(m, ends=frozenset()), **more)
    held, gate, running = [], None, None
    if where in ("queue", "engine"):
        gate, running = await rig.block([1], [[2]], [3])
    if where == "room":
        held = [rig.pool.reserve(rig.pool.capacity)]
    # Of an answer that would take several times as long as it may.
    tokens = 1 if where != "decode" else 2000
    async with served(rig) as address:
        with pytest.raises(grpc.RpcError) as caught:
            await call(address, rig.request([1], [[2]], [3], max_tokens=tokens, stop=["\x00"]), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for runs in held:
            rig.pool.release(runs)
        if gate is not None:
            gate.opened.set()
            await running
        await rig.settled()
        await call(address, rig.request([1], [[2]], [3]))


async def test_a_caller_that_goes_away(start: Any) -> None:
    rig = await start("llama")
    async with served(rig) as address:
        client = WorkerClient(address)
        events = client.generate(rig.request([1], [[2]], [3], max_tokens=1500, stop=["\x00"]))
        await anext(events)
        assert rig.pool._fresh > 0
        await events.aclose()
        await rig.settled()
        stream = asyncio.create_task(anext(client.generate(rig.request([1], [[2]], [3]))))
        await stream
        await client.close()
        await rig.settled()


async def test_encode(start: Any) -> None:
    rig = await start("llama")
    chunk = pb.Tokens(ids=[1, 2])
    exact = pb.EncodeRequest.MODE_EXACT
    async with served(rig) as address:
        client = WorkerClient(address)
        with pytest.raises(errors.InvalidArgument, match="mode must be"):
            await client.encode(pb.EncodeRequest(chunk=chunk))
        with pytest.raises(errors.FailedPrecondition, match="fingerprint"):
            await client.encode(pb.EncodeRequest(chunk=chunk, mode=exact, model_fingerprint=bytes(32)))
        with pytest.raises(errors.Unavailable, match="no cache service"):
            await client.encode(pb.EncodeRequest(chunk=chunk, mode=exact))
        assert (await client.model()).family == "llama"
        await client.close()
