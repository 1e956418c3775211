"""Which calls the Python clients make again: those that could not be delivered, and no others."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fusionkv.gateway.client.client import AsyncClient, Client
from fusionkv.protos.answer.v1.answer_pb2 import Summary, Token
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import errors, rpc
from tests.services import listening

SERVICE = pb.DESCRIPTOR.services_by_name["GatewayService"]


class Servicer:
    """Raises `error` for the first calls of each, as a gateway whose workers are gone does, and then answers."""

    def __init__(self) -> None:
        self.calls, self.failing = 0, 0
        self.error: errors.ServiceError = errors.Unavailable("no worker")

    def _called(self) -> None:
        self.calls += 1
        if self.calls <= self.failing:
            raise self.error

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:
        self._called()
        return pb.ListResponse()

    async def PlanPrecompute(self, request: pb.PlanPrecomputeRequest, context: Any) -> Any:
        self._called()
        yield pb.PlanPrecomputeResponse()

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        self._called()
        return pb.DeleteResponse(documents=1)

    async def Ingest(self, request: pb.IngestRequest, context: Any) -> pb.IngestResponse:
        self._called()
        return pb.IngestResponse(chunks=len(request.content))

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        if request.question == "broken":
            self.calls += 1
            yield pb.GenerateResponse(token=Token(text="half"))
            raise self.error
        self._called()
        yield pb.GenerateResponse(token=Token(text="whole"))
        yield pb.GenerateResponse(summary=Summary(finish_reason="end"))

    # Called by no test.
    Upload = Precompute = Retrieve = GetModel = Stats = Move = List


Served = tuple[Servicer, str]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    servicer = Servicer()
    async with listening(rpc.handlers(SERVICE, servicer)) as address:
        yield servicer, address


async def test_what_could_not_be_delivered_is_tried_again(served: Served) -> None:
    servicer, address = served
    servicer.failing = 2
    with Client(address, timeout=60) as blocking:
        async with AsyncClient(address, timeout=60) as client:
            assert (await client.ask("c", "q")).text == "whole"
            assert servicer.calls == 3
            servicer.calls = 0
            # Larger than what gRPC keeps for another try by itself.
            assert (await client.ingest("c", "d.txt", b"x" * (1 << 20))).chunks == 1 << 20
            assert servicer.calls == 3
        servicer.calls = 0
        assert (await asyncio.to_thread(blocking.ask, "c", "q")).text == "whole"
        assert servicer.calls == 3


@pytest.mark.parametrize(
    ("call", "error", "calls"),
    [
        (lambda client: client.list(), errors.Unavailable("no worker"), 5),
        # What began, changes something or was refused is not.
        (lambda client: client.ask("c", "broken"), errors.Unavailable("no worker"), 1),
        (lambda client: client.delete("c"), errors.Unavailable("no worker"), 1),
        (lambda client: client.ask("c", "q"), errors.ResourceExhausted("too many", retry_after=0.5), 1),
    ],
)
async def test_it_gives_up_and_says_why(served: Served, call: Any, error: errors.ServiceError, calls: int) -> None:
    servicer, address = served
    servicer.failing, servicer.error = 100, error
    async with AsyncClient(address, timeout=60) as client:
        with pytest.raises(type(error), match=str(error)) as raised:
            await call(client)
    assert servicer.calls == calls
    assert raised.value.retry_after == error.retry_after or error.retry_after is None
