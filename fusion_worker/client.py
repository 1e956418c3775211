"""The gateway's asynchronous client of one fusion worker; imports no torch."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.fusion.v1 import fusion_pb2_grpc
from fusionkv.protos.runtime import errors, rpc
from fusionkv.protos.runtime.tls import ClientTLS

# A gateway's recipe for requests that name none, unless its configuration says otherwise.
DEFAULT_RECIPE = "prophetkv+corrected"
# What a request may call the gateway's recipe.
DEFAULT = "default"
_MODEL_SECONDS = 30.0


class WorkerClient:
    """Calls one worker at `host:port` or `unix:/path`.

    Every call raises the `protos.errors` class of the status it failed with; the message names the worker. Safe for
    concurrent use within one event loop; must be made inside a running loop.
    """

    def __init__(self, address: str, tls: ClientTLS | None = None, name: str = "") -> None:
        """`name`: what the worker's certificate names, where that is not the address."""
        self.address = address
        self._channel = rpc.dial(address, tls=tls, name=name)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._stub = fusion_pb2_grpc.FusionServiceStub(self._channel)
        self._model: pb.GetModelResponse | None = None
        self._asking = asyncio.Lock()
        self._watching = asyncio.create_task(self._forget_when_lost())

    @property
    def connected(self) -> bool:
        """Whether the worker answered when it was last tried, which is about once a second."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def answers(self, timeout: float) -> bool:
        """Whether the worker answers a health check in time: one that stands still, or was cut off, does not."""
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError:
            return False
        return True

    async def model(self, timeout: float = _MODEL_SECONDS) -> pb.GetModelResponse:
        """What the worker runs, asked once for each connection."""
        async with self._asking:
            if self._model is None:
                with self._errors():
                    self._model = await self._stub.GetModel(pb.GetModelRequest(), timeout=timeout)
            return self._model

    async def generate(
        self, request: pb.GenerateRequest, timeout: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Tokens, then one summary. Closing the iterator, or cancelling its reader, cancels the call."""
        call = self._stub.Generate(request, timeout=timeout)
        try:
            with self._errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def encode(self, request: pb.EncodeRequest, timeout: float | None = None) -> pb.EncodeResponse:
        """Encodes one chunk and waits until the cache service holds it."""
        with self._errors():
            return await self._stub.Encode(request, timeout=timeout)

    async def close(self) -> None:
        """Ends the connection; calls in flight are cancelled."""
        self._watching.cancel()
        await self._channel.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise errors.from_rpc(error, f"fusion worker {self.address}") from error

    async def _forget_when_lost(self) -> None:
        """Another process, with another model, may answer on the next connection."""
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is not grpc.ChannelConnectivity.READY:
                self._model = None
            await self._channel.wait_for_state_change(state)
