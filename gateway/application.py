"""The gateway's application, below its protocols: what each call does, given the call that was admitted."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from opentelemetry import metrics

from fusionkv.gateway.auth import access
from fusionkv.gateway.auth.admission import AdmittedCall, CallAdmission
from fusionkv.gateway.auth.tenants import Tenants
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest.ingest import Ingest
from fusionkv.gateway.ingest.precompute import Precompute
from fusionkv.gateway.passthrough import passed
from fusionkv.gateway.pipeline import AnswerEngine, Pipeline
from fusionkv.gateway.plan import corpus_name, order
from fusionkv.gateway.retrieval import page_tokens
from fusionkv.gateway.retrieval.base import HybridSearch, Query, check_corpus, check_document
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.contract.names import recipe_label
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)

if TYPE_CHECKING:
    from fusionkv.gateway.workers.vllm import VLLMEngine

R = TypeVar("R")
_degraded = metrics.get_meter(__name__).create_counter(
    "fusionkv.gateway.degraded", description="answers given without the cache"
)
# A readiness check takes at most _READY_SECONDS, and its result counts for _FRESH_SECONDS.
_READY_SECONDS, _FRESH_SECONDS = 2.0, 1.0
_PAGE = 100
_MAX_PAGE = 1000


class Application:
    """What the gateway does for its callers, who reach it by gRPC (`servicer.py`) or by HTTP (`http/`).

    Attributes:
        admission: admits the calls that other methods receive.
        ingest: stores and rebuilds documents.
        precompute: encodes corpora ahead of time.
    """

    def __init__(
        self, config: GatewayConfig, tenants: Tenants, workers: WorkerPool, search: HybridSearch, engine: AnswerEngine
    ) -> None:
        """`engine` answers prompts."""
        self.admission = CallAdmission(config, tenants)
        self.ingest = Ingest(config, workers, search)
        self.precompute = Precompute(config, workers, search)
        self._config = config
        self._tenants = tenants
        self._workers = workers
        self._search = search
        self._engine = engine
        self._pipeline = Pipeline(config, engine, search)
        self._started = time.monotonic()
        self._checking = asyncio.Lock()
        self._ready, self._checked = False, -math.inf

    async def delete(self, call: AdmittedCall, request: pb.DeleteRequest) -> pb.DeleteResponse:
        check_corpus(request.corpus)
        if request.name:
            check_document(request.name)
        tenant = call.tenant
        try:
            documents, chunks = await tenant.retrieval.delete(request.corpus, request.name)
        finally:
            # Of a corpus that is gone too: an earlier call may not have reached all workers.
            if not request.name:
                await self._workers.forget_corpus(tenant.salt, corpus_name(tenant.salt, request.corpus))
        return pb.DeleteResponse(documents=documents, chunks=chunks)

    async def list(self, call: AdmittedCall, request: pb.ListRequest) -> pb.ListResponse:
        tenant, corpus, size = call.tenant, request.corpus, min(request.page_size or _PAGE, _MAX_PAGE)
        if corpus:
            check_corpus(corpus)
        after = page_tokens.decode(tenant.salt, corpus, request.page_token)
        if corpus:
            items = await tenant.retrieval.documents(corpus, after, size + 1)
        else:
            items = [i for i in await tenant.retrieval.corpora() if i.name > after][: size + 1]
        more = len(items) > size
        return pb.ListResponse(
            items=[pb.Item(**asdict(i)) for i in items[:size]],
            next_page_token=page_tokens.encode(tenant.salt, corpus, items[size - 1].name) if more else "",
        )

    async def retrieve(self, call: AdmittedCall, request: pb.RetrieveRequest) -> pb.RetrieveResponse:
        if request.order == pb.ORDER_PREFIX:
            raise InvalidArgument("the order prefix depends on the prompts of Generate: Retrieve takes another order")
        query = Query(request.corpus, request.question, request.filter)
        passages = await self._pipeline.retrieve(call.tenant, query, request.top_k, call.deadline)
        return pb.RetrieveResponse(passages=[source for _, source in order(passages, request.order)])

    async def embed(
        self, call: AdmittedCall, texts: Sequence[str], model: str, dimensions: int
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
        tenant, embedder = call.tenant, self._search.embedder
        if embedder is None:
            raise FailedPrecondition("this gateway has no embedder: it retrieves by BM25 only")
        if model not in ("", embedder.name, embedder.name.partition("@")[0]):
            raise NotFound(f"unknown embedding model {model[:80]!r}; known: {embedder.name}")
        if dimensions not in (0, embedder.dim):
            raise InvalidArgument(f"{embedder.name} supports only {embedder.dim} dimensions")
        tokens = sum(-(-len(text.encode()) // 4) for text in texts)
        tenant.meter.spend(tokens)
        try:
            async with asyncio.timeout(call.deadline.remaining()):
                return await embedder.embed(texts, tenant=tenant.salt), embedder.name, tokens
        except (ResourceExhausted, Unavailable):  # nothing was computed, and the caller will retry
            tenant.meter.give_back(tokens)
            raise
        except TimeoutError as error:
            raise DeadlineExceeded("embedding took longer than the request's deadline") from error

    def generate(self, call: AdmittedCall, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse]:
        return self._noted(call, self._pipeline.answer(call.tenant, request, call.deadline))

    def passed(
        self, call: AdmittedCall, request: pb.GenerateRequest, fields: Mapping[str, Any], stream: bool
    ) -> AsyncGenerator[pb.GenerateResponse | dict[str, Any]]:
        """Passes a chat on to vLLM, as `passthrough.passed`; only with decode = vllm."""
        engine = cast("VLLMEngine", self._engine)
        return self._noted(call, passed(engine, self._pipeline, call, request, fields, stream))

    async def model(self, call: AdmittedCall) -> pb.GetModelResponse:
        model = (await self._engine.model(call.deadline)).model
        return pb.GetModelResponse(
            name=model.name,
            fingerprint=model.fingerprint,
            max_tokens=model.max_tokens,
            max_new_tokens=model.max_new_tokens,
        )

    async def stats(self, call: AdmittedCall) -> pb.StatsResponse:
        # The tenant of calls without a token is the gateway's own: its operators see all tenants.
        everyone = self._tenants.name() == self._config.tenant
        tenants = self._tenants.all if everyone else [call.tenant]
        counts = self.admission.counts if everyone else [call.counts]
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
            model = (await self._workers.model(Deadline.after(2.0))).model
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
        await self.ingest.close()
        await self._engine.close()
        await self._search.close()
        await self._tenants.close()

    async def _noted(self, call: AdmittedCall, answer: AsyncGenerator[R]) -> AsyncGenerator[R]:
        """Passes an answer on, and notes what its summary says."""
        async with contextlib.aclosing(answer) as responses:
            async for response in responses:
                if isinstance(response, pb.GenerateResponse) and response.HasField("summary"):
                    self._ready, self._checked = True, time.monotonic()  # an answer says more than a check
                    _note(call, response.summary)
                yield response


def _note(call: AdmittedCall, summary: Summary) -> None:
    call.log_fields.update(
        recipe=summary.recipe, ttft=round(summary.seconds.ttft, 6), tokens=summary.tokens_generated
    )
    if summary.degraded:
        call.counts.degraded += 1
        _degraded.add(1, {"fusionkv.recipe": recipe_label(summary.recipe)})
        call.log_fields["degraded"] = summary.degraded_reason
        summary.degraded_reason = access.withheld(summary.degraded_reason)
