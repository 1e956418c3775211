"""The embedded retrieval engine: one LanceDB table per corpus, BM25 and exact vector search, in this process."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from lancedb import AsyncConnection, Session, connect_async
from lancedb.table import AsyncTable

from fusionkv.gateway.client.results import Item
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
)
from fusionkv.gateway.retrieval.folder import CorpusFolder, table_name
from fusionkv.gateway.retrieval.indexed_table import CorpusGone, create_indexes, disk_error, disk_errors
from fusionkv.gateway.retrieval.table import (
    CorpusTable,
    chunks_of,
    condition_of,
    rows_of,
    schema_of,
    variants_of,
    vectors_of,
)
from fusionkv.gateway.tokens import ModelIdentity
from fusionkv.protos.runtime import cancellation
from fusionkv.protos.runtime.errors import FailedPrecondition, NotFound, ServiceError

log = logging.getLogger(__name__)
T = TypeVar("T")
# Documents of a rebuilt corpus per commit.
_BATCH = 64
_STAGED = "staged.lance"
# Candidates by BM25 for the nearest chunks without vectors: scores change with each commit, but among so many the
# nearest by shared words stay the same.
_WORD_CANDIDATES = 1000
# Concurrent searches: more would only wait for cores and disk; each needs about three files and a few hundred KB.
_SEARCHES = 8


class EmbeddedRetrieval(Retrieval):
    """Owns a folder, which only one process can open."""

    def __init__(self, folder: CorpusFolder, connection: AsyncConnection, language: str) -> None:
        self._language = language
        self._folder = folder
        self._connection = connection
        self._tables: dict[str, CorpusTable] = {}
        self._changing = asyncio.Lock()
        self._searching = asyncio.Semaphore(_SEARCHES)
        self._searches: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(cls, folder: Path, language: str = "english") -> "EmbeddedRetrieval":
        """Opens all corpora in `folder`, which is created if necessary; `language` is that of new corpora.

        Raises OSError if the folder can't be written, another gateway has it open, or a corpus in it is damaged.
        """
        async with contextlib.AsyncExitStack() as opened:  # closed on any error: the folder would stay locked
            owned = CorpusFolder(folder)
            opened.callback(owned.close)
            await asyncio.to_thread(owned.clean)
            retrieval = cls(owned, await connect_async(str(owned.corpora)), language)
            opened.push_async_callback(retrieval.close)
            for corpus, table in owned.tables():
                try:
                    retrieval._tables[corpus] = await retrieval._open(corpus)
                except ServiceError as error:
                    log.warning("the empty corpus %r will be created when a document is stored: %s", corpus, error)
                except (RuntimeError, ValueError, KeyError) as error:
                    if (cause := disk_error(error)) is not None:
                        raise OSError(f"corpus {corpus!r} can't be read: {cause}") from error
                    raise OSError(
                        f"corpus {corpus!r} can't be read: remove {table} and ingest it again, or use the version of "
                        f"FusionKV that wrote it: {error}"
                    ) from error
            opened.pop_all()
        return retrieval

    async def replace(
        self, corpus: str, document: str, chunks: Sequence[TextChunk], vectors: np.ndarray, model: ModelIdentity
    ) -> bool:
        data = await asyncio.to_thread(rows_of, chunks, vectors)
        while True:
            if (table := self._tables.get(corpus)) is None:
                creating = self._create(corpus, schema_of(model, vectors.shape[1]))
                table = await cancellation.to_the_end(creating)
            check_model(corpus, table.model, model)
            _check_width(corpus, table, vectors.shape[1])
            with contextlib.suppress(CorpusGone):
                return await table.replace(document, data)

    async def delete(self, corpus: str, document: str = "") -> tuple[int, int]:
        if document:
            return 1, await self._with(corpus, lambda table: table.delete(document))
        return await cancellation.to_the_end(self._drop(corpus))

    async def corpora(self) -> list[Item]:
        return [self._tables[name].item(name) for name in sorted(self._tables)]

    async def check(self, corpus: str) -> ModelIdentity:
        return self._table(corpus).model

    async def documents(self, corpus: str, after: str = "", limit: int = 0) -> list[Item]:
        return self._table(corpus).documents.items(after, limit)

    async def candidates(
        self, query: Query, vector: np.ndarray | None, depth: int, model: ModelIdentity
    ) -> list[Candidate]:
        condition = condition_of(query)

        async def search(table: CorpusTable) -> tuple[pa.Table, pa.Table | None]:
            if vector is None:
                return await table.by_words(query.question, depth, condition), None
            _check_width(query.corpus, table, len(vector))
            return await table.by_both(query.question, vector, depth, condition)

        async def alone() -> tuple[pa.Table, pa.Table | None]:
            try:
                return await self._with(query.corpus, search, model)
            finally:
                self._searching.release()

        await self._searching.acquire()
        by_words, by_meaning = await cancellation.detached(self._searches, alone(), Exception)
        return await asyncio.to_thread(_merged, by_words, by_meaning, vector)

    async def chunks(self, corpus: str, document: str, model: ModelIdentity) -> list[tuple[TextChunk, np.ndarray]]:
        chunk_rows = await self._with(corpus, lambda table: table.of_document(document), model)
        return await asyncio.to_thread(_in_order, chunk_rows)

    async def nearest(
        self, corpus: str, text: str, vector: np.ndarray | None, count: int, model: ModelIdentity
    ) -> list[TextChunk]:
        if vector is None:
            chunk_rows = await self._with(corpus, lambda table: table.by_words(text, _WORD_CANDIDATES), model)
            return await asyncio.to_thread(lambda: by_shared_words(text, chunks_of(chunk_rows))[:count])
        # Twice as many, so that ties at the cut are broken by name and not by the order of rows.
        limit = 2 * count
        chunk_rows = await self._with(corpus, lambda table: table.by_meaning(vector, limit), model)
        scored = await asyncio.to_thread(
            lambda: zip(chunks_of(chunk_rows), vectors_of(chunk_rows) @ vector, strict=True)
        )
        return [chunk for chunk, _ in best(scored, count)]

    async def set_variants(self, corpus: str, chunks: Sequence[TextChunk]) -> None:
        await self._with(corpus, lambda table: table.set_variants(variants_of(chunks)))

    async def move(self, corpus: str, rewrite: Rewrite, model: ModelIdentity) -> AsyncGenerator[int]:
        table = self._table(corpus)
        staging = self._folder.staging()
        try:
            async with table.frozen():
                async with contextlib.aclosing(self._rewritten(table, rewrite, model, staging)) as done:
                    async for chunks in done:
                        self._check_kept(corpus, table)
                        yield chunks
                # Even if the caller leaves: the old table can't be used any more once the new one is in its place.
                await cancellation.to_the_end(self._exchange(corpus, table, staging / _STAGED))
        except CorpusGone as error:
            self._table(corpus)
            raise FailedPrecondition(f"corpus {corpus!r} was moved or replaced meanwhile") from error
        finally:
            await asyncio.to_thread(self._folder.unstage, staging)
        await table.close()

    async def _drop(self, corpus: str) -> tuple[int, int]:
        async with self._changing:
            table = self._table(corpus)  # only now: a move may have replaced it meanwhile
            del self._tables[corpus]
            item = table.item(corpus)
            await table.close()
            try:
                with disk_errors():
                    await asyncio.to_thread(self._folder.discard, corpus)
            except Exception:
                self._tables[corpus] = await self._open(corpus)
                raise
        return item.documents, item.chunks

    async def _exchange(self, corpus: str, table: CorpusTable, staged: Path) -> None:
        """Puts a rebuilt table in the place of a corpus's table, which is frozen, and opens it."""
        self._check_kept(corpus, table)
        # No await until the new table has replaced the old one: nothing else of this process may run.
        with disk_errors():
            self._folder.place(staged, corpus)
        table.retire()
        try:
            opened = await self._open(corpus)
        except Exception:
            if self._tables.get(corpus) is table:
                del self._tables[corpus]  # opened by the next change of the corpus
            raise
        if self._tables.get(corpus) is table:
            self._tables[corpus] = opened
        else:
            await opened.close()

    def _check_kept(self, corpus: str, table: CorpusTable) -> None:
        """Raises NotFound if a corpus was deleted, whose deletion waits for the end of its move."""
        if self._tables.get(corpus) is not table:
            raise NotFound(f"corpus {corpus!r} was deleted while it was moved")

    async def _rewritten(
        self, table: CorpusTable, rewrite: Rewrite, model: ModelIdentity, staging: Path
    ) -> AsyncGenerator[int]:
        """Writes the rebuilt documents of a corpus to a table in `staging`; yields the number of chunks of each."""
        schema: pa.Schema | None = None
        pending: list[pa.Table] = []

        async def write(last: bool = False) -> None:
            with disk_errors():
                connection = await connect_async(str(staging))
                try:
                    rebuilt = await connection.create_table(Path(_STAGED).stem, schema=schema, exist_ok=True)
                    if pending:
                        await rebuilt.add(pa.concat_tables(pending))
                    if last:
                        # Before the exchange, while the old table still answers, and stays if this fails.
                        await create_indexes(rebuilt, self._language)
                finally:
                    connection.close()
            pending.clear()

        for item in table.documents.items():
            stored = await asyncio.to_thread(_in_order, await table.of_document(item.name))
            chunks, vectors = await rewrite([c for c, _ in stored], np.stack([v for _, v in stored]))
            schema = schema or schema_of(model, vectors.shape[1])
            pending.append(await asyncio.to_thread(rows_of, chunks, vectors))
            if len(pending) == _BATCH:
                await write()
            yield len(chunks)
        if schema is None:  # the corpus is empty
            _, vectors = await rewrite([], np.zeros((0, table.dim), np.float32))
            schema = schema_of(model, vectors.shape[1])
        await write(last=True)

    async def close(self) -> None:
        while self._tables:  # emptied, so that a call that is still running ends as NOT_FOUND
            _, table = self._tables.popitem()
            await table.close()
        self._connection.close()
        self._folder.close()

    async def _with(
        self, corpus: str, work: Callable[[CorpusTable], Awaitable[T]], model: ModelIdentity | None = None
    ) -> T:
        """Runs `work` on a corpus's table; runs it again if the corpus was rebuilt meanwhile."""
        while True:
            table = self._table(corpus, model)
            try:
                return await work(table)
            except CorpusGone as error:
                await table.thawed()  # until the table that replaces it is open
                if corpus not in self._tables:
                    raise no_corpus(corpus) from error

    def _table(self, corpus: str, model: ModelIdentity | None = None) -> CorpusTable:
        table = self._tables.get(corpus)
        if table is None:
            raise no_corpus(corpus)
        if model is not None:
            check_model(corpus, table.model, model)
        return table

    async def _create(self, corpus: str, schema: pa.Schema) -> CorpusTable:
        async with self._changing:
            if corpus not in self._tables:
                with disk_errors():
                    # The table exists if an earlier attempt failed.
                    await self._connection.create_table(table_name(corpus), schema=schema, exist_ok=True)
                    self._tables[corpus] = await self._open(corpus)
            return self._tables[corpus]

    async def _open(self, corpus: str) -> CorpusTable:
        async def reopen() -> AsyncTable:
            connection = await connect_async(self._connection.uri, session=Session())
            return await connection.open_table(table_name(corpus))

        return await CorpusTable.open(reopen, self._language)


def _check_width(corpus: str, table: CorpusTable, dim: int) -> None:
    if dim != table.dim:
        raise FailedPrecondition(
            f"vectors of corpus {corpus!r} have {table.dim} dimensions, but those of the embedder have {dim}: "
            f"run `fusionkv move {corpus}`"
        )


def _in_order(table: pa.Table) -> list[tuple[TextChunk, np.ndarray]]:
    return sorted(zip(chunks_of(table), vectors_of(table), strict=True), key=lambda pair: pair[0].position)


def _merged(by_words: pa.Table, by_meaning: pa.Table | None, vector: np.ndarray | None) -> list[Candidate]:
    """Merges the two lists; computes the cosine of chunks found only by BM25 from their vectors."""
    merged: dict[tuple[str, int], Candidate] = {}
    for table in (by_words, *([by_meaning] if by_meaning is not None else [])):
        words = table["_score"].to_pylist() if table is by_words else [0.0] * len(table)
        cosines = vectors_of(table) @ vector if vector is not None else np.zeros(len(table))
        for chunk, score, cosine in zip(chunks_of(table), words, cosines, strict=True):
            merged.setdefault(chunk.key, Candidate(chunk, score, float(cosine)))
    return list(merged.values())
