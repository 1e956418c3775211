"""Rebuilds a corpus for the worker's model and the gateway's embedder from its stored text."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from fusionkv.gateway.retrieval.base import Chunk, Retrieval, check_corpus
from fusionkv.gateway.retrieval.hybrid import HybridSearch
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb


async def move(
    retrieval: Retrieval, corpus: str, workers: WorkerPool, search: HybridSearch
) -> AsyncGenerator[pb.MoveResponse]:
    """Rebuilds a corpus, and streams the progress, at the start and after each document.

    Recomputes vectors and token ids, keeps the division into chunks, and drops variants encoded ahead of time.

    Raises:
        InvalidArgument: the corpus's name is invalid.
        NotFound: the corpus does not exist.
        FailedPrecondition: the engine does not support it.
        Unavailable: no worker, or the embedder can't be reached.
    """
    check_corpus(corpus)
    total = sum(document.chunks for document in await retrieval.documents(corpus))
    vocabulary = await workers.model()

    async def rewrite(chunks: Sequence[Chunk], _: np.ndarray) -> tuple[Sequence[Chunk], np.ndarray]:
        ids = await asyncio.to_thread(lambda: [vocabulary.chunk(chunk.text) for chunk in chunks])
        rebuilt = [
            replace(chunk, ids=tuple(chunk_ids), variant=b"", neighbours=0)
            for chunk, chunk_ids in zip(chunks, ids, strict=True)
        ]
        return rebuilt, await search.vectors([chunk.text for chunk in chunks], {})

    done = 0
    yield pb.MoveResponse(total=total)
    async with aclosing(retrieval.move(corpus, rewrite, search.identity(vocabulary.identity))) as documents:
        async for chunks in documents:
            done += chunks
            yield pb.MoveResponse(done=done, total=total)
