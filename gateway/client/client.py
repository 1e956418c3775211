"""`Client` (blocking) and `AsyncClient`, whose calls raise the errors of fusionkv.protos.runtime.errors."""

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from fusionkv.gateway.client import DEFAULT_ADDRESS, UNREACHED_HINT, requests, results
from fusionkv.gateway.client.requests import IngestOptions, Options
from fusionkv.gateway.client.results import Answer, Deleted, Event, Ingested, Item, Model, Passage, Progress, Stats
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.gateway.v1 import gateway_pb2_grpc
from fusionkv.protos.runtime import errors, process, rpc
from fusionkv.protos.runtime.errors import InvalidArgument
from fusionkv.protos.runtime.tls import ClientTLS
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

log = logging.getLogger(__name__)
_LOCAL = ("127.0.0.1:", "localhost:", "[::1]:", "unix:")
_PAGE = 1000
# What gRPC says if no connection could be made.
_UNREACHED = ("failed to connect", "errors resolving")
T = TypeVar("T")
BearerToken = str | os.PathLike[str] | None
TLS = ClientTLS | None


class _BaseClient:
    """What both clients share: the channel, the bearer token, and the default timeout of calls."""

    _dial: Callable[..., Any]

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = 300.0,
        token: BearerToken = None,
        tls: TLS = None,
        retries: int = rpc.MAX_RETRIES,
    ) -> None:
        """Reads the token, or the file that contains it.

        Raises:
            BadFile: the file can't be read, or contains no token.
            ValueError: the address or the token is malformed, or the timeout or the retries are out of range.
        """
        if not 0 <= retries <= rpc.MAX_RETRIES:
            raise ValueError(f"retries must be from 0 to {rpc.MAX_RETRIES}, not {retries}")
        self._timeout = _positive(timeout)
        if not process.is_address(address):
            raise ValueError(
                f"{address!r} is not a gateway's address: give host:port, such as {DEFAULT_ADDRESS}, or unix:/path"
            )
        process.check_sockets([address])
        self.address = address
        self._token: str | Watched[str] | None = None
        if isinstance(token, str):
            self._token = _checked(token)
        elif token is not None:
            file = Path(token)
            self._token = Watched([file], lambda: _from_file(file))
        if token is not None and tls is None and not address.startswith(_LOCAL):
            log.warning("the bearer token is sent to %s unencrypted: use TLS, or a proxy that does", address)
        self._channel = self._dial(address, tls=tls, retries=retries)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    def _limit(self, timeout: float | None) -> float:
        """The limit of a call in seconds. Raises InvalidArgument."""
        try:
            return self._timeout if timeout is None else _positive(timeout)
        except ValueError as error:
            raise InvalidArgument(str(error)) from error

    def _start(self, method: str, request: Message | Iterator[Message], timeout: float | None) -> Any:
        token = self._token.value if isinstance(self._token, Watched) else self._token
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        return getattr(self._stub, method)(request, timeout=timeout, metadata=metadata)


class AsyncClient(_BaseClient):
    """An asynchronous client of a gateway. Create it in a running event loop; `async with` closes it.

    Calls raise a subclass of `errors.ServiceError` for each gRPC status. A call that fails as UNAVAILABLE before the
    first response is retried within about three seconds, except `delete`, `move` and
    `plan_precompute`.

    Args:
        address: `host:port` or `unix:/path`.
        timeout: default timeout of a call in seconds; calls take a `timeout` too, except those without a deadline.
        token: a bearer token, or the path of a file that contains one, which is read again when it changes.
        tls: CAs to trust and a client certificate; without it, connections are not encrypted.
        retries: of a call that fails as UNAVAILABLE before the first response, at most four.
    """

    _dial = staticmethod(rpc.dial)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def ingest(
        self,
        corpus: str,
        name: str,
        content: bytes | str | os.PathLike[str],
        *,
        timeout: float | None = None,
        **options: Unpack[IngestOptions],
    ) -> Ingested:
        """Stores one document, or one per JSON line, replacing earlier versions. Options: see `requests.ingest`."""
        request = await asyncio.to_thread(requests.ingest, corpus, name, content, **options)
        if requests.is_large(request):
            r = (await self._call("Upload", requests.pieces(request), timeout)).stored
        else:
            r = await self._call("Ingest", request, timeout)
        return results.ingested(name, r)

    def stream(
        self, corpus: str = "", question: str = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event]:
        """Streams an answer: Sources, an Explanation if requested, Tokens, one Summary.

        Closing the iterator cancels the request.

        Options: see `requests.Options`; `passages` replace the corpus, and `messages` the question.
        """
        request = requests.generate(corpus, question, **options)
        return self._stream("Generate", request, results.event, self._limit(timeout))

    async def ask(
        self, corpus: str = "", question: str = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """Returns a whole answer. Options as for `stream`."""
        async with contextlib.aclosing(self.stream(corpus, question, timeout=timeout, **options)) as events:
            return results.answer([event async for event in events])

    async def retrieve(
        self,
        corpus: str,
        question: str,
        *,
        top_k: int = 0,
        order: str = "rank",
        filter: Mapping[str, str] = requests.NO_FILTER,
        timeout: float | None = None,
    ) -> tuple[Passage, ...]:
        """Retrieves the passages for a question, from documents that have all the metadata of `filter`."""
        request = requests.retrieve(corpus, question, top_k, order, filter)
        return results.passages(await self._call("Retrieve", request, timeout))

    def precompute(
        self, corpus: str, recipe: str = "", *, neighbours: int = 0, name: str = ""
    ) -> AsyncGenerator[Progress]:
        """Encodes a corpus, or one document, ahead of time. Has no deadline; a repeated call resumes.

        Args:
            neighbours: neighbours that each chunk is encoded with; 0 uses the recipe's number. The KV is reused for
                questions whose recipe has the same number, or that name no recipe.
            name: the document; empty encodes the whole corpus.

        Returns:
            An iterator over the progress.
        """
        request = requests.of(pb.PrecomputeRequest, corpus=corpus, recipe=recipe, neighbours=neighbours, name=name)
        return self._stream("Precompute", request, results.progress)

    def plan_precompute(self, corpus: str, recipe: str = "") -> AsyncGenerator[pb.PlanPrecomputeResponse]:
        """Streams the requests that `precompute` would send to workers, for separate encoders. Has no deadline."""
        request = requests.of(pb.PlanPrecomputeRequest, corpus=corpus, recipe=recipe)
        return self._stream("PlanPrecompute", request, lambda batch: batch)

    def move(self, corpus: str) -> AsyncGenerator[Progress]:
        """Rebuilds a corpus for the worker's model and the gateway's embedder. Yields progress; has no deadline."""
        return self._stream("Move", requests.of(pb.MoveRequest, corpus=corpus), results.progress)

    async def delete(self, corpus: str, name: str = "", *, timeout: float | None = None) -> Deleted:
        """Deletes one document; without a name, the whole corpus."""
        r = await self._call("Delete", requests.of(pb.DeleteRequest, corpus=corpus, name=name), timeout)
        return Deleted(r.documents, r.chunks)

    async def list(self, corpus: str = "", *, timeout: float | None = None) -> list[Item]:
        """All corpora, or all documents of a corpus, sorted by name."""
        items: list[Item] = []
        request = requests.of(pb.ListRequest, corpus=corpus, page_size=_PAGE)
        while True:
            r = await self._call("List", request, timeout)
            items += map(results.item, r.items)
            if not r.next_page_token:
                return items
            request.page_token = r.next_page_token

    async def model(self, *, timeout: float | None = None) -> Model:
        """The model that answers, and its limits."""
        return results.model(await self._call("GetModel", pb.GetModelRequest(), timeout))

    async def stats(self, *, timeout: float | None = None) -> Stats:
        """The gateway's statistics."""
        return results.stats(await self._call("Stats", pb.StatsRequest(), timeout))

    async def _call(self, method: str, request: Message | Iterator[Message], timeout: float | None) -> Any:
        with _errors(self.address):
            return await self._start(method, request, self._limit(timeout))

    async def _stream(
        self, method: str, request: Message, read: Callable[[Any], T], timeout: float | None = None
    ) -> AsyncGenerator[T]:
        """Yields the responses as `read` converts them. Without a timeout, the call has no deadline."""
        call = self._start(method, request, timeout)
        try:
            with _errors(self.address):
                async for response in call:
                    yield read(response)
        finally:
            call.cancel()


class Client(_BaseClient):
    """The blocking counterpart of `AsyncClient`, without `plan_precompute`. Thread-safe; `with` closes it."""

    _dial = staticmethod(rpc.dial_sync)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def ingest(
        self,
        corpus: str,
        name: str,
        content: bytes | str | os.PathLike[str],
        *,
        timeout: float | None = None,
        **options: Unpack[IngestOptions],
    ) -> Ingested:
        """Stores one document, or one per JSON line, replacing earlier versions. Options: see `requests.ingest`."""
        request = requests.ingest(corpus, name, content, **options)
        if requests.is_large(request):
            r = self._call("Upload", requests.pieces(request), timeout).stored
        else:
            r = self._call("Ingest", request, timeout)
        return results.ingested(name, r)

    def stream(
        self, corpus: str = "", question: str = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generator[Event]:
        """Streams an answer, as `AsyncClient.stream`."""
        request = requests.generate(corpus, question, **options)
        return self._stream("Generate", request, results.event, self._limit(timeout))

    def ask(
        self, corpus: str = "", question: str = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """Returns a whole answer. Options as for `stream`."""
        return results.answer(list(self.stream(corpus, question, timeout=timeout, **options)))

    def retrieve(
        self,
        corpus: str,
        question: str,
        *,
        top_k: int = 0,
        order: str = "rank",
        filter: Mapping[str, str] = requests.NO_FILTER,
        timeout: float | None = None,
    ) -> tuple[Passage, ...]:
        """Retrieves the passages for a question, from documents that have all the metadata of `filter`."""
        request = requests.retrieve(corpus, question, top_k, order, filter)
        return results.passages(self._call("Retrieve", request, timeout))

    def move(self, corpus: str) -> Generator[Progress]:
        """Rebuilds a corpus for the worker's model and the gateway's embedder. Yields progress; has no deadline."""
        return self._stream("Move", requests.of(pb.MoveRequest, corpus=corpus), results.progress)

    def delete(self, corpus: str, name: str = "", *, timeout: float | None = None) -> Deleted:
        """Deletes one document; without a name, the whole corpus."""
        r = self._call("Delete", requests.of(pb.DeleteRequest, corpus=corpus, name=name), timeout)
        return Deleted(r.documents, r.chunks)

    def precompute(
        self, corpus: str, recipe: str = "", *, neighbours: int = 0, name: str = ""
    ) -> Generator[Progress]:
        """Encodes a corpus, or one document, ahead of time, as `AsyncClient.precompute`."""
        request = requests.of(pb.PrecomputeRequest, corpus=corpus, recipe=recipe, neighbours=neighbours, name=name)
        return self._stream("Precompute", request, results.progress)

    def list(self, corpus: str = "", *, timeout: float | None = None) -> list[Item]:
        """All corpora, or all documents of a corpus, sorted by name."""
        items: list[Item] = []
        request = requests.of(pb.ListRequest, corpus=corpus, page_size=_PAGE)
        while True:
            r = self._call("List", request, timeout)
            items += map(results.item, r.items)
            if not r.next_page_token:
                return items
            request.page_token = r.next_page_token

    def model(self, *, timeout: float | None = None) -> Model:
        """The model that answers, and its limits."""
        return results.model(self._call("GetModel", pb.GetModelRequest(), timeout))

    def stats(self, *, timeout: float | None = None) -> Stats:
        """The gateway's statistics."""
        return results.stats(self._call("Stats", pb.StatsRequest(), timeout))

    def _call(self, method: str, request: Message | Iterator[Message], timeout: float | None) -> Any:
        with _errors(self.address):
            return self._start(method, request, self._limit(timeout))

    def _stream(
        self, method: str, request: Message, read: Callable[[Any], T], timeout: float | None = None
    ) -> Generator[T]:
        call = self._start(method, request, timeout)
        try:
            with _errors(self.address):
                for response in call:
                    yield read(response)
        finally:
            call.cancel()


@contextlib.contextmanager
def _errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        # The gateway's own errors are complete; the address is added only if the gateway can't be reached.
        lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        raised = errors.from_rpc(error, f"gateway {address}" if lost else "gateway")
        if lost and (error.details() or "").startswith(_UNREACHED):
            raised = type(raised)(f"{raised} ({UNREACHED_HINT})")
        raise raised from error


def _positive(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    return timeout


def _from_file(file: Path) -> str:
    try:
        return _checked(read_bytes(file, "the token").decode().strip())
    except ValueError:
        raise BadFile(f"the token {file} is not one line of printable ASCII characters") from None


def _checked(token: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token is not one word of printable ASCII characters")
    return token
