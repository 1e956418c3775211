"""Embedders and rerankers of local model directories."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fusionkv.gateway.embed import child
from fusionkv.gateway.embed.base import Embedder, Reranker
from fusionkv.gateway.embed.process import ModelProcess

# Texts per batch: 8 of 256 tokens take MiniLM 0.2 s on one core, for which a question may have to wait.
_BATCH = 8
# Maximum characters of a text: most models accept at most 512 tokens.
_CHARACTERS = 1 << 14


class LocalEmbedder(Embedder):
    """An embedder from a Sentence-Transformers directory."""

    def __init__(self, process: ModelProcess) -> None:
        self._process = process
        self.name, self.dim = process.description["name"], process.description["dim"]

    @classmethod
    async def start(cls, directory: Path, threads: int) -> "LocalEmbedder":
        """Raises as `ModelProcess.start`."""
        return cls(await ModelProcess.start(child.EMBED, directory, threads))

    async def embed(self, texts: Sequence[str], *, question: bool = False) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        # Batches of texts of similar length: shorter texts are padded to the longest.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))

        async def batch(places: list[int]) -> None:
            message = {"texts": [texts[i][:_CHARACTERS] for i in places], "question": question}
            _, data = await self._process.ask(message, background=not question)
            vectors[places] = np.frombuffer(data, np.float32).reshape(len(places), self.dim)

        batches = [asyncio.create_task(batch(order[at : at + _BATCH])) for at in range(0, len(order), _BATCH)]
        try:
            await asyncio.gather(*batches)
        finally:
            for task in batches:
                task.cancel()
        return vectors

    async def close(self) -> None:
        await self._process.close()


class LocalReranker(Reranker):
    """A reranker from a cross-encoder directory."""

    def __init__(self, process: ModelProcess) -> None:
        self._process = process
        self.name = process.description["name"]

    @classmethod
    async def start(cls, directory: Path, threads: int) -> "LocalReranker":
        """Raises as `ModelProcess.start`."""
        return cls(await ModelProcess.start(child.RERANK, directory, threads))

    async def score(self, question: str, passages: Sequence[str]) -> list[float]:
        scores: list[float] = []
        for at in range(0, len(passages), _BATCH):
            texts = [text[:_CHARACTERS] for text in passages[at : at + _BATCH]]
            reply, _ = await self._process.ask({"question": question[:_CHARACTERS], "texts": texts})
            scores += reply["scores"]
        return scores

    async def close(self) -> None:
        await self._process.close()
