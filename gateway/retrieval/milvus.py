"""Retrieval in Milvus: one collection per corpus, BM25 and vectors, shared by any number of gateways.

Milvus changes rows, not documents. The chunks of a document are therefore written under a new revision, followed by
the document's own row, which names the current revision; readers ignore chunks of other revisions.
"""

import asyncio
import contextlib
import hashlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from fusionkv.gateway.client.results import Item
from fusionkv.gateway.retrieval import milvus_rows as rows
from fusionkv.gateway.retrieval.base import (
    Candidate,
    Query,
    Retrieval,
    Rewrite,
    TextChunk,
    best,
    by_shared_words,
    check_model,
    no_corpus,
    no_document,
)
from fusionkv.gateway.retrieval.milvus_calls import MilvusCalls, NoCollection
from fusionkv.gateway.retrieval.milvus_collection import TRIES, MilvusCollection
from fusionkv.gateway.retrieval.milvus_connection import BATCH, Hits, MilvusConnection, listed
from fusionkv.gateway.retrieval.milvus_rows import Row
from fusionkv.gateway.tokens import ModelIdentity
from fusionkv.protos.runtime.cancellation import detached
from fusionkv.protos.runtime.errors import FailedPrecondition, NotFound, ServiceError, Unavailable

T = TypeVar("T")
_NO_VECTOR = np.zeros(0, np.float32)


class Gate:
    """A lock for a corpus in one event loop: shared by changes of documents, exclusive for its deletion.

    A waiting exclusive user comes before later shared ones.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._inside)
                yield
        finally:
            self._waiting -= 1
            async with self._changed:
                self._changed.notify_all()


class MilvusRetrieval(Retrieval):
    """Corpora in Milvus; `scope` separates the corpora of tenants."""

    def __init__(self, connection: MilvusConnection, scope: str) -> None:
        self._milvus = connection
        self._prefix = f"fusionkv{rows.FORMAT}_{_digest(scope)}_"
        self._tasks: set[asyncio.Task[Any]] = set()
        # Milvus Lite fails if a collection is created twice at the same time ("File exists").
        self._creating = asyncio.Lock()
        # By corpus, and by document; entries disappear when no change uses them.
        self._gates: weakref.WeakValueDictionary[str, Gate] = weakref.WeakValueDictionary()
        self._locks: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = weakref.WeakValueDictionary()

    @classmethod
    async def open(
        cls, url: str, scope: str = "", *, token: str = "", database: str = "", ca: str = ""
    ) -> "MilvusRetrieval":
        """Connects to Milvus.

        Args:
            token: `user:password` or an API key.
            ca: file of CA certificates (PEM), for https with a private CA.

        Raises:
            OSError: Milvus can't be reached, or rejects the token.
        """
        return cls(MilvusConnection(await MilvusCalls.open(url, token, database, ca)), scope)

    async def replace(
        self, corpus: str, document: str, chunks: Sequence[TextChunk], vectors: np.ndarray, model: ModelIdentity
    ) -> bool:
        return await self._change(corpus, document, lambda: self._replace(corpus, document, chunks, vectors, model))

    async def delete(self, corpus: str, document: str = "") -> tuple[int, int]:
        with _corpus_errors(corpus):
            return await self._change(corpus, document, lambda: self._delete(corpus, document))

    async def corpora(self) -> list[Item]:
        names = await self._milvus.collections(self._prefix)
        items = await asyncio.gather(*(MilvusCollection(self._milvus, name).item() for name in names))
        return sorted((item for item in items if item is not None), key=lambda item: item.name)

    async def check(self, corpus: str) -> ModelIdentity:
        return rows.identity(await self._corpus_row(corpus))

    async def documents(self, corpus: str, after: str = "", limit: int = 0) -> list[Item]:
        with _corpus_errors(corpus):
            items = sorted(await self._collection(corpus).documents(), key=lambda item: item.name)
        return [item for item in items if item.name > after][: limit or None]

    async def candidates(
        self, query: Query, vector: np.ndarray | None, depth: int, model: ModelIdentity
    ) -> list[Candidate]:
        queries: dict[str, Any] = {"words": rows.without_function_words(query.question)}
        if vector is not None:
            queries["vector"] = vector.astype(np.float32)
        with _corpus_errors(query.corpus):
            collection = await self._checked(query.corpus, model)
            by_words, *rest = await collection.search(queries, depth, rows.condition(query))
        return await asyncio.to_thread(_merged, by_words, rest[0] if rest else [], vector)

    async def chunks(self, corpus: str, document: str, model: ModelIdentity) -> list[tuple[TextChunk, np.ndarray]]:
        collection = await self._checked(corpus, model)
        with _corpus_errors(corpus):
            for _ in range(TRIES):
                version = await collection.version(document)
                chunk_rows = await collection.chunk_rows(document, version) if version is not None else []
                if version is None or len(chunk_rows) == version.chunks:
                    return await asyncio.to_thread(_in_order, chunk_rows, bool(model.embedder))
        raise Unavailable(
            f"document {document!r} keeps changing, or is incomplete: try again later, or delete it and ingest it "
            "again"
        )

    async def nearest(
        self, corpus: str, text: str, vector: np.ndarray | None, count: int, model: ModelIdentity
    ) -> list[TextChunk]:
        if vector is None:
            by_words = await self.candidates(Query(corpus, text), None, 2 * count, model)
            chunks = [candidate.chunk for candidate in by_words]
            return (await asyncio.to_thread(by_shared_words, text, chunks))[:count]
        # Twice as many, so that ties at the cut are broken by name and not by the order of rows.
        with _corpus_errors(corpus):
            collection = await self._checked(corpus, model)
            (hits,) = await collection.search({"vector": vector.astype(np.float32)}, 2 * count)
        scored = await asyncio.to_thread(_merged, [], hits, vector)
        return [chunk for chunk, _ in best(((c.chunk, c.cosine) for c in scored), count)]

    async def set_variants(self, corpus: str, chunks: Sequence[TextChunk]) -> None:
        collection = self._collection(corpus)
        with _corpus_errors(corpus):
            versions = await collection.versions({rows.owner(chunk.document) for chunk in chunks})
            current = [chunk for chunk in chunks if chunk.document in versions]
            by_key = {rows.chunk_key(chunk, versions[chunk.document].revision): chunk for chunk in current}
            keys = [*by_key]
            for at in range(0, len(keys), BATCH):
                changed = []
                for row in await self._milvus.query(collection.name, f"key in {listed(keys[at : at + BATCH])}"):
                    chunk = by_key[row["key"]]
                    if row["digest"] == chunk.digest.hex():
                        changed.append(row | {"variant": chunk.variant.hex(), "neighbours": chunk.neighbours})
                await self._milvus.write(collection.name, changed)
            now = await collection.versions(map(rows.owner, versions))
            for document, version in versions.items():  # deleted or replaced meanwhile, before its rows were written
                if (later := now.get(document)) is None or later.revision != version.revision:
                    await collection.clean(document, {version.revision}, later.revision if later else "")

    async def move(self, corpus: str, rewrite: Rewrite, model: ModelIdentity) -> AsyncGenerator[int]:
        await self.check(corpus)
        raise FailedPrecondition(
            f"corpus {corpus!r} is in Milvus, which does not support moving a corpus: delete it and ingest it again"
        )
        yield 0  # makes the method a generator

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._milvus.close()

    async def _replace(
        self, corpus: str, document: str, chunks: Sequence[TextChunk], vectors: np.ndarray, model: ModelIdentity
    ) -> bool:
        collection, dim, revision = self._collection(corpus), vectors.shape[1] or rows.FILLER, rows.new_revision()
        new_rows = await asyncio.to_thread(
            lambda: [rows.of_chunk(c, revision, v) for c, v in zip(chunks, vectors.astype(np.float32), strict=True)]
        )
        for _ in range(TRIES):
            try:
                await self._create(corpus, model, dim)
                before = await collection.version(document)
                await self._milvus.write(collection.name, new_rows)
                await self._milvus.write(collection.name, [rows.of_document(document, revision, chunks, dim)])
                now = await collection.version(document)
                # An earlier try may have left this revision's own row, to which the chunks just written belong.
                old = before if before is not None and before.revision != revision else None
                dead = {old.revision} if old is not None else set()
                if now is not None and now.revision != revision:
                    dead.add(revision)  # another gateway has just replaced the document
                elif await collection.count(document, revision) != len(new_rows):
                    continue  # the corpus was deleted and created again meanwhile
                await collection.clean(document, dead, now.revision if now is not None else "")
                return old is not None
            except NotFound:
                continue  # the corpus was deleted meanwhile
        raise Unavailable(f"corpus {corpus!r} keeps being deleted: try again later")

    async def _delete(self, corpus: str, document: str) -> tuple[int, int]:
        collection = self._collection(corpus)
        if not document:
            items = await collection.documents()
            await self._milvus.drop(collection.name)
            return len(items), sum(item.chunks for item in items)
        version = await collection.version(document)
        if version is None:
            raise no_document(document)
        # The document's own row last: a deletion that is cut short can be repeated. A later version stays.
        await collection.clean(document, {version.revision})
        own = f'key == "{rows.owner(document)}" and revision == "{version.revision}"'
        await self._milvus.delete(collection.name, own)
        return 1, version.chunks

    async def _create(self, corpus: str, model: ModelIdentity, dim: int) -> None:
        try:
            await self._checked(corpus, model)
        except NotFound:
            name = self._collection(corpus).name
            async with self._creating:
                await self._milvus.create(name, dim)
            # Another gateway, maybe with another model, may create it at the same time.
            if not await self._milvus.query(name, rows.IS_CORPUS, rows.OWN):
                await self._milvus.write(name, [rows.of_corpus(corpus, model, dim)])
            await self._checked(corpus, model)

    async def _checked(self, corpus: str, model: ModelIdentity) -> MilvusCollection:
        """The collection of a corpus. Raises FailedPrecondition if it was built with another model."""
        check_model(corpus, await self.check(corpus), model)
        return self._collection(corpus)

    async def _corpus_row(self, corpus: str) -> Row:
        with _corpus_errors(corpus):
            return await self._collection(corpus).corpus_row()

    async def _change(self, corpus: str, document: str, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs one change of a document at a time, and none beside a change of the whole corpus.

        The change completes even if its caller is cancelled.
        """
        gate = self._gates.setdefault(corpus, Gate())
        lock = self._locks.setdefault((corpus, document), asyncio.Lock())

        async def locked() -> T:
            async with gate.shared() if document else gate.exclusive(), lock:
                return await change()

        return await detached(self._tasks, locked(), ServiceError)

    def _collection(self, corpus: str) -> MilvusCollection:
        return MilvusCollection(self._milvus, self._prefix + _digest(corpus))


@contextlib.contextmanager
def _corpus_errors(corpus: str) -> Iterator[None]:
    try:
        yield
    except NoCollection as error:
        raise no_corpus(corpus) from error


def _in_order(chunk_rows: Sequence[Row], with_vectors: bool) -> list[tuple[TextChunk, np.ndarray]]:
    pairs = ((rows.chunk(row), rows.vector(row) if with_vectors else _NO_VECTOR) for row in chunk_rows)
    return sorted(pairs, key=lambda pair: pair[0].position)


def _merged(by_words: Hits, by_meaning: Hits, vector: np.ndarray | None) -> list[Candidate]:
    candidates: dict[tuple[str, int], Candidate] = {}
    # Milvus Lite returns negated BM25 scores.
    for row, score in (*((row, abs(score)) for row, score in by_words), *((row, 0.0) for row, _ in by_meaning)):
        chunk = rows.chunk(row)
        cosine = float(rows.vector(row) @ vector) if vector is not None else 0.0
        candidates.setdefault(chunk.key, Candidate(chunk, score, cosine))
    return list(candidates.values())


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
