"""Embedders and rerankers behind URLs: OpenAI's /v1/embeddings, and /v1/rerank as in vLLM, Jina and Cohere."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from fusionkv.gateway.embed.base import CHARACTERS, Embedder, Reranker
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import FailedPrecondition, Unavailable

_SECONDS = 60.0
_BATCH = 64


class _Endpoint:
    """One endpoint of a server, with the model name to send."""

    path: str

    def __init__(self, url: str, model: str, token: str) -> None:
        """`url` may include the path, or end before it, as in http://127.0.0.1:8000/v1."""
        path = self.path
        self.url = url if url.rstrip("/").endswith(path) else f"{url.rstrip('/')}{path}"
        self.name = model or self.url
        self._model = {"model": model} if model else {}
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(_SECONDS))

    async def _post(self, body: dict[str, Any]) -> Any:
        """Sends a request; returns the JSON of the reply.

        Raises:
            Unavailable: no reply, or an error of the server.
            ResourceExhausted: the server is busy.
            FailedPrecondition: the server rejected the request.
        """
        try:
            async with self._session.post(self.url, json=body | self._model) as response:
                if response.status == 200:
                    return await asyncio.to_thread(json.loads, await response.read())  # up to a few MB
                text = (await response.text(errors="replace"))[:200]
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise Unavailable(f"{self.url}: {error or type(error).__name__}") from error
        raise errors.from_http(response.status, f"{self.url}: status {response.status}: {text}")

    async def close(self) -> None:
        await self._session.close()


class URLEmbedder(_Endpoint, Embedder):
    path = "/embeddings"
    dim = 0

    @classmethod
    async def open(cls, url: str, model: str, token: str) -> "URLEmbedder":
        """Requests one vector to learn the width. Raises as `_Endpoint._post`."""
        embedder = cls(url, model, token)
        try:
            embedder.dim = (await embedder.embed(["width"])).shape[1]
        except BaseException:
            await embedder.close()
            raise
        return embedder

    async def embed(self, texts: Sequence[str], *, question: bool = False) -> np.ndarray:
        parts = [await self._batch(texts[at : at + _BATCH]) for at in range(0, len(texts), _BATCH)]
        vectors = np.concatenate(parts) if parts else np.zeros((0, self.dim), np.float32)
        if self.dim and vectors.shape[1] != self.dim:
            raise FailedPrecondition(
                f"{self.url} returned vectors of {vectors.shape[1]} dimensions instead of {self.dim}"
            )
        return vectors

    async def _batch(self, texts: Sequence[str]) -> np.ndarray:
        body = {"input": [text[:CHARACTERS] for text in texts], "encoding_format": "float"}
        reply = await self._post(body)
        try:
            rows = [row["embedding"] for row in sorted(reply["data"], key=lambda row: row["index"])]
            vectors = await asyncio.to_thread(np.array, rows, np.float32)
            if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
                raise ValueError("not one vector per text")
        except (KeyError, TypeError, ValueError) as error:
            raise FailedPrecondition(f"{self.url} returned no valid embeddings: {error}") from error
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


class URLReranker(_Endpoint, Reranker):
    path = "/rerank"

    async def score(self, question: str, passages: Sequence[str]) -> list[float]:
        if not passages:  # servers refuse a request without documents
            return []
        texts = [text[:CHARACTERS] for text in passages]
        reply = await self._post({"query": question[:CHARACTERS], "documents": texts})
        try:
            scores = {int(row["index"]): float(row["relevance_score"]) for row in reply["results"]}
            return [scores[i] for i in range(len(passages))]
        except (KeyError, TypeError, ValueError) as error:
            raise FailedPrecondition(f"{self.url} did not return one score per passage: {error}") from error
