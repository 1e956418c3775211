"""Embedder and reranker behind a URL: OpenAI's /v1/embeddings, and /v1/rerank as vLLM, Jina and Cohere have it."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from fusionkv.gateway.embed.base import Embedder, Reranker
from fusionkv.protos.runtime.errors import FailedPrecondition, ResourceExhausted, Unavailable

_SECONDS = 60.0
_BATCH = 64
_CHARACTERS = 1 << 14
_BUSY = (429, 503)


class Endpoint:
    """One path of a server, and the model that it is asked for."""

    def __init__(self, url: str, path: str, model: str, token: str) -> None:
        """url: with the path, or what stands before it, as http://127.0.0.1:8000/v1."""
        self.url = url if url.rstrip("/").endswith(path) else f"{url.rstrip('/')}{path}"
        self._model = {"model": model} if model else {}
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(_SECONDS))

    async def post(self, body: dict[str, Any]) -> Any:
        """The JSON of a reply.

        Raises:
            Unavailable: no answer, or an error of the server.
            ResourceExhausted: the server is busy.
            FailedPrecondition: it refuses the request.
        """
        try:
            async with self._session.post(self.url, json=body | self._model) as response:
                if response.status == 200:
                    return json.loads(await response.read())
                said = (await response.text(errors="replace"))[:200]
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise Unavailable(f"{self.url}: {error or type(error).__name__}") from error
        message = f"{self.url}: status {response.status}: {said}"
        if response.status in _BUSY:
            raise ResourceExhausted(message, retry_after=1.0)
        raise Unavailable(message) if response.status >= 500 else FailedPrecondition(message)

    async def close(self) -> None:
        await self._session.close()


class URLEmbedder(Embedder):
    def __init__(self, endpoint: Endpoint, name: str, dim: int) -> None:
        self._endpoint = endpoint
        self.name, self.dim = name, dim

    @classmethod
    async def open(cls, url: str, model: str, token: str) -> "URLEmbedder":
        """Asks for one vector, whose width all others have. Raises as `Endpoint.post` does."""
        endpoint = Endpoint(url, "/embeddings", model, token)
        made = cls(endpoint, model or endpoint.url, 0)
        try:
            made.dim = (await made.embed(["width"])).shape[1]
        except BaseException:
            await endpoint.close()
            raise
        return made

    async def embed(self, texts: Sequence[str], *, question: bool = False) -> np.ndarray:
        parts = [await self._batch(texts[at : at + _BATCH]) for at in range(0, len(texts), _BATCH)]
        made = np.concatenate(parts) if parts else np.zeros((0, self.dim), np.float32)
        if self.dim and made.shape[1] != self.dim:
            raise FailedPrecondition(f"{self._endpoint.url} gives {made.shape[1]} numbers a text, not {self.dim}")
        return made

    async def close(self) -> None:
        await self._endpoint.close()

    async def _batch(self, texts: Sequence[str]) -> np.ndarray:
        body = {"input": [text[:_CHARACTERS] for text in texts], "encoding_format": "float"}
        said = await self._endpoint.post(body)
        try:
            rows = [row["embedding"] for row in sorted(said["data"], key=lambda row: row["index"])]
            made = await asyncio.to_thread(np.array, rows, np.float32)
            if made.ndim != 2 or len(made) != len(texts) or not np.isfinite(made).all():
                raise ValueError("not one vector for each text")
        except (KeyError, TypeError, ValueError) as error:
            raise FailedPrecondition(f"{self._endpoint.url} gives no embeddings: {error}") from error
        return made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)


class URLReranker(Reranker):
    def __init__(self, url: str, model: str, token: str) -> None:
        self._endpoint = Endpoint(url, "/rerank", model, token)
        self.name = model or self._endpoint.url

    async def score(self, question: str, passages: Sequence[str]) -> list[float]:
        texts = [text[:_CHARACTERS] for text in passages]
        said = await self._endpoint.post({"query": question[:_CHARACTERS], "documents": texts})
        try:
            scores = {int(row["index"]): float(row["relevance_score"]) for row in said["results"]}
            return [scores[i] for i in range(len(passages))]
        except (KeyError, TypeError, ValueError) as error:
            raise FailedPrecondition(f"{self._endpoint.url} gives no score for each passage: {error}") from error

    async def close(self) -> None:
        await self._endpoint.close()
