"""The gateway's asynchronous client of one fusion worker; imports no torch."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.fusion.v1 import fusion_pb2_grpc
from fusionkv.protos.runtime import errors, frames, rpc
from fusionkv.protos.runtime.checksum import Checksum
from fusionkv.protos.runtime.tls import ClientTLS

# A gateway's recipe for requests that name none, unless its configuration says otherwise.
DEFAULT_RECIPE = "prophetkv+corrected"
# What a request may call the gateway's recipe.
DEFAULT = "default"
_MODEL_SECONDS = 30.0
# Trailing metadata of FetchPrefill.
CHECKSUM = "fusionkv-checksum-bin"


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
        self._fetch: Any = self._channel.unary_stream(
            "/fusion.v1.FusionService/FetchPrefill",
            request_serializer=pb.FetchPrefillRequest.SerializeToString,
            response_deserializer=None,  # KV bytes go round protobuf (frames.py)
        )
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

    async def prefill(
        self, request: pb.PrefillRequest, timeout: float | None = None
    ) -> AsyncGenerator[pb.PrefillResponse]:
        """The first token with the KV of the prompt, then a summary. Closing the iterator frees the KV."""
        call = self._stub.Prefill(request, timeout=timeout)
        try:
            with self._errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def hold_prefill(self, handle: bytes, timeout: float) -> None:
        """Keeps a prompt's KV for the worker's time from now on. Raises NotFound when it is gone."""
        with self._errors():
            await self._stub.HoldPrefill(pb.HoldPrefillRequest(handle=handle), timeout=timeout)

    async def fetch_prefill(self, handle: bytes, rank: int, ranks: int, into: memoryview, timeout: float) -> None:
        """Fills `into` with a prompt's KV, or with one rank's heads of it.

        Raises:
            DataLoss: other bytes arrived than the worker sent.
            NotFound: the KV is gone.
        """
        request = pb.FetchPrefillRequest(handle=handle, rank=rank, ranks=ranks)
        call = self._fetch(request, timeout=timeout)
        hasher, at = Checksum(), 0
        try:
            with self._errors():
                async for message in call:
                    data = frames.decode_frame(message)
                    end = at + len(data)
                    if end > len(into):
                        break
                    into[at:end] = data
                    hasher.update(data)
                    at = end
                sent = dict(await call.trailing_metadata()).get(CHECKSUM)
        except ValueError as error:
            raise errors.DataLoss(f"fusion worker {self.address}: {error}") from error
        finally:
            call.cancel()
        if at != len(into) or sent != hasher.digest():
            raise errors.DataLoss(f"a prompt's KV arrived damaged from the fusion worker {self.address}")

    async def release_prefill(self, handle: bytes, ranks: int = 1, error: str = "", timeout: float = 5.0) -> None:
        """Ends one rank's use of a prompt's KV; error: why it could not be used."""
        with self._errors():
            request = pb.ReleasePrefillRequest(handle=handle, ranks=ranks, error=error)
            await self._stub.ReleasePrefill(request, timeout=timeout)

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
