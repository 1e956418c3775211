"""The gateway's RPCs: limits, admission, deadlines and counters around ingestion, answering and precomputation."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
from google.protobuf import message_factory
from opentelemetry import metrics

from fusionkv.gateway.auth import access
from fusionkv.gateway.auth.tenants import Shares, Tenant, Tenants
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.history import History
from fusionkv.gateway.ingest.ingest import Ingest
from fusionkv.gateway.ingest.precompute import Precompute
from fusionkv.gateway.pipeline import Engine, Pipeline
from fusionkv.gateway.plan import order
from fusionkv.gateway.retrieval.base import MAX_NAME, HybridSearch, check_corpus, check_document
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
SERVICE = pb.DESCRIPTOR.services_by_name["GatewayService"]
_meter = metrics.get_meter(__name__)
_requests = _meter.create_counter("fusionkv.gateway.requests", description="calls, by method")
_failures = _meter.create_counter("fusionkv.gateway.failures", description="failed calls, by method and status")
_in_flight = _meter.create_up_down_counter("fusionkv.gateway.in_flight", description="calls being answered")
_degraded = _meter.create_counter("fusionkv.gateway.degraded", description="answers given without the cache")
_PAGE = 100
_MAX_PAGE = 1000
_MAX_NAME_BYTES = 4 * MAX_NAME
_MARK_BYTES = 8
# Holds the longest passages, with their metadata, and the longest conversation. Only Ingest carries a document.
_MAX_REQUEST_BYTES = 8 << 20
# Fields of a request itself, such as passages and messages; other limits allow far fewer. Fields of nested messages
# are not counted: _MAX_REQUEST_BYTES limits them.
_MAX_REQUEST_FIELDS = 1 << 16
_VARINT_BYTES = 10


class GatewayServicer:
    """Implements the service of gateway.proto, one method per RPC."""

    def __init__(
        self,
        config: GatewayConfig,
        tenants: Tenants,
        workers: WorkerPool,
        history: History | None,
        search: HybridSearch,
        engine: Engine,
    ) -> None:
        """`history` stores answers with explanations for operators; `engine` answers prompts."""
        self.history = history
        self._search = search
        self._engine = engine
        self._config = config
        self._tenants = tenants
        self._workers = workers
        self._ingest = Ingest(config, workers, self._search)
        self._pipeline = Pipeline(config, engine, self._search)
        self._precompute = Precompute(config, workers, self._search)
        self._started = time.monotonic()
        self._active = Shares(config.max_requests, spare=int(config.several_tenants))
        self._served = self._failed = self._marked_degraded = 0

    async def Ingest(self, request: pb.IngestRequest, context: rpc.Call | None) -> pb.IngestResponse:
        async with self._admitted("Ingest") as (tenant, _):
            return await self._ingest.file(tenant, request, self._time_left(context))

    def Precompute(
        self, request: pb.PrecomputeRequest, context: rpc.Call | None
    ) -> AsyncGenerator[pb.PrecomputeResponse]:
        return self._stream("Precompute", lambda tenant: self._precompute.run(tenant, request))

    def PlanPrecompute(
        self, request: pb.PlanPrecomputeRequest, context: rpc.Call | None
    ) -> AsyncGenerator[pb.PlanPrecomputeResponse]:
        return self._stream("PlanPrecompute", lambda tenant: self._precompute.plan(tenant, request))

    def Move(self, request: pb.MoveRequest, context: rpc.Call | None) -> AsyncGenerator[pb.MoveResponse]:
        return self._stream("Move", lambda tenant: self._ingest.move(tenant.retrieval, request.corpus))

    async def Delete(self, request: pb.DeleteRequest, context: rpc.Call | None) -> pb.DeleteResponse:
        async with self._admitted("Delete") as (tenant, _):
            check_corpus(request.corpus)
            if request.name:
                check_document(request.name)
            documents, chunks = await tenant.retrieval.delete(request.corpus, request.name)
            return pb.DeleteResponse(documents=documents, chunks=chunks)

    async def List(self, request: pb.ListRequest, context: rpc.Call | None) -> pb.ListResponse:
        async with self._admitted("List") as (tenant, _):
            size = min(request.page_size or _PAGE, _MAX_PAGE)
            if request.corpus:
                check_corpus(request.corpus)
            after = listed_to(tenant.salt, request.corpus, request.page_token)
            if request.corpus:
                items = await tenant.retrieval.documents(request.corpus, after, size + 1)
            else:
                items = [i for i in await tenant.retrieval.corpora() if i.name > after][: size + 1]
            more = len(items) > size
            return pb.ListResponse(
                items=[pb.Item(**asdict(i)) for i in items[:size]],
                next_page_token=page_token(tenant.salt, request.corpus, items[size - 1].name) if more else "",
            )

    async def Retrieve(self, request: pb.RetrieveRequest, context: rpc.Call | None) -> pb.RetrieveResponse:
        async with self._admitted("Retrieve") as (tenant, _):
            search, left = (request.corpus, request.question, request.top_k), self._time_left(context)
            found = await self._pipeline.retrieve(tenant, *search, left, where=request.filter)
            return pb.RetrieveResponse(passages=[source for _, source in order(found, request.order)])

    async def embed(
        self, texts: Sequence[str], model: str, dimensions: int, context: rpc.Call | None
    ) -> tuple[np.ndarray, str, int]:
        """Embeds texts with the embedder of retrieval.

        Args:
            model: the embedder's name, or empty.
            dimensions: the width of its vectors, or 0.

        Returns:
            The vectors, float32 `[text, dim]`; the embedder's name; and the tokens counted against the quota, which
            are estimated at one per four bytes.

        Raises:
            NotFound: the gateway's embedder is another model.
            InvalidArgument: its vectors have other dimensions.
            FailedPrecondition: the gateway has no embedder.
        """
        async with self._admitted("Embed") as (tenant, _):
            embedder = self._search.embedder
            if embedder is None:
                raise FailedPrecondition("this gateway has no embedder: it retrieves by BM25 only")
            if model not in ("", embedder.name, embedder.name.partition("@")[0]):
                raise NotFound(f"unknown embedding model {model[:80]!r}; known: {embedder.name}")
            if dimensions not in (0, embedder.dim):
                raise InvalidArgument(f"{embedder.name} supports only {embedder.dim} dimensions")
            tokens = sum(-(-len(text.encode()) // 4) for text in texts)
            tenant.meter.spend(tokens)
            try:
                async with asyncio.timeout(self._time_left(context)):
                    return await embedder.embed(texts), embedder.name, tokens
            except (ResourceExhausted, Unavailable):  # nothing was computed, and the caller will retry
                tenant.meter.give_back(tokens)
                raise
            except TimeoutError as error:
                raise DeadlineExceeded("embedding took longer than the request's deadline") from error

    def Generate(self, request: pb.GenerateRequest, context: rpc.Call | None) -> AsyncGenerator[pb.GenerateResponse]:
        return self.generate(request, context, self.history)

    async def generate(
        self, request: pb.GenerateRequest, context: rpc.Call | None, history: History | None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Generate, with the answer stored in `history`, if there is one."""
        async with self._admitted("Generate") as (tenant, log_fields):

            def start(observed: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse]:
                return self._pipeline.answer(tenant, observed, self._time_left(context))

            answer = history.watch(tenant.salt, request, start) if history is not None else start(request)
            async with contextlib.aclosing(answer) as responses:
                async for response in responses:
                    if response.HasField("summary"):
                        self._summarised(response.summary, log_fields)
                    yield response

    async def Stats(self, request: pb.StatsRequest, context: rpc.Call | None) -> pb.StatsResponse:
        corpora = [c for tenant in self._tenants.all for c in await tenant.retrieval.corpora()]
        response = pb.StatsResponse(
            version=version("fusionkv"),
            requests=self._served,
            requests_failed=self._failed,
            requests_degraded=self._marked_degraded,
            documents=sum(c.documents for c in corpora),
            chunks=sum(c.chunks for c in corpora),
            uptime_seconds=time.monotonic() - self._started,
        )
        # A gateway whose worker is down still reports its own figures.
        with contextlib.suppress(ServiceError):
            model = (await self._workers.model(2.0)).model
            response.model, response.model_fingerprint = model.name, model.fingerprint
            response.worker = self._workers.address()
        return response

    async def tenant_salt(self) -> str:
        """The salt of the tenant of the current call, by which the history stores answers."""
        return (await self._tenants.current()).salt

    async def close(self) -> None:
        """Closes everything. Call it after the last call has ended."""
        await self._ingest.close()
        await self._engine.close()
        await self._search.close()
        await self._tenants.close()

    def _time_left(self, context: rpc.Call | None) -> float:
        remaining = rpc.time_remaining(context)
        return self._config.request_seconds if remaining is None else remaining

    async def _stream(self, method: str, start: Callable[[Tenant], AsyncGenerator[T]]) -> AsyncGenerator[T]:
        async with self._admitted(method) as (tenant, _), contextlib.aclosing(start(tenant)) as responses:
            async for response in responses:
                yield response

    def _summarised(self, summary: Summary, log_fields: dict[str, Any]) -> None:
        log_fields |= {
            "recipe": summary.recipe,
            "ttft": round(summary.seconds.ttft, 6),
            "tokens": summary.tokens_generated,
        }
        if summary.degraded:
            self._marked_degraded += 1
            _degraded.add(1, {"fusionkv.recipe": summary.recipe})
            log_fields["degraded"] = summary.degraded_reason

    @contextlib.asynccontextmanager
    async def _admitted(self, method: str) -> AsyncIterator[tuple[Tenant, dict[str, Any]]]:
        """Counts a call, and logs it at its end.

        Yields:
            The tenant of the call, and the fields of the log record, for the caller to add to.

        Raises:
            ResourceExhausted: too many calls are in flight, or the tenant is over its quota.
        """
        began, status = time.perf_counter(), "CANCELLED"
        log_fields: dict[str, Any] = {}
        self._served += 1
        _requests.add(1, {"rpc.method": method})
        try:
            caller = access.CALLER.get()
            with self._active.holding(caller.tenant if caller else "") as held:
                if not held:
                    raise ResourceExhausted(
                        f"{self._active.held} requests are in flight; try again later", retry_after=0.5
                    )
                _in_flight.add(1)
                try:
                    tenant = await self._tenants.current()
                    tenant.meter.admit()
                    yield tenant, log_fields
                finally:
                    _in_flight.add(-1)
            status = "OK"
        except ServiceError as error:
            status = error.status.name
            raise
        except Exception:
            status = "INTERNAL"
            raise
        finally:
            if status not in ("OK", "CANCELLED"):
                self._failed += 1
                _failures.add(1, {"rpc.method": method, "rpc.grpc.status": status})
            log_fields |= {"method": method, "status": status, "seconds": round(time.perf_counter() - began, 6)}
            answer = ""
            if "ttft" in log_fields:
                answer = "; {recipe}, first token after {ttft:.3f} s, {tokens} tokens".format(**log_fields)
            log.info(
                "%s %s after %.3f s%s", method, status, log_fields["seconds"], answer, extra={logs.FIELDS: log_fields}
            )


def readers() -> Mapping[str, Callable[[bytes], Any]]:
    """The parsers of requests, by method. They raise ValueError over a limit, and DecodeError as protobuf.

    The limits come first: protobuf blocks while it parses, and turns 64 MiB of empty passages into 4 GB.
    """
    return {method.name: _reader(method) for method in SERVICE.methods}


def _reader(method: Any) -> Callable[[bytes], Any]:
    parse = message_factory.GetMessageClass(method.input_type).FromString

    def read(data: bytes) -> Any:
        if len(data) > _MAX_REQUEST_BYTES and method.name != "Ingest":
            raise ValueError(f"it has {len(data)} bytes; the maximum is {_MAX_REQUEST_BYTES}")
        if not _few_fields(data):
            raise ValueError(f"it has more than {_MAX_REQUEST_FIELDS} fields")
        return parse(data)

    return read


def _few_fields(data: bytes) -> bool:
    """Whether a message has few enough fields. What protobuf will refuse is not counted to its end."""
    at = 0
    for _ in range(_MAX_REQUEST_FIELDS):
        if at >= len(data):
            return True
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind in (0, 2):
            value, at = _varint(data, at)
            at += value if kind == 2 else 0
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        # Groups (3, 4) have no length: their fields are counted as the message's.
    return at >= len(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and the position behind it; behind the end if there is none."""
    value = 0
    for shift, byte in enumerate(data[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    return 0, len(data)


def page_token(tenant: str, corpus: str, last: str) -> str:
    """The token that continues a listing after the item `last`, valid for one tenant and one listing only.

    `tenant` is the tenant's salt; `corpus` may be empty.
    """
    return (_mark(tenant, corpus, last.encode()) + last.encode()).hex()


def listed_to(tenant: str, corpus: str, token: str) -> str:
    """The item that a page token continues after; empty for the first page.

    Raises:
        InvalidArgument: the token was not issued to this tenant for this listing.
    """
    if not token:
        return ""
    try:
        raw = bytes.fromhex(token) if len(token) <= 2 * (_MARK_BYTES + _MAX_NAME_BYTES) else b""
        mark, name = raw[:_MARK_BYTES], raw[_MARK_BYTES:]
        if name and hmac.compare_digest(mark, _mark(tenant, corpus, name)):
            return name.decode()
    except ValueError:
        pass
    raise InvalidArgument(
        f"bad page token {token[:80]!r}: send next_page_token of the previous reply unchanged, for the same listing"
    )


def _mark(tenant: str, corpus: str, name: bytes) -> bytes:
    return hmac.new(tenant.encode(), corpus.encode() + b"\0" + name, hashlib.sha256).digest()[:_MARK_BYTES]
