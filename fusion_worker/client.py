"""The asynchronous client of a fusion worker, for the gateway and the vLLM connector; does not import torch."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fusionkv.protos.deadline import NO_DEADLINE, Deadline
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.fusion.v1 import fusion_pb2_grpc
from fusionkv.protos.runtime import errors, frames, rpc
from fusionkv.protos.runtime.tls import ClientTLS

_SERVICE = pb.DESCRIPTOR.services_by_name["FusionService"].full_name
# Trailing metadata key of FetchPrefill.
CHECKSUM = "fusionkv-checksum-bin"
_RELEASE_SECONDS = 5.0


class WorkerClient:
    """Calls one worker at `host:port` or `unix:/path`.

    A call that fails raises the class of `protos.runtime.errors` for its status; the message names the worker. Safe
    for concurrent use within one event loop. Create it inside a running loop.
    """

    def __init__(self, address: str, tls: ClientTLS | None = None, name: str = "") -> None:
        """name: host name in the worker's certificate, if it differs from the address."""
        self.address = address
        self._channel = rpc.dial(address, tls=tls, name=name)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._stub = fusion_pb2_grpc.FusionServiceStub(self._channel)
        self._fetch: Any = self._channel.unary_stream(
            "/fusion.v1.FusionService/FetchPrefill",
            request_serializer=pb.FetchPrefillRequest.SerializeToString,
            response_deserializer=None,  # KV bytes bypass protobuf (frames.py)
        )
        self._model: pb.GetModelResponse | None = None
        self._asking = asyncio.Lock()
        self._watching = asyncio.create_task(self._forget_when_lost())

    @property
    def connected(self) -> bool:
        """Whether the channel is connected; a lost connection is retried about once a second."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def answers(self, timeout: float) -> bool:
        """Whether the worker answers a health check within `timeout` seconds; a hung or unreachable one does not."""
        return await self._status("", timeout) is not None

    async def serves(self, timeout: float) -> bool:
        """Whether a worker answers within `timeout` seconds that it takes requests; one that drains does not."""
        return await self._status(_SERVICE, timeout) == health_pb2.HealthCheckResponse.SERVING

    async def _status(self, service: str, timeout: float) -> int | None:
        asked = health_pb2.HealthCheckRequest(service=service)
        try:
            return int((await self._health.Check(asked, timeout=timeout)).status)
        except grpc.RpcError:
            return None

    async def model(self, deadline: Deadline = NO_DEADLINE) -> pb.GetModelResponse:
        """The model that the worker runs, cached for the lifetime of a connection."""
        seconds = deadline.timeout()
        try:
            # Around the lock: callers would wait for a hung worker one after another, each for the whole timeout.
            async with asyncio.timeout(seconds), self._asking:
                if self._model is None:
                    with self._errors():
                        self._model = await self._stub.GetModel(pb.GetModelRequest(), timeout=deadline.timeout())
                return self._model
        except TimeoutError as error:
            raise errors.DeadlineExceeded(
                f"fusion worker {self.address}: no response within {seconds:.1f} s"
            ) from error

    async def render(self, request: pb.RenderTemplateRequest, deadline: Deadline) -> pb.PromptTemplate:
        """The prompt template with values for variables of the chat template."""
        with self._errors():
            return (await self._stub.RenderTemplate(request, timeout=deadline.timeout())).template

    def generate(
        self, request: pb.GenerateRequest, deadline: Deadline = NO_DEADLINE
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Yields tokens, then one summary. Closing the iterator, or cancelling its reader, cancels the call."""
        return self._responses(self._stub.Generate, request, deadline)

    def prefill(
        self, request: pb.PrefillRequest, deadline: Deadline = NO_DEADLINE
    ) -> AsyncGenerator[pb.PrefillResponse]:
        """Yields the first token, a handle of the prompt's KV, then a summary. Closing the iterator frees the KV."""
        return self._responses(self._stub.Prefill, request, deadline)

    async def _responses(self, method: Any, request: Any, deadline: Deadline) -> AsyncGenerator[Any]:
        call = method(request, timeout=deadline.timeout())
        try:
            with self._errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def hold_prefill(self, handle: bytes, timeout: float) -> None:
        """Restarts the worker's timeout after which a prompt's KV is dropped. Raises NotFound when it is gone."""
        with self._errors():
            await self._stub.HoldPrefill(pb.HoldPrefillRequest(handle=handle), timeout=timeout)

    async def fetch_prefill(self, handle: bytes, rank: int, ranks: int, into: memoryview, timeout: float) -> None:
        """Fills `into` with a prompt's KV.

        Args:
            handle: PrefilledKV.handle.
            rank: rank of the heads to fetch.
            ranks: number of ranks that the heads are split over; 1 for all heads.
            into: writable buffer of exactly the KV's size in bytes.

        Raises:
            DataLoss: the bytes that arrived differ from those that the worker sent.
            NotFound: the KV is gone.
        """
        request = pb.FetchPrefillRequest(handle=handle, rank=rank, ranks=ranks)
        call = self._fetch(request, timeout=timeout)
        try:
            with self._errors():
                digest = await frames.fill(into, call)
                sent = dict(await call.trailing_metadata()).get(CHECKSUM, b"")
        except ValueError as error:
            raise errors.DataLoss(f"fusion worker {self.address}: {error}") from error
        finally:
            call.cancel()
        if digest != sent:
            raise errors.DataLoss(f"a prompt's KV arrived damaged from the fusion worker {self.address}")

    async def release_prefill(self, handle: bytes, ranks: int = 1, error: str = "") -> None:
        """Releases a prompt's KV for one of `ranks` ranks; it is freed when each has released it.

        error: why the KV could not be used; empty if it was.
        """
        with self._errors():
            request = pb.ReleasePrefillRequest(handle=handle, ranks=ranks, error=error)
            await self._stub.ReleasePrefill(request, timeout=_RELEASE_SECONDS)

    async def encode(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        """Encodes one chunk and waits until the cache service has stored it."""
        with self._errors():
            return await self._stub.Encode(request)

    async def forget_corpus(self, request: pb.ForgetCorpusRequest, timeout: float) -> None:
        """Deletes what the worker and its cache service keep of a corpus."""
        with self._errors():
            await self._stub.ForgetCorpus(request, timeout=timeout)

    async def close(self) -> None:
        """Closes the connection and cancels calls in flight."""
        self._watching.cancel()
        await self._channel.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                # Such as a program that was given the address of a worker that is gone.
                raise errors.Unavailable(f"{self.address} is not a fusion worker of this version") from error
            raise errors.from_rpc(error, f"fusion worker {self.address}") from error

    async def _forget_when_lost(self) -> None:
        """Drops the cached model when the connection is lost: the next worker may run another one."""
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is not grpc.ChannelConnectivity.READY:
                self._model = None
            await self._channel.wait_for_state_change(state)
