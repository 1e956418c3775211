"""Retrieval in Milvus, by URL: one collection a corpus, BM25 and vectors, for any number of gateways.

Milvus changes rows, not documents. So the chunks of a document are written under a new revision, and the document's
own row, which names the revision that counts, after them; readers leave out what belongs to another one.
"""

import asyncio
import hashlib
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from fusionkv.gateway.retrieval import milvus_rows as rows
from fusionkv.gateway.retrieval.base import (
    NO_FILTER,
    Candidate,
    Chunk,
    Item,
    ModelIdentity,
    Retrieval,
    Rewrite,
    by_shared_words,
    check_model,
    packed,
)
from fusionkv.gateway.retrieval.gate import Gate
from fusionkv.gateway.retrieval.milvus_connection import BATCH, MOST_ROWS, Connection, Hits, NoCollection, listed
from fusionkv.gateway.retrieval.milvus_rows import Row, Version
from fusionkv.protos.runtime.errors import FailedPrecondition, NotFound, Unavailable

T = TypeVar("T")
# A document that changed less long ago is looked at twice; clocks of gateways may differ by as much.
_RECENT_SECONDS = 5
_TRIES = 50
_NO_VECTOR = np.zeros(0, np.float32)


class MilvusRetrieval(Retrieval):
    """`scope` keeps the corpora of one tenant apart from those of others."""

    def __init__(self, connection: Connection, scope: str) -> None:
        self._milvus = connection
        self._prefix = f"fusionkv_{_digest(scope)}_"
        self._tasks: set[asyncio.Task[Any]] = set()
        # Of corpora, and of documents; forgotten when nobody changes them.
        self._gates: weakref.WeakValueDictionary[str, Gate] = weakref.WeakValueDictionary()
        self._locks: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = weakref.WeakValueDictionary()

    @classmethod
    async def open(
        cls, url: str, scope: str = "", *, token: str = "", database: str = "", ca: str = ""
    ) -> "MilvusRetrieval":
        """Connects. token: `user:password` or an API key. ca: a file of CAs (PEM), for https with a private one.

        Raises:
            OSError: Milvus is out of reach, or refuses the token.
        """
        return cls(await Connection.open(url, token, database, ca), scope)

    async def replace(
        self, corpus: str, document: str, chunks: Sequence[Chunk], vectors: np.ndarray, model: ModelIdentity
    ) -> bool:
        return await self._change(corpus, document, lambda: self._replace(corpus, document, chunks, vectors, model))

    async def delete(self, corpus: str, document: str = "") -> tuple[int, int]:
        with _naming(corpus):
            return await self._change(corpus, document, lambda: self._delete(corpus, document))

    async def corpora(self) -> list[Item]:
        names = await self._milvus.collections(self._prefix)
        found = await asyncio.gather(*map(self._corpus, names))
        return sorted((item for item in found if item is not None), key=lambda item: item.name)

    async def check(self, corpus: str) -> None:
        await self._own(corpus)

    async def documents(self, corpus: str, after: str = "", limit: int = 0) -> list[Item]:
        with _naming(corpus):
            found = sorted(await self._documents(self._collection(corpus)), key=lambda item: item.name)
        return [item for item in found if item.name > after][: limit or None]

    async def candidates(
        self,
        corpus: str,
        question: str,
        vector: np.ndarray | None,
        depth: int,
        model: ModelIdentity,
        where: Mapping[str, str] = NO_FILTER,
    ) -> list[Candidate]:
        wanted: dict[str, Any] = {"words": rows.searched_for(question)}
        if vector is not None:
            wanted["vector"] = vector.astype(np.float32)
        with _naming(corpus):
            by_words, *rest = await self._search(corpus, model, wanted, depth, where)
        by_meaning = rest[0] if rest else []
        found: dict[tuple[str, int], Candidate] = {}
        # Milvus Lite gives BM25 with its sign turned.
        for row, score in (*((row, abs(score)) for row, score in by_words), *((row, 0.0) for row, _ in by_meaning)):
            chunk = rows.chunk(row)
            cosine = float(rows.vector(row) @ vector) if vector is not None else 0.0
            found.setdefault(chunk.key, Candidate(chunk, score, cosine))
        return list(found.values())

    async def chunks(self, corpus: str, document: str, model: ModelIdentity) -> list[tuple[Chunk, np.ndarray]]:
        name = await self._known(corpus, model)
        for _ in range(_TRIES):
            version = await self._version(name, document)
            found = await self._of_version(name, document, version) if version is not None else []
            if version is None or len(found) == version.chunks:
                pairs = ((rows.chunk(r), rows.vector(r) if model.embedder else _NO_VECTOR) for r in found)
                return sorted(pairs, key=lambda pair: pair[0].position)
        raise Unavailable(f"document {document!r} changes all the time: try again later")

    async def nearest(
        self, corpus: str, text: str, vector: np.ndarray | None, count: int, model: ModelIdentity
    ) -> list[Chunk]:
        if vector is None:
            by_words = await self.candidates(corpus, text, None, 2 * count, model)
            return by_shared_words(text, [candidate.chunk for candidate in by_words])[:count]
        # Twice as many, so that ties at the end are cut by name and not by where the rows happen to lie.
        with _naming(corpus):
            (found,) = await self._search(corpus, model, {"vector": vector.astype(np.float32)}, 2 * count)
        scored = [(rows.chunk(row), float(rows.vector(row) @ vector)) for row, _ in found]
        return [chunk for chunk, _ in sorted(scored, key=lambda pair: (-pair[1], pair[0].key))[:count]]

    async def set_variants(self, corpus: str, chunks: Sequence[Chunk]) -> None:
        name = self._collection(corpus)
        with _naming(corpus):
            versions = await self._versions(name, {rows.owner(chunk.document) for chunk in chunks})
        known = [chunk for chunk in chunks if chunk.document in versions]
        by_key = {rows.chunk_key(chunk, versions[chunk.document].revision): chunk for chunk in known}
        keys = [*by_key]
        for at in range(0, len(keys), BATCH):
            changed = []
            for row in await self._milvus.query(name, f"key in {listed(keys[at : at + BATCH])}"):
                chunk = by_key[row["key"]]
                if row["digest"] == chunk.digest.hex():
                    changed.append(
                        row | {"variant": chunk.variant.hex(), "neighbours": packed(chunk.neighbours).hex()}
                    )
            await self._milvus.write(name, changed)

    async def move(self, corpus: str, rewrite: Rewrite, model: ModelIdentity) -> AsyncGenerator[int]:
        await self.check(corpus)
        raise FailedPrecondition(
            f"corpus {corpus!r} is in Milvus, where none can be moved to another model: delete it and ingest it again"
        )
        yield 0  # it is a generator

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._milvus.close()

    async def _replace(
        self, corpus: str, document: str, chunks: Sequence[Chunk], vectors: np.ndarray, model: ModelIdentity
    ) -> bool:
        name, dim, revision = self._collection(corpus), vectors.shape[1] or rows.FILLER, rows.new_revision()
        made = [rows.of_chunk(c, revision, v) for c, v in zip(chunks, vectors.astype(np.float32), strict=True)]
        for _ in range(_TRIES):
            try:
                await self._make(corpus, model, dim)
                before = await self._version(name, document)
                await self._milvus.write(name, made)
                await self._milvus.write(name, [rows.of_document(document, revision, chunks, dim)])
                now = await self._version(name, document)
                dead = {version.revision for version in (before,) if version is not None}
                if now is not None and now.revision != revision:
                    dead.add(revision)  # another gateway replaced the document a moment later
                elif await self._milvus.count(name, _of(document, revision)) != len(made):
                    continue  # the corpus was deleted meanwhile, and made again
                await self._clean(name, document, dead)
                return before is not None
            except NotFound:
                continue  # the corpus was deleted meanwhile
        raise Unavailable(f"corpus {corpus!r} is deleted all the time: try again later")

    async def _clean(self, name: str, document: str, dead: Iterable[str]) -> None:
        """Deletes revisions that nobody reads any more, and what gateways that ended in the middle left."""
        gone = f'revision in {listed(dead)} or revision < "{rows.hour_old()}"'
        await self._milvus.delete(name, f"{_of(document)} and ({gone})")

    async def _delete(self, corpus: str, document: str) -> tuple[int, int]:
        name = self._collection(corpus)
        if not document:
            found = await self._documents(name)
            await self._milvus.drop(name)
            return len(found), sum(item.chunks for item in found)
        version = await self._version(name, document)
        if version is None:
            raise NotFound(f"no document {document!r}")
        await self._milvus.delete(name, f'key == "{rows.owner(document)}"')
        await self._clean(name, document, {version.revision})
        return 1, version.chunks

    async def _make(self, corpus: str, model: ModelIdentity, dim: int) -> None:
        try:
            await self._known(corpus, model)
        except NotFound:
            name = self._collection(corpus)
            await self._milvus.make(name, dim)
            await self._milvus.write(name, [rows.of_corpus(corpus, model, dim)])

    async def _known(self, corpus: str, model: ModelIdentity) -> str:
        """The collection of a corpus that was made with this model."""
        check_model(corpus, rows.identity(await self._own(corpus)), model)
        return self._collection(corpus)

    async def _own(self, corpus: str) -> Row:
        """The corpus's own row."""
        with _naming(corpus):
            found = await self._milvus.query(self._collection(corpus), rows.IS_CORPUS, rows.OWN)
            if not found:
                raise NoCollection("it is not there whole")
        return found[0]

    async def _search(
        self,
        corpus: str,
        model: ModelIdentity,
        wanted: dict[str, Any],
        depth: int,
        where: Mapping[str, str] = NO_FILTER,
    ) -> list[Hits]:
        """For every field, its `depth` best chunks of documents as they are now.

        A document that changed of late may have done so between the search and the look at its row, so that chunks of
        it were not found yet: then the search is made again, until its row is the same before and after.
        """
        name = await self._known(corpus, model)
        known: dict[str, Version] = {}
        dead: set[str] = set()
        owners: set[str] = set()
        limit = min(MOST_ROWS, depth + 16)
        for _ in range(_TRIES):
            began = time.time()
            hits_of = (self._hits(name, field, x, limit, dead, where) for field, x in wanted.items())
            found = await asyncio.gather(*hits_of)
            owners |= {row["owner"] for hits in found for row, _ in hits}
            now = await self._versions(name, owners)
            settled = all(v.since < began - _RECENT_SECONDS or known.get(d) == v for d, v in now.items())
            kept = [[hit for hit in hits if _counts(hit[0], now)] for hits in found]
            # What does not count may take the place of what does, until it is left out of the search.
            short = any(len(k) < depth and len(hits) == limit for k, hits in zip(kept, found, strict=True))
            current = {version.revision for version in now.values()}
            if settled and not short and not dead & current:
                return [hits[:depth] for hits in kept]
            known = now
            dead = (dead | {row["revision"] for hits in found for row, _ in hits}) - current
        raise Unavailable(f"documents of corpus {corpus!r} change all the time: try again later")

    async def _hits(
        self, name: str, field: str, data: Any, limit: int, dead: Iterable[str], where: Mapping[str, str]
    ) -> Hits:
        condition = f"{rows.IS_CHUNK} and revision not in {listed(dead)}" if dead else rows.IS_CHUNK
        return await self._milvus.search(name, field, data, limit, condition + rows.has_all(where))

    async def _version(self, name: str, document: str) -> Version | None:
        return (await self._versions(name, [rows.owner(document)])).get(document)

    async def _versions(self, name: str, owners: Iterable[str]) -> dict[str, Version]:
        """What the documents with these keys are now; those that there are."""
        fields = ["document", "revision", "since", "chunks"]
        found = await self._milvus.query(name, f"key in {listed(owners)}", fields)
        return {row["document"]: rows.version(row) for row in found}

    async def _of_version(self, name: str, document: str, version: Version) -> list[Row]:
        found = []
        for start in range(0, version.chunks, BATCH):
            part = f"position >= {start} and position < {start + BATCH}"
            found += await self._milvus.query(name, f"{_of(document, version.revision)} and {part}")
        return found

    async def _documents(self, name: str) -> list[Item]:
        fields = ["document", "chunks", "tokens", "bytes"]
        return [rows.item(row) for row in await self._milvus.walk(name, rows.IS_DOCUMENT, fields)]

    async def _corpus(self, name: str) -> Item | None:
        """None: it is being made, or deleted."""
        try:
            own = await self._milvus.query(name, rows.IS_CORPUS, rows.OWN)
            found = await self._documents(name)
        except NotFound:
            return None
        chunks, tokens, size = (sum(getattr(item, what) for item in found) for what in ("chunks", "tokens", "bytes"))
        if not own:
            return None
        made_with = rows.identity(own[0])
        return Item(own[0]["document"], len(found), chunks, tokens, size, made_with.name, made_with.embedder)

    async def _change(self, corpus: str, document: str, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """One change of a document at a time, none beside that of a whole corpus. It runs to its end although its
        caller may be cancelled.
        """
        gate = self._gates.setdefault(corpus, Gate())
        lock = self._locks.setdefault((corpus, document), asyncio.Lock())

        async def locked() -> T:
            async with gate.together() if document else gate.alone(), lock:
                return await change()

        task = asyncio.create_task(locked())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _collection(self, corpus: str) -> str:
        return self._prefix + _digest(corpus)


@contextmanager
def _naming(corpus: str) -> Iterator[None]:
    try:
        yield
    except NoCollection as error:
        raise NotFound(f"no corpus {corpus!r}: ingest a document to make it") from error


def _counts(row: Row, versions: dict[str, Version]) -> bool:
    version = versions.get(row["document"])
    return version is not None and version.revision == row["revision"]


def _of(document: str, revision: str = "") -> str:
    """A condition: a document's chunks, of one revision or of any."""
    chunks = f'owner == "{rows.owner(document)}"'
    return f'{chunks} and revision == "{revision}"' if revision else chunks


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
