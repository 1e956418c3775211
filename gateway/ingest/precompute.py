"""Encodes a corpus ahead of time: every chunk behind its most similar neighbours (FusionRAG 3.1)."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np

from fusionkv.fusion_worker.client import DEFAULT
from fusionkv.gateway import plan
from fusionkv.gateway.auth.tenants import Tenant
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest.ingest import check_corpus, check_document
from fusionkv.gateway.retrieval.base import Chunk
from fusionkv.gateway.retrieval.hybrid import HybridSearch
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument, NotFound

# Variants stored in one commit.
_TOGETHER = 32
# The papers use 10; a search for more than a few hundred takes longer than the encoding.
_MOST_NEIGHBOURS = 256


class Precompute:
    """Works through a corpus, document by document; what the cache service has already is skipped.

    A worker looks each chunk up there, in one round trip: what a corpus says was encoded may be lost since.
    """

    def __init__(self, config: GatewayConfig, workers: WorkerPool, search: HybridSearch) -> None:
        self._config = config
        self._workers = workers
        self._search = search

    async def run(self, tenant: Tenant, request: pb.PrecomputeRequest) -> AsyncGenerator[pb.PrecomputeResponse]:
        """Streams progress after each batch, first with nothing done.

        Raises:
            NotFound: no such corpus or document.
            InvalidArgument: the recipe needs no neighbours.
            Unavailable: no worker, or its cache service can't be reached.
            ResourceExhausted: the tenant's quota of tokens is used up; what is done is stored.
        """
        check_corpus(request.corpus)
        if request.name:
            check_document(request.name)
        # Before the model is asked, so that an unknown corpus is told as such although no worker runs.
        await tenant.retrieval.check(request.corpus)
        vocabulary = await self._workers.model()
        default = _count(request.recipe, self._config.recipe, vocabulary)
        count = request.neighbours or default
        if count > _MOST_NEIGHBOURS:
            raise InvalidArgument(f"{count} neighbours for each chunk; at most {_MOST_NEIGHBOURS} are taken")
        model = self._search.identity(vocabulary.identity)
        if request.name:
            found = await tenant.retrieval.chunks(request.corpus, request.name, model)
            if not found:
                raise NotFound(f"corpus {request.corpus!r} has no document {request.name!r}")
            sizes = {request.name: len(found)}
        else:
            sizes = {d.name: d.chunks for d in await tenant.retrieval.documents(request.corpus)}
        progress = pb.PrecomputeResponse(total=sum(sizes.values()))
        yield _copy(progress)
        for name, counted in sizes.items():
            stored = await tenant.retrieval.chunks(request.corpus, name, model)
            for start in range(0, len(stored), _TOGETHER):
                batch = stored[start : start + _TOGETHER]
                tenant.meter.check_tokens()
                skipped = await self._encode(tenant, request.corpus, batch, count, vocabulary)
                progress.done += len(batch)
                progress.skipped += skipped
                yield _copy(progress)
            # The document may have been replaced since it was counted.
            progress.total += len(stored) - counted
        yield _copy(progress)

    async def _encode(
        self,
        tenant: Tenant,
        corpus: str,
        batch: list[tuple[Chunk, np.ndarray]],
        count: int,
        vocabulary: Vocabulary,
    ) -> int:
        """Encodes and stores a batch; returns how many the cache service had already."""
        slots = asyncio.Semaphore(self._config.precompute_concurrency)

        async def one(chunk: Chunk, vector: np.ndarray) -> tuple[Chunk, bool]:
            async with slots:
                near = await self._neighbours(tenant, corpus, chunk, vector, count, vocabulary)
                request = fusion_pb2.EncodeRequest(
                    system=fusion_pb2.Tokens(ids=vocabulary.system()),
                    before=[fusion_pb2.Tokens(ids=n.ids) for n in near],
                    chunk=fusion_pb2.Tokens(ids=chunk.ids),
                    mode=fusion_pb2.EncodeRequest.MODE_NEIGHBOURS,
                    model_fingerprint=vocabulary.model.fingerprint,
                    tenant=tenant.salt,
                )
                encoded = await self._workers.encode(request)
                if not encoded.existed:
                    tenant.meter.spend(len(chunk.ids) + sum(len(n.ids) for n in near))
                return replace(chunk, variant=encoded.variant, neighbours=count), encoded.existed

        tasks = [asyncio.create_task(one(*pair)) for pair in batch]
        try:
            done = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        known = {chunk for chunk, _ in batch}
        if changed := [chunk for chunk, _ in done if chunk not in known]:
            await tenant.retrieval.set_variants(corpus, changed)
        return sum(existed for _, existed in done)

    async def _neighbours(
        self, tenant: Tenant, corpus: str, chunk: Chunk, vector: np.ndarray, count: int, vocabulary: Vocabulary
    ) -> list[Chunk]:
        """The most similar other chunks, best first, as many as the model's length takes."""
        known = vector if vector.size else None
        model = self._search.identity(vocabulary.identity)
        found = await tenant.retrieval.nearest(corpus, chunk.text, known, count + 1, model)
        room = vocabulary.model.max_tokens - len(vocabulary.system()) - len(chunk.ids)
        near = []
        for other in [c for c in found if c.key != chunk.key][:count]:
            room -= len(other.ids)
            if room < 0:
                break
            near.append(other)
        return near


def _count(name: str, default: str, vocabulary: Vocabulary) -> int:
    """How many neighbours a recipe wants; an empty name takes the default, or the first recipe that wants any."""
    fitting = {r.name: r.neighbours for r in vocabulary.model.recipes if r.neighbours}
    named = "" if name == DEFAULT else name
    found = plan.recipe(named or default, vocabulary)
    if not (named or found.neighbours) and fitting:
        return next(iter(fitting.values()))
    if not found.neighbours:
        known = ", ".join(fitting) or "none"
        raise InvalidArgument(f"recipe {found.name!r} needs no neighbours; those that do: {known}")
    return found.neighbours


def _copy(progress: pb.PrecomputeResponse) -> pb.PrecomputeResponse:
    return pb.PrecomputeResponse(done=progress.done, total=progress.total, skipped=progress.skipped)
