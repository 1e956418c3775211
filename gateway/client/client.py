"""`Client` (blocking) and `AsyncClient`, whose calls raise the errors of fusionkv.protos.runtime.errors."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import grpc

from fusionkv.gateway.client import requests, results
from fusionkv.gateway.client.credentials import Credentials
from fusionkv.gateway.client.defaults import DEFAULT_ADDRESS
from fusionkv.gateway.client.requests import Options
from fusionkv.gateway.client.results import (
    Answer,
    Deleted,
    Event,
    Ingested,
    Item,
    Passage,
    Progress,
    Sources,
    Stats,
    Summary,
    Token,
)
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.gateway.v1 import gateway_pb2_grpc
from fusionkv.protos.runtime import errors, rpc
from fusionkv.protos.runtime.tls import ClientTLS

_PAGE = 1000
T = TypeVar("T")
BearerToken = str | os.PathLike[str] | None
TLS = ClientTLS | None


class AsyncClient:
    """An asynchronous client of a gateway. Create it in a running event loop; `async with` closes it.

    Calls raise a subclass of `errors.ServiceError` for each gRPC status. A call that fails as UNAVAILABLE before the
    first response is retried up to four times within about three seconds, except `delete`.

    Args:
        address: `host:port` or `unix:/path`.
        timeout: default timeout of a call in seconds; calls take a `timeout` too.
        token: a bearer token, or the path of a file that contains one, which is read again when it changes.
        tls: CAs to trust and a client certificate; without it, connections are not encrypted.
    """

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, timeout: float = 300.0, token: BearerToken = None, tls: TLS = None
    ) -> None:
        self.address = address
        self._credentials = Credentials(address, token, timeout, encrypted=tls is not None)
        self._channel = rpc.dial(address, tls=tls, retries=True)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

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
        **options: Any,
    ) -> Ingested:
        """Stores one document, or one per JSON line, replacing earlier versions. Options: see `requests.ingest`."""
        request = await asyncio.to_thread(requests.ingest, corpus, name, content, **options)
        with _errors(self.address):
            r = await self._stub.Ingest(request, **self._credentials.options(timeout))
        return Ingested(name, r.documents, r.chunks, r.tokens, r.replaced)

    async def stream(
        self, corpus: str = "", question: str = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event]:
        """Streams an answer: Sources, Tokens, one Summary. Closing the iterator cancels the request.

        Options: see `requests.Options`; `passages` replace the corpus, and `messages` the question.
        """
        call = self._stub.Generate(
            requests.generate(corpus, question, **options), **self._credentials.options(timeout)
        )
        try:
            with _errors(self.address):
                async for response in call:
                    yield results.event(response)
        finally:
            call.cancel()

    async def ask(
        self, corpus: str = "", question: str = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """Returns a whole answer. Options as for `stream`."""
        async with contextlib.aclosing(self.stream(corpus, question, timeout=timeout, **options)) as events:
            return _answer([event async for event in events])

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
        with _errors(self.address):
            return results.passages(await self._stub.Retrieve(request, **self._credentials.options(timeout)))

    async def precompute(
        self, corpus: str, recipe: str = "", *, neighbours: int = 0, name: str = ""
    ) -> AsyncGenerator[Progress]:
        """Encodes a corpus, or one document, ahead of time. Has no deadline; a repeated call resumes.

        Args:
            neighbours: neighbours that each chunk is encoded with; 0 uses the recipe's number. The KV is reused for
                questions whose recipe has the same number, or that name no recipe.
            name: the document; empty encodes the whole corpus.

        Yields:
            The progress.
        """
        request = pb.PrecomputeRequest(corpus=corpus, recipe=recipe, neighbours=neighbours, name=name)
        call = self._stub.Precompute(request, metadata=self._credentials.metadata())
        try:
            with _errors(self.address):
                async for p in call:
                    yield Progress(p.done, p.total, p.skipped)
        finally:
            call.cancel()

    async def plan_precompute(self, corpus: str, recipe: str = "") -> AsyncGenerator[pb.PlanPrecomputeResponse]:
        """Streams the requests that `precompute` would send to workers, for separate encoders. Has no deadline."""
        request = pb.PlanPrecomputeRequest(corpus=corpus, recipe=recipe)
        call = self._stub.PlanPrecompute(request, metadata=self._credentials.metadata())
        try:
            with _errors(self.address):
                async for batch in call:
                    yield batch
        finally:
            call.cancel()

    async def move(self, corpus: str) -> AsyncGenerator[Progress]:
        """Rebuilds a corpus for the worker's model and the gateway's embedder. Yields progress; has no deadline."""
        call = self._stub.Move(pb.MoveRequest(corpus=corpus), metadata=self._credentials.metadata())
        try:
            with _errors(self.address):
                async for p in call:
                    yield Progress(p.done, p.total)
        finally:
            call.cancel()

    async def delete(self, corpus: str, name: str = "", *, timeout: float | None = None) -> Deleted:
        """Deletes one document; without a name, the whole corpus."""
        with _errors(self.address):
            r = await self._stub.Delete(
                pb.DeleteRequest(corpus=corpus, name=name), **self._credentials.options(timeout)
            )
        return Deleted(r.documents, r.chunks)

    async def page(
        self, corpus: str, token: str = "", size: int = _PAGE, *, timeout: float | None = None
    ) -> tuple[list[Item], str]:
        """One page of `list`, and the token of the next page, which is empty after the last page."""
        request = pb.ListRequest(corpus=corpus, page_size=size, page_token=token)
        with _errors(self.address):
            r = await self._stub.List(request, **self._credentials.options(timeout))
        return [results.item(i) for i in r.items], r.next_page_token

    async def list(self, corpus: str = "", *, timeout: float | None = None) -> list[Item]:
        """All corpora, or all documents of a corpus, sorted by name."""
        items: list[Item] = []
        token = ""
        while True:
            page, token = await self.page(corpus, token, timeout=timeout)
            items.extend(page)
            if not token:
                return items

    async def stats(self, *, timeout: float | None = None) -> Stats:
        """The gateway's statistics."""
        with _errors(self.address):
            return results.stats(await self._stub.Stats(pb.StatsRequest(), **self._credentials.options(timeout)))


class Client:
    """The blocking counterpart of `AsyncClient`, with the same arguments. Thread-safe; `with` closes it."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, timeout: float = 300.0, token: BearerToken = None, tls: TLS = None
    ) -> None:
        self.address = address
        self._credentials = Credentials(address, token, timeout, encrypted=tls is not None)
        self._channel = rpc.dial_sync(address, tls=tls, retries=True)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

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
        **options: Any,
    ) -> Ingested:
        """Stores one document, or one per JSON line, replacing earlier versions. Options: see `requests.ingest`."""
        request = requests.ingest(corpus, name, content, **options)
        with _errors(self.address):
            r = self._stub.Ingest(request, **self._credentials.options(timeout))
        return Ingested(name, r.documents, r.chunks, r.tokens, r.replaced)

    def stream(
        self, corpus: str = "", question: str = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Iterator[Event]:
        """Streams an answer: Sources, Tokens, one Summary. Closing the iterator cancels the request.

        Options: see `requests.Options`; `passages` replace the corpus, and `messages` the question.
        """
        call = self._stub.Generate(
            requests.generate(corpus, question, **options), **self._credentials.options(timeout)
        )
        try:
            with _errors(self.address):
                for response in call:
                    yield results.event(response)
        finally:
            call.cancel()

    def ask(
        self, corpus: str = "", question: str = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """Returns a whole answer. Options as for `stream`."""
        return _answer(list(self.stream(corpus, question, timeout=timeout, **options)))

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
        with _errors(self.address):
            return results.passages(self._stub.Retrieve(request, **self._credentials.options(timeout)))

    def move(self, corpus: str) -> Iterator[Progress]:
        """Rebuilds a corpus for the worker's model and the gateway's embedder. Yields progress; has no deadline."""
        call = self._stub.Move(pb.MoveRequest(corpus=corpus), metadata=self._credentials.metadata())
        try:
            with _errors(self.address):
                for p in call:
                    yield Progress(p.done, p.total)
        finally:
            call.cancel()

    def delete(self, corpus: str, name: str = "", *, timeout: float | None = None) -> Deleted:
        """Deletes one document; without a name, the whole corpus."""
        with _errors(self.address):
            r = self._stub.Delete(pb.DeleteRequest(corpus=corpus, name=name), **self._credentials.options(timeout))
        return Deleted(r.documents, r.chunks)

    def precompute(self, corpus: str, recipe: str = "", *, neighbours: int = 0, name: str = "") -> Iterator[Progress]:
        """Encodes a corpus, or one document, ahead of time. Has no deadline; a repeated call resumes.

        Args:
            neighbours: neighbours that each chunk is encoded with; 0 uses the recipe's number. The KV is reused for
                questions whose recipe has the same number, or that name no recipe.
            name: the document; empty encodes the whole corpus.

        Yields:
            The progress.
        """
        request = pb.PrecomputeRequest(corpus=corpus, recipe=recipe, neighbours=neighbours, name=name)
        call = self._stub.Precompute(request, metadata=self._credentials.metadata())
        try:
            with _errors(self.address):
                for p in call:
                    yield Progress(p.done, p.total, p.skipped)
        finally:
            call.cancel()

    def list(self, corpus: str = "", *, timeout: float | None = None) -> list[Item]:
        """All corpora, or all documents of a corpus, sorted by name."""
        items: list[Item] = []
        token = ""
        while True:
            page = pb.ListRequest(corpus=corpus, page_size=_PAGE, page_token=token)
            with _errors(self.address):
                r = self._stub.List(page, **self._credentials.options(timeout))
            items.extend(map(results.item, r.items))
            token = r.next_page_token
            if not token:
                return items

    def stats(self, *, timeout: float | None = None) -> Stats:
        """The gateway's statistics."""
        with _errors(self.address):
            return results.stats(self._stub.Stats(pb.StatsRequest(), **self._credentials.options(timeout)))


def _answer(events: Sequence[Event]) -> Answer:
    sources = next((e.passages for e in events if isinstance(e, Sources)), ())
    summary = next((e for e in events if isinstance(e, Summary)), None)
    if summary is None:
        raise errors.ServiceError("the answer ended without a summary")
    return Answer("".join(e.text for e in events if isinstance(e, Token)), sources, summary)


@contextlib.contextmanager
def _errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        # The gateway's own errors are complete; the address is added only if the gateway can't be reached.
        lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        raise errors.from_rpc(error, f"gateway {address}" if lost else "gateway") from error
