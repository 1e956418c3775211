"""Encodes a corpus ahead of time: every chunk alone, or behind its most similar neighbours (FusionRAG 3.1)."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
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
# Chunks, from as many documents if there are, that a worker learns a correction from.
_SAMPLE = 32


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
            InvalidArgument: the recipe reuses nothing.
            Unavailable: no worker, or its cache service can't be reached.
            ResourceExhausted: the tenant's quota of tokens is used up; what is done is stored.
        """
        check_corpus(request.corpus)
        if request.name:
            check_document(request.name)
        # Before the model is asked, so that an unknown corpus is told as such although no worker runs.
        await tenant.retrieval.check(request.corpus)
        vocabulary = await self._workers.model()
        recipe = _recipe(request.recipe, self._config.recipe, vocabulary)
        count = request.neighbours or recipe.neighbours
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
        if not request.name and "corrected" in recipe.name.split("+")[1:]:
            await self._correct(tenant, request.corpus, sizes, vocabulary)
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
                near = await self._neighbours(tenant, corpus, chunk, vector, count, vocabulary) if count else []
                request = _request(tenant, [*near, chunk], vocabulary)
                request.mode = request.MODE_NEIGHBOURS if count else request.MODE_EXACT
                encoded = await self._workers.encode(request)
                if not encoded.existed:
                    tenant.meter.spend(len(chunk.ids) + sum(len(n.ids) for n in near))
                # What was encoded behind neighbours before is still there, and better.
                new = replace(chunk, variant=encoded.variant, neighbours=count) if count else chunk
                return new, encoded.existed

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

    async def _correct(self, tenant: Tenant, corpus: str, sizes: dict[str, int], vocabulary: Vocabulary) -> None:
        """Has a worker learn the corpus's correction; nothing where there are no two chunks."""
        names, model = sorted(sizes), self._search.identity(vocabulary.identity)
        sample: list[Chunk] = []
        for name in names[:: max(1, len(names) // _SAMPLE)]:
            stored = await tenant.retrieval.chunks(corpus, name, model)
            sample += [chunk for chunk, _ in stored[: max(1, _SAMPLE // len(names))]]
        if len({chunk.ids for chunk in sample}) < 2:
            return
        request = _request(tenant, sample[:_SAMPLE], vocabulary)
        request.mode, request.corpus = request.MODE_CORRECTION, corpus
        await self._workers.encode(request)

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


def _recipe(name: str, default: str, vocabulary: Vocabulary) -> fusion_pb2.Recipe:
    """The recipe to encode for; an empty name is the gateway's own."""
    found = plan.recipe(default if name in ("", DEFAULT) else name, vocabulary)
    if not (found.takes_modifiers or found.neighbours):
        raise InvalidArgument(f"recipe {found.name!r} reuses no chunks: there is nothing to encode ahead of time")
    return found


def _request(tenant: Tenant, chunks: Sequence[Chunk], vocabulary: Vocabulary) -> fusion_pb2.EncodeRequest:
    """The last chunk is the one to encode; `mode` is left to the caller."""
    *before, chunk = (fusion_pb2.Tokens(ids=chunk.ids) for chunk in chunks)
    return fusion_pb2.EncodeRequest(
        system=fusion_pb2.Tokens(ids=vocabulary.system()),
        before=before,
        chunk=chunk,
        model_fingerprint=vocabulary.model.fingerprint,
        tenant=tenant.salt,
    )


def _copy(progress: pb.PrecomputeResponse) -> pb.PrecomputeResponse:
    return pb.PrecomputeResponse(done=progress.done, total=progress.total, skipped=progress.skipped)
