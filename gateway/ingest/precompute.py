"""Encodes a corpus ahead of time: each chunk alone, or after its most similar neighbours (FusionRAG, section 3.1)."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence, Sized
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fusionkv.gateway import plan
from fusionkv.gateway.auth.tenants import Tenant
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.retrieval.base import (
    HybridSearch,
    TextChunk,
    check_corpus,
    check_document,
    check_worker,
    no_document,
)
from fusionkv.gateway.tokens import ModelIdentity, Vocabulary
from fusionkv.gateway.workers.workers import MODEL_SECONDS, WorkerPool
from fusionkv.protos.contract.names import DEFAULT, full_name
from fusionkv.protos.contract.requests import RequestedRecipe
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import cancellation
from fusionkv.protos.runtime.errors import InvalidArgument, Unavailable

log = logging.getLogger(__name__)
# Chunks per batch, whose variants are stored in one commit.
_BATCH = 16
# Documents whose first chunks make a corpus's primer.
_SAMPLE = 8
# The papers use 10; searching more than a few hundred takes longer than encoding.
_MAX_NEIGHBOURS = 256
# Attempts to encode a chunk: on a busy machine, storing it may take longer than the worker waits.
_ATTEMPTS, _PAUSE_SECONDS = 3, 1.0
# Between two reports of progress within a batch, which takes minutes where each chunk is long.
_REPORT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass over a corpus, or over one of its documents.

    Attributes:
        neighbours: number of neighbours that each chunk is encoded with.
        sizes: chunks by document at the start of the pass.
        sample: chunks to make the corpus's primer of.
    """

    tenant: Tenant
    corpus: str
    requested: RequestedRecipe
    vocabulary: Vocabulary
    model: ModelIdentity
    neighbours: int
    sizes: dict[str, int]
    sample: Sequence[TextChunk] = ()

    @property
    def name(self) -> str:
        """The workers' name for the corpus."""
        return plan.corpus_name(self.tenant.salt, self.corpus)

    async def batches(self) -> AsyncGenerator[tuple[list[tuple[TextChunk, np.ndarray]], int]]:
        """Yields batches of chunks with their embeddings, and the known number of all chunks.

        A batch holds chunks of several documents: a worker computes several short ones in one step.
        """
        total = sum(self.sizes.values())
        waiting: list[tuple[TextChunk, np.ndarray]] = []
        for name, counted in self.sizes.items():
            stored = await self.tenant.retrieval.chunks(self.corpus, name, self.model)
            # The document may have been replaced since `sizes` was counted.
            total += len(stored) - counted
            waiting += stored
            while len(waiting) >= _BATCH:
                yield waiting[:_BATCH], total
                waiting = waiting[_BATCH:]
        yield waiting, total

    async def request(self, chunk: TextChunk, vector: np.ndarray) -> fusion_pb2.EncodeRequest:
        """The request that encodes a chunk: with its neighbours, after the corpus's primer, or alone."""
        if self.neighbours:
            request = self.encode_request([*await self._nearest(chunk, vector), chunk])
            request.mode = request.MODE_NEIGHBOURS
        elif self.requested.recipe.primed:
            request = self.encode_request([*self._fitting(self.sample, chunk), chunk])
            request.mode, request.corpus = request.MODE_PRIMED, self.name
        else:
            request = self.encode_request([chunk])
            request.mode = request.MODE_EXACT
        return request

    async def _nearest(self, chunk: TextChunk, vector: np.ndarray) -> list[TextChunk]:
        """The most similar other chunks, best first, as many as fit into the model's length."""
        query = vector if vector.size else None
        limit = self.neighbours + 1
        nearest = await self.tenant.retrieval.nearest(self.corpus, chunk.text, query, limit, self.model)
        return self._fitting([c for c in nearest if c.key != chunk.key][: self.neighbours], chunk)

    def _fitting(self, others: Sequence[TextChunk], chunk: TextChunk) -> list[TextChunk]:
        """The first of some chunks, as many as fit into the model's length with another one."""
        room = self.vocabulary.model.max_tokens - len(self.vocabulary.system()) - len(chunk.ids)
        sizes = itertools.accumulate(len(other.ids) for other in others)
        return [other for other, size in zip(others, sizes, strict=True) if size <= room]

    def encode_request(self, chunks: Sequence[TextChunk]) -> fusion_pb2.EncodeRequest:
        """A request to encode the last chunk after the others, without a mode."""
        *before, chunk = (fusion_pb2.Tokens(ids=chunk.ids) for chunk in chunks)
        return fusion_pb2.EncodeRequest(
            system=fusion_pb2.Tokens(ids=self.vocabulary.system()),
            before=before,
            chunk=chunk,
            model_fingerprint=self.vocabulary.model.fingerprint,
            tenant=self.tenant.salt,
        )


class Precompute:
    """Encodes corpora, and skips chunks that the cache service has.

    A worker looks up each chunk in one round trip: the KV of a variant that a corpus records may have been evicted.
    """

    def __init__(self, config: GatewayConfig, workers: WorkerPool, search: HybridSearch) -> None:
        self._config = config
        self._workers = workers
        self._search = search

    async def run(self, tenant: Tenant, request: pb.PrecomputeRequest) -> AsyncGenerator[pb.PrecomputeResponse]:
        """Encodes a corpus, and streams the progress.

        Raises:
            NotFound: the corpus or document does not exist.
            InvalidArgument: the recipe reuses nothing.
            Unavailable: no worker, or the worker's cache service can't be reached.
            ResourceExhausted: the tenant's quota of tokens is used up; what has been encoded stays stored.
        """
        if request.name:
            check_document(request.name)
        work = await self._begin(tenant, request.corpus, request.recipe, request.neighbours, request.name)
        done, skipped, total = 0, 0, sum(work.sizes.values())
        yield pb.PrecomputeResponse(total=total)
        async for batch, total in work.batches():
            existed: list[bool] = []
            if batch:
                tenant.meter.check_tokens()
                async with aclosing(_now_and_then(self._encode(work, batch, existed), existed)) as encoding:
                    async for _ in encoding:
                        yield pb.PrecomputeResponse(
                            done=done + len(existed), total=total, skipped=skipped + sum(existed)
                        )
            done, skipped = done + len(existed), skipped + sum(existed)
            yield pb.PrecomputeResponse(done=done, total=total, skipped=skipped)

    async def plan(
        self, tenant: Tenant, request: pb.PlanPrecomputeRequest
    ) -> AsyncGenerator[pb.PlanPrecomputeResponse]:
        """Streams the requests that `run` would send to workers, one batch at a time. Raises as `run`."""
        work = await self._begin(tenant, request.corpus, request.recipe)
        async for batch, total in work.batches():
            requests = [await work.request(*pair) for pair in batch]
            yield pb.PlanPrecomputeResponse(requests=requests, total=total)

    async def _begin(
        self, tenant: Tenant, corpus: str, recipe: str, neighbours: int = 0, document: str = ""
    ) -> _Pass:
        check_corpus(corpus)
        # Before the worker is called: an unknown corpus is reported as such even if no worker runs.
        made_with = await tenant.retrieval.check(corpus)
        vocabulary = await self._workers.model(
            Deadline.after(MODEL_SECONDS), partial(check_worker, corpus, made_with)
        )
        requested = _requested(recipe, self._config.recipe, vocabulary)
        count = neighbours or requested.recipe.neighbours
        if count > _MAX_NEIGHBOURS:
            raise InvalidArgument(f"{count} neighbours for each chunk; the maximum is {_MAX_NEIGHBOURS}")
        model = self._search.identity(vocabulary.identity)
        if document:
            stored = await tenant.retrieval.chunks(corpus, document, model)
            if not stored:
                raise no_document(document)
            sizes = {document: len(stored)}
        else:
            sizes = {d.name: d.chunks for d in await tenant.retrieval.documents(corpus)}
        sample: list[TextChunk] = []
        if requested.recipe.primed and not count:
            names = sorted(d.name for d in await tenant.retrieval.documents(corpus, limit=_SAMPLE))
            for name in names:
                sample += [chunk for chunk, _ in (await tenant.retrieval.chunks(corpus, name, model))[:1]]
        return _Pass(tenant, corpus, requested, vocabulary, model, count, sizes, sample)

    async def _encode(self, work: _Pass, batch: list[tuple[TextChunk, np.ndarray]], existed: list[bool]) -> None:
        """Encodes and stores a batch; adds to `existed`, for each chunk, whether it was in the cache."""
        slots = asyncio.Semaphore(self._config.precompute_concurrency)

        async def one(chunk: TextChunk, vector: np.ndarray) -> TextChunk:
            async with slots:
                request = await work.request(chunk, vector)
                encoded = await self._encoded(request)
                if not encoded.existed:
                    # With a primer, the chunk is encoded twice, and those before it are not.
                    others = [request.chunk] if request.mode == request.MODE_PRIMED else request.before
                    work.tenant.meter.spend(sum(len(part.ids) for part in (request.chunk, *others)))
                # Without neighbours, keep a variant that was encoded with neighbours before: it is better.
                count = work.neighbours
                existed.append(encoded.existed)
                return replace(chunk, variant=encoded.variant, neighbours=count) if count else chunk

        done = await cancellation.all_of(one(*pair) for pair in batch)
        if changed := [new for new, (old, _) in zip(done, batch, strict=True) if new != old]:
            await work.tenant.retrieval.set_variants(work.corpus, changed)

    async def _encoded(self, request: fusion_pb2.EncodeRequest) -> fusion_pb2.EncodeResponse:
        """Encodes a chunk on a worker; retries while workers or their cache service do not answer in time."""
        for attempt in range(1, _ATTEMPTS):
            try:
                return await self._workers.encode(request)
            except Unavailable as error:
                log.warning("retrying to encode a chunk: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS * attempt)
        return await self._workers.encode(request)


async def _now_and_then(work: Coroutine[Any, Any, None], progress: Sized) -> AsyncGenerator[None]:
    """Runs `work`; yields when `progress` has grown, at most once in a while. Ends, or raises, with `work`."""
    task = asyncio.create_task(work)
    try:
        reported = len(progress)
        while not (await asyncio.wait([task], timeout=_REPORT_SECONDS))[0]:
            if len(progress) > reported:
                reported = len(progress)
                yield
        task.result()
    finally:
        task.cancel()


def _requested(name: str, default: str, vocabulary: Vocabulary) -> RequestedRecipe:
    """The recipe to encode for; an empty name means the gateway's."""
    requested = RequestedRecipe.of(full_name(name or DEFAULT, default), vocabulary.model)
    if requested.recipe.lossless:
        raise InvalidArgument(f"recipe {requested.name!r} reuses no chunks: there is nothing to encode ahead of time")
    return requested
