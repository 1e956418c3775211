"""The gateway's RPCs: limits, admission, deadlines and counters around ingestion, answering and precomputation."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from opentelemetry import metrics

from fusionkv.gateway.auth import access
from fusionkv.gateway.auth.tenants import Shares, Tenant, Tenants
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest.ingest import Ingest
from fusionkv.gateway.ingest.precompute import Precompute
from fusionkv.gateway.pipeline import Engine, Pipeline
from fusionkv.gateway.plan import corpus_name, order
from fusionkv.gateway.retrieval.base import MAX_NAME, HybridSearch, check_corpus, check_document
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.contract.names import recipe_label
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
SERVICE = pb.DESCRIPTOR.services_by_name["GatewayService"]
_meter = metrics.get_meter(__name__)
_requests = _meter.create_counter("fusionkv.gateway.requests", description="calls, by method")
_failures = _meter.create_counter("fusionkv.gateway.failures", description="failed calls, by method and status")
_in_flight = _meter.create_up_down_counter("fusionkv.gateway.in_flight", description="calls being answered")
_degraded = _meter.create_counter("fusionkv.gateway.degraded", description="answers given without the cache")
# A readiness check takes at most _READY_SECONDS, and its result counts for _FRESH_SECONDS.
_READY_SECONDS, _FRESH_SECONDS = 2.0, 1.0
# Errors that other services may have raised, whose messages name them.
_FROM_BEHIND = (Unavailable, ResourceExhausted, DeadlineExceeded, FailedPrecondition)
_PAGE = 100
_MAX_PAGE = 1000
_MAX_NAME_BYTES = 4 * MAX_NAME
_MARK_BYTES = 8


@dataclass(slots=True)
class Counts:
    """What Stats says of a tenant's calls."""

    served: int = 0
    failed: int = 0
    degraded: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A call that was let in: its tenant, and that tenant's counts and the fields of the log record, to add to."""

    tenant: Tenant
    counts: Counts
    log_fields: dict[str, Any]


_CALL: ContextVar[Admitted] = ContextVar("fusionkv.call")


class GatewayServicer:
    """Implements the service of gateway.proto, one method per RPC."""

    def __init__(
        self,
        config: GatewayConfig,
        tenants: Tenants,
        workers: WorkerPool,
        search: HybridSearch,
        engine: Engine,
    ) -> None:
        """`engine` answers prompts."""
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
        self._counts = defaultdict[str, Counts](Counts)  # by the tenant's name
        self._checking = asyncio.Lock()
        self._ready, self._checked = False, -math.inf

    async def Ingest(self, request: pb.IngestRequest, context: rpc.Call | None) -> pb.IngestResponse:
        return await self._ingest.file(_tenant(), request, self._time_left(context))

    async def Upload(self, requests: AsyncIterator[pb.UploadRequest], context: rpc.Call | None) -> pb.UploadResponse:
        return pb.UploadResponse(stored=await self._ingest.upload(_tenant(), requests, self._time_left(context)))

    def Precompute(
        self, request: pb.PrecomputeRequest, context: rpc.Call | None
    ) -> AsyncGenerator[pb.PrecomputeResponse]:
        return self._precompute.run(_tenant(), request)

    def PlanPrecompute(
        self, request: pb.PlanPrecomputeRequest, context: rpc.Call | None
    ) -> AsyncGenerator[pb.PlanPrecomputeResponse]:
        return self._precompute.plan(_tenant(), request)

    def Move(self, request: pb.MoveRequest, context: rpc.Call | None) -> AsyncGenerator[pb.MoveResponse]:
        return self._ingest.move(_tenant().retrieval, request.corpus)

    async def Delete(self, request: pb.DeleteRequest, context: rpc.Call | None) -> pb.DeleteResponse:
        check_corpus(request.corpus)
        if request.name:
            check_document(request.name)
        tenant = _tenant()
        try:
            documents, chunks = await tenant.retrieval.delete(request.corpus, request.name)
        finally:
            # Of a corpus that is gone too: an earlier call may not have reached all workers.
            if not request.name:
                await self._workers.forget_corpus(tenant.salt, corpus_name(tenant.salt, request.corpus))
        return pb.DeleteResponse(documents=documents, chunks=chunks)

    async def List(self, request: pb.ListRequest, context: rpc.Call | None) -> pb.ListResponse:
        tenant, size = _tenant(), min(request.page_size or _PAGE, _MAX_PAGE)
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
        if request.order == pb.ORDER_PREFIX:
            raise InvalidArgument("the order prefix depends on the prompts of Generate: Retrieve takes another order")
        search, left = (request.corpus, request.question, request.top_k), self._time_left(context)
        found = await self._pipeline.retrieve(_tenant(), *search, left, where=request.filter)
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
        tenant, embedder = _tenant(), self._search.embedder
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
                return await embedder.embed(texts, tenant=tenant.salt), embedder.name, tokens
        except (ResourceExhausted, Unavailable):  # nothing was computed, and the caller will retry
            tenant.meter.give_back(tokens)
            raise
        except TimeoutError as error:
            raise DeadlineExceeded("embedding took longer than the request's deadline") from error

    async def Generate(
        self, request: pb.GenerateRequest, context: rpc.Call | None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        call = _CALL.get()
        answer = self._pipeline.answer(call.tenant, request, self._time_left(context))
        async with contextlib.aclosing(answer) as responses:
            async for response in responses:
                if response.HasField("summary"):
                    self._summarised(response.summary, call)
                yield response

    async def GetModel(self, request: pb.GetModelRequest, context: rpc.Call | None) -> pb.GetModelResponse:
        model = (await self._engine.model(self._time_left(context))).model
        return pb.GetModelResponse(
            name=model.name,
            fingerprint=model.fingerprint,
            max_tokens=model.max_tokens,
            max_new_tokens=model.max_new_tokens,
        )

    async def Stats(self, request: pb.StatsRequest, context: rpc.Call | None) -> pb.StatsResponse:
        # The tenant of calls without a token is the gateway's own: its operators see all tenants.
        name = self._tenants.name()
        every = name == self._config.tenant
        tenants = self._tenants.all if every else [await self._tenants.current()]
        counts = list(self._counts.values()) if every else [self._counts[name]]
        corpora = [c for tenant in tenants for c in await tenant.retrieval.corpora()]
        response = pb.StatsResponse(
            version=version("fusionkv"),
            requests=sum(c.served for c in counts),
            requests_failed=sum(c.failed for c in counts),
            requests_degraded=sum(c.degraded for c in counts),
            documents=sum(c.documents for c in corpora),
            chunks=sum(c.chunks for c in corpora),
            tenants=len(tenants),
            uptime_seconds=time.monotonic() - self._started,
        )
        # A gateway whose worker is down still reports its own figures.
        with contextlib.suppress(ServiceError):
            model = (await self._workers.model(2.0)).model
            response.model, response.model_fingerprint = model.name, model.fingerprint
            response.worker = self._workers.address()
        return response

    async def ready(self) -> bool:
        """Whether prompts would be answered now. Callers need no token: together they cause one check a second."""
        async with self._checking:
            if time.monotonic() - self._checked >= _FRESH_SECONDS:
                self._ready = await self._engine.ready(_READY_SECONDS)
                self._checked = time.monotonic()
            return self._ready

    async def close(self) -> None:
        """Closes everything. Call it after the last call has ended."""
        await self._ingest.close()
        await self._engine.close()
        await self._search.close()
        await self._tenants.close()

    def _time_left(self, context: rpc.Call | None) -> float:
        remaining = rpc.time_remaining(context)
        return self._config.request_seconds if remaining is None else remaining

    def _summarised(self, summary: Summary, call: Admitted) -> None:
        log_fields = call.log_fields
        self._ready, self._checked = True, time.monotonic()  # an answer says more than a check
        log_fields |= {
            "recipe": summary.recipe,
            "ttft": round(summary.seconds.ttft, 6),
            "tokens": summary.tokens_generated,
        }
        if summary.degraded:
            call.counts.degraded += 1
            _degraded.add(1, {"fusionkv.recipe": recipe_label(summary.recipe)})
            log_fields["degraded"] = summary.degraded_reason
            summary.degraded_reason = access.withheld(summary.degraded_reason)

    @contextlib.asynccontextmanager
    async def admitted(self, method: str) -> AsyncIterator[None]:
        """Lets a call in, whatever its protocol, before its request is read; counts it, and logs it at its end.

        The other methods, except Stats, are called while this is open, in the same task.

        Raises:
            ResourceExhausted: too many calls are in flight, or the tenant is over its quota.
        """
        if method == "Stats":
            yield
            return
        began, status = time.perf_counter(), "CANCELLED"
        log_fields: dict[str, Any] = {}
        name = self._tenants.name()
        counts = self._counts[name]
        counts.served += 1
        _requests.add(1, {"rpc.method": method})
        try:
            with self._active.holding(name) as held:
                if not held:
                    raise ResourceExhausted(
                        f"{self._active.held} requests are in flight; try again later", retry_after=0.5
                    )
                _in_flight.add(1)
                try:
                    tenant = await self._tenants.current()
                    tenant.meter.admit()
                    _CALL.set(Admitted(tenant, counts, log_fields))
                    yield
                finally:
                    _in_flight.add(-1)
            status = "OK"
        except ServiceError as error:
            status = error.status.name
            if isinstance(error, _FROM_BEHIND):
                error.args = (access.withheld(str(error)),)
            raise
        except ConnectionError:  # an HTTP client has left
            raise
        except Exception:
            status = "INTERNAL"
            raise
        finally:
            if status not in ("OK", "CANCELLED"):
                counts.failed += 1
                _failures.add(1, {"rpc.method": method, "rpc.grpc.status": status})
            log_fields |= {"method": method, "status": status, "seconds": round(time.perf_counter() - began, 6)}
            answer = ""
            if "ttft" in log_fields:
                answer = "; {recipe}, first token after {ttft:.3f} s, {tokens} tokens".format(**log_fields)
            log.info(
                "%s %s after %.3f s%s", method, status, log_fields["seconds"], answer, extra={logs.FIELDS: log_fields}
            )


def _tenant() -> Tenant:
    """The tenant of the call that was admitted."""
    return _CALL.get().tenant


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
