"""Embedders and rerankers behind URLs: OpenAI's /v1/embeddings, and /v1/rerank as in vLLM, Jina and Cohere."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import numpy as np

from fusionkv.gateway.embed.base import CHARACTERS, Embedder, Reranker
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import FailedPrecondition, ResourceExhausted, Unavailable

_SECONDS = 60.0
_BATCH = 64
# Pauses before a batch is sent again to a server that is busy.
_PAUSES_SECONDS = (1.0, 2.0, 4.0)
# What servers answer to more texts or tokens in a call than they take.
_TOO_LARGE = (400, 413, 422)
T = TypeVar("T")


class _Refused(FailedPrecondition):
    """The server refused a call that may have been too large."""


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
        self._size = _BATCH  # texts a call, halved where the server refuses more
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
        message = f"{self.url}: status {response.status}: {text}"
        raise _Refused(message) if response.status in _TOO_LARGE else errors.from_http(response.status, message)

    async def _in_batches(self, texts: Sequence[str], call: Callable[[Sequence[str]], Awaitable[T]]) -> list[T]:
        """What `call` returns for each batch of the texts. Raises as `_post`."""
        results, at, size, pauses = list[T](), 0, self._size, iter(_PAUSES_SECONDS)
        while at < len(texts):
            batch = [text[:CHARACTERS] for text in texts[at : at + self._size]]
            try:
                results.append(await call(batch))
            except _Refused:
                if len(batch) == 1:  # the text is the reason, and not the number of texts
                    self._size = size
                    raise
                self._size = min(self._size, len(batch) // 2)
            except ResourceExhausted:
                # If the call fails, the results before are computed again when the caller retries.
                if not results or (pause := next(pauses, None)) is None:
                    raise
                await asyncio.sleep(pause)
            else:
                at, pauses = at + len(batch), iter(_PAUSES_SECONDS)
        return results

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

    async def embed(self, texts: Sequence[str], *, question: bool = False, tenant: str = "") -> np.ndarray:
        parts = await self._in_batches(texts, self._batch)
        vectors = np.concatenate(parts) if parts else np.zeros((0, self.dim), np.float32)
        if self.dim and vectors.shape[1] != self.dim:
            raise FailedPrecondition(
                f"{self.url} returned vectors of {vectors.shape[1]} dimensions instead of {self.dim}"
            )
        return vectors

    async def _batch(self, texts: Sequence[str]) -> np.ndarray:
        reply = await self._post({"input": texts, "encoding_format": "float"})
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
        parts = await self._in_batches(passages, lambda texts: self._batch(question, texts))
        return [score for part in parts for score in part]

    async def _batch(self, question: str, passages: Sequence[str]) -> list[float]:
        reply = await self._post({"query": question[:CHARACTERS], "documents": passages})
        try:
            scores = {int(row["index"]): float(row["relevance_score"]) for row in reply["results"]}
            return [scores[i] for i in range(len(passages))]
        except (KeyError, TypeError, ValueError) as error:
            raise FailedPrecondition(f"{self.url} did not return one score per passage: {error}") from error
