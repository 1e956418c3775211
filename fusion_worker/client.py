"""The asynchronous client of a fusion worker, for the gateway and the vLLM connector; does not import torch."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.fusion.v1 import fusion_pb2_grpc
from fusionkv.protos.runtime import errors, frames, rpc
from fusionkv.protos.runtime.tls import ClientTLS

# The name by which a worker takes what was recommended for its model; modifiers may follow it.
DEFAULT = "default"
_MODEL_SECONDS = 30.0
_SERVICE = pb.DESCRIPTOR.services_by_name["FusionService"].full_name
_PLACE = re.compile(r"\{(?:passages|question)\}")
# Values for variables of a chat template. Texts can hold neither a control token nor the places of a template.
_MAX_VALUES, _MAX_NUMBER, _MAX_JSON = 16, 1 << 20, 1024
_TEXT = re.compile(r"[\w .,:;/+-]{0,64}")
# Trailing metadata key of FetchPrefill.
CHECKSUM = "fusionkv-checksum-bin"


def full_name(recipe: str, default: str) -> str:
    """A requested recipe's full name, with another default for an empty name, and in place of the base `default`."""
    base, plus, modifiers = (recipe or DEFAULT).partition("+")
    return f"{default}{plus}{modifiers}" if base == DEFAULT else recipe


def recipe_label(recipe: str) -> str:
    """A recipe's name in metrics: its base, and its modifier without numbers, or `+several`.

    Callers choose modifiers and numbers, so that full names would be labels without end.
    """
    base, *modifiers = recipe.split("+")
    if len(modifiers) > 1:
        return f"{base}+several"
    return "+".join((base, *(modifier.partition("(")[0] for modifier in modifiers)))


def template_error(template: str) -> str:
    """What is wrong with a prompt template; empty if nothing is, or if there is no template."""
    if not template or _PLACE.findall(template) == ["{passages}", "{question}"]:
        return ""
    return "prompt_template must contain {passages} and, behind it, {question}, each once"


def shorten(prompt: int, answer: int, limit: int, context: int) -> str:
    """What to do about a prompt and an answer that exceed the model's limit together; all are numbers of tokens.

    context: of the prompt's chunks.
    """
    ways = [f"ask for at most {limit - prompt} tokens (max_tokens)"] if prompt < limit else []
    # Leaving out all chunks would do.
    if prompt - context + answer <= limit:
        ways.append("use fewer passages (top_k) or shorter ones (chunk_tokens)")
    return " or ".join(ways) or "shorten the question or the system prompt"


def template_values(given: Mapping[str, str]) -> dict[str, bool | float | str]:
    """Parses values for variables of a chat template, each of which is JSON.

    Raises:
        InvalidArgument: there are too many, or one is neither true, false, a number nor a short text.
    """
    if len(given) > _MAX_VALUES:
        raise errors.InvalidArgument(f"chat_template_kwargs has {len(given)} values; the maximum is {_MAX_VALUES}")
    return {name: _value(name, text) for name, text in given.items()}


def unknown_variable(name: str, known: Collection[str]) -> str:
    """The message for a variable that a chat template does not use."""
    used = ", ".join(sorted(known)) or "none"
    return f"chat_template_kwargs: the model's chat template has no variable {name[:80]!r}; it has: {used}"


def _value(name: str, text: str) -> bool | float | str:
    try:
        value = json.loads(text) if len(text) <= _MAX_JSON else None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, int | float) and abs(value) <= _MAX_NUMBER:
        return value
    if isinstance(value, str) and _TEXT.fullmatch(value):
        return value
    raise errors.InvalidArgument(
        f"chat_template_kwargs: {name[:80]!r} must be true, false, a number of at most {_MAX_NUMBER}, or a text of "
        "at most 64 letters, digits, spaces and .,:;/+-_"
    )


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
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError:
            return False
        return True

    async def serves(self, timeout: float) -> bool:
        """Whether a worker answers within `timeout` seconds that it takes requests; one that drains does not."""
        try:
            health = await self._health.Check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=timeout)
        except grpc.RpcError:
            return False
        return health.status == health_pb2.HealthCheckResponse.SERVING

    async def model(self, timeout: float = _MODEL_SECONDS) -> pb.GetModelResponse:
        """The model that the worker runs, cached for the lifetime of a connection."""
        try:
            # Around the lock: callers would wait for a hung worker one after another, each for the whole timeout.
            async with asyncio.timeout(timeout), self._asking:
                if self._model is None:
                    with self._errors():
                        self._model = await self._stub.GetModel(pb.GetModelRequest(), timeout=timeout)
                return self._model
        except TimeoutError as error:
            raise errors.DeadlineExceeded(
                f"fusion worker {self.address}: no response within {timeout:g} s"
            ) from error

    async def render(self, request: pb.RenderTemplateRequest, timeout: float) -> pb.PromptTemplate:
        """The prompt template with values for variables of the chat template."""
        with self._errors():
            return (await self._stub.RenderTemplate(request, timeout=timeout)).template

    async def corrections(self, tenant: str, corpora: Sequence[str], timeout: float) -> Sequence[str]:
        """The state of each corpus's correction."""
        request = pb.GetCorrectionsRequest(tenant=tenant, corpora=corpora)
        with self._errors():
            return (await self._stub.GetCorrections(request, timeout=timeout)).states

    def generate(
        self, request: pb.GenerateRequest, timeout: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Yields tokens, then one summary. Closing the iterator, or cancelling its reader, cancels the call."""
        return self._responses(self._stub.Generate, request, timeout)

    def prefill(self, request: pb.PrefillRequest, timeout: float | None = None) -> AsyncGenerator[pb.PrefillResponse]:
        """Yields the first token, a handle of the prompt's KV, then a summary. Closing the iterator frees the KV."""
        return self._responses(self._stub.Prefill, request, timeout)

    async def _responses(self, method: Any, request: Any, timeout: float | None) -> AsyncGenerator[Any]:
        call = method(request, timeout=timeout)
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

    async def release_prefill(self, handle: bytes, ranks: int = 1, error: str = "", timeout: float = 5.0) -> None:
        """Releases a prompt's KV for one of `ranks` ranks; it is freed when each has released it.

        error: why the KV could not be used; empty if it was.
        """
        with self._errors():
            request = pb.ReleasePrefillRequest(handle=handle, ranks=ranks, error=error)
            await self._stub.ReleasePrefill(request, timeout=timeout)

    async def encode(self, request: pb.EncodeRequest, timeout: float | None = None) -> pb.EncodeResponse:
        """Encodes one chunk and waits until the cache service has stored it."""
        with self._errors():
            return await self._stub.Encode(request, timeout=timeout)

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
