"""Rebuilds a corpus for the worker's model and the gateway's embedder from its stored text."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from fusionkv.gateway.retrieval.base import Chunk, Retrieval
from fusionkv.gateway.retrieval.hybrid import HybridSearch
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb


class Mover:
    """Recomputes vectors and token ids, keeps the division into chunks, and drops variants encoded ahead of time."""

    def __init__(self, workers: WorkerPool, search: HybridSearch) -> None:
        self._workers = workers
        self._search = search

    async def run(self, retrieval: Retrieval, corpus: str) -> AsyncGenerator[pb.MoveResponse]:
        """Rebuilds a corpus, and streams the progress, at the start and after each document.

        Raises:
            NotFound: the corpus does not exist.
            FailedPrecondition: the engine does not support it.
            Unavailable: no worker, or the embedder can't be reached.
        """
        documents = await retrieval.documents(corpus)
        vocabulary = await self._workers.model()

        async def rewrite(chunks: Sequence[Chunk], _: np.ndarray) -> tuple[Sequence[Chunk], np.ndarray]:
            ids = await asyncio.to_thread(lambda: [vocabulary.chunk(chunk.text) for chunk in chunks])
            rebuilt = [
                replace(chunk, ids=tuple(chunk_ids), variant=b"", neighbours=0)
                for chunk, chunk_ids in zip(chunks, ids, strict=True)
            ]
            return rebuilt, await self._search.vectors([chunk.text for chunk in chunks], {})

        progress = pb.MoveResponse(total=sum(document.chunks for document in documents))
        yield pb.MoveResponse(total=progress.total)
        model = self._search.identity(vocabulary.identity)
        async with aclosing(retrieval.move(corpus, rewrite, model)) as done:
            async for chunks in done:
                progress.done += chunks
                yield pb.MoveResponse(done=progress.done, total=progress.total)
