"""The embedded retrieval engine: one LanceDB table a corpus, BM25 and exact vector search, in this process."""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import numpy as np
import pyarrow as pa
from lancedb import AsyncConnection, Session, connect_async
from lancedb.table import AsyncTable

from fusionkv.gateway.retrieval import disk_errors, rows
from fusionkv.gateway.retrieval.base import Candidate, Chunk, Item, ModelIdentity, Retrieval, check_model
from fusionkv.gateway.retrieval.table import CorpusGone, CorpusTable
from fusionkv.protos.runtime.errors import NotFound, ServiceError

log = logging.getLogger(__name__)
# No corpus name begins with it, so "." and ".." are no folders.
_PREFIX = "corpus-"
_DELETED = "deleted"
# Searches at once, which wait for cores and disk anyway; each has about three files open, and some hundred kilobytes.
_SEARCHES = 8


class EmbeddedRetrieval(Retrieval):
    """Owns a folder; a second process that opens it is refused."""

    def __init__(self, folder: Path, connection: AsyncConnection, lock: TextIO) -> None:
        self._folder = folder.absolute()
        self._connection = connection
        self._lock = lock
        self._tables: dict[str, CorpusTable] = {}
        self._changing = asyncio.Lock()
        self._searching = asyncio.Semaphore(_SEARCHES)

    @classmethod
    async def open(cls, folder: Path) -> "EmbeddedRetrieval":
        """Opens all corpora in `folder`, made when it does not exist.

        Raises:
            OSError: the folder can't be written, another gateway has it open, or a corpus in it is damaged.
        """
        lock = _lock(folder)
        corpora = await asyncio.to_thread(_clean, folder)
        made = cls(folder, await connect_async(str(corpora)), lock)
        for name in await made._table_names():
            corpus = name.removeprefix(_PREFIX)
            try:
                made._tables[corpus] = await made._open(corpus)
            except ServiceError as error:
                log.warning("corpus %r, of which nothing is stored yet, is made when something is: %s", corpus, error)
            except (RuntimeError, ValueError, KeyError) as error:
                await made.close()
                if (lacking := disk_errors.of(error)) is not None:
                    raise OSError(f"corpus {corpus!r} can't be read: {lacking}") from error
                where = corpora / f"{name}.lance"
                raise OSError(
                    f"corpus {corpus!r} can't be read: remove {where} and ingest it again, or start the version that "
                    f"wrote it: {error}"
                ) from error
        return made

    async def replace(
        self, corpus: str, document: str, chunks: Sequence[Chunk], vectors: np.ndarray, model: ModelIdentity
    ) -> bool:
        data = await asyncio.to_thread(rows.full, chunks, vectors)
        while True:
            table = self._tables.get(corpus) or await self._make(corpus, rows.schema(model, vectors.shape[1]))
            check_model(corpus, table.model, model)
            with contextlib.suppress(CorpusGone):
                return await table.replace(document, data)

    async def delete(self, corpus: str, document: str = "") -> tuple[int, int]:
        table = self._table(corpus)
        if document:
            with contextlib.suppress(CorpusGone):
                return 1, await table.delete(document)
            raise NotFound(f"no corpus {corpus!r}")
        async with self._changing:
            if self._tables.pop(corpus, None) is not table:
                raise NotFound(f"no corpus {corpus!r}")
            item = table.item(corpus)
            await table.close()
            try:
                with disk_errors.named():
                    await asyncio.to_thread(self._discard, corpus)
            except Exception:
                self._tables[corpus] = await self._open(corpus)
                raise
        return item.documents, item.chunks

    async def corpora(self) -> list[Item]:
        return [self._tables[name].item(name) for name in sorted(self._tables)]

    async def check(self, corpus: str) -> None:
        self._table(corpus)

    async def documents(self, corpus: str, after: str = "", limit: int = 0) -> list[Item]:
        return self._table(corpus).documents(after, limit)

    async def candidates(
        self, corpus: str, question: str, vector: np.ndarray, depth: int, model: ModelIdentity
    ) -> list[Candidate]:
        table = self._table(corpus, model)
        async with self._searching:
            words, meaning = table.by_words(question, depth), table.by_meaning(vector, depth)
            by_words, by_meaning = await asyncio.gather(words, meaning)
        return await asyncio.to_thread(rows.candidates, by_words, by_meaning, vector)

    async def chunks(self, corpus: str, document: str, model: ModelIdentity) -> list[tuple[Chunk, np.ndarray]]:
        found = await self._table(corpus, model).of_document(document)
        return sorted(zip(rows.chunks(found), rows.vectors(found), strict=True), key=lambda pair: pair[0].position)

    async def nearest(self, corpus: str, vector: np.ndarray, count: int, model: ModelIdentity) -> list[Chunk]:
        # Twice as many, so that ties at the end are cut by name and not by where the rows happen to lie.
        found = await self._table(corpus, model).by_meaning(vector, 2 * count)
        scored = zip(rows.chunks(found), rows.vectors(found) @ vector, strict=True)
        return [chunk for chunk, _ in sorted(scored, key=lambda pair: (-pair[1], pair[0].key))[:count]]

    async def set_variants(self, corpus: str, chunks: Sequence[Chunk]) -> None:
        try:
            await self._table(corpus).set_variants(rows.variants(chunks))
        except CorpusGone as error:
            raise NotFound(f"no corpus {corpus!r}") from error

    async def close(self) -> None:
        for table in self._tables.values():
            await table.close()
        self._connection.close()
        self._lock.close()

    def _table(self, corpus: str, model: ModelIdentity | None = None) -> CorpusTable:
        table = self._tables.get(corpus)
        if table is None:
            raise NotFound(f"no corpus {corpus!r}: ingest a document to make it")
        if model is not None:
            check_model(corpus, table.model, model)
        return table

    async def _make(self, corpus: str, schema: pa.Schema) -> CorpusTable:
        async with self._changing:
            if corpus not in self._tables:
                with disk_errors.named():
                    # One that is there already is what a failure or a caller that went away left of an attempt.
                    await self._connection.create_table(_PREFIX + corpus, schema=schema, exist_ok=True)
                    self._tables[corpus] = await self._open(corpus)
            return self._tables[corpus]

    async def _open(self, corpus: str) -> CorpusTable:
        async def reopen() -> AsyncTable:
            connection = await connect_async(self._connection.uri, session=Session())
            return await connection.open_table(_PREFIX + corpus)

        return await CorpusTable.open(reopen)

    def _discard(self, corpus: str) -> None:
        """Moved away first, so that a crash leaves all of a corpus or nothing."""
        away = self._folder / _DELETED
        away.mkdir(exist_ok=True)
        os.rename(self._folder / "corpora" / f"{_PREFIX}{corpus}.lance", away / uuid.uuid4().hex)
        shutil.rmtree(away, ignore_errors=True)  # what stays goes with the next one, or at the next start

    async def _table_names(self) -> list[str]:
        names: list[str] = []
        page = None
        while True:
            listed = await self._connection.list_tables(page_token=page, limit=1000)
            names.extend(n for n in listed.tables if n.startswith(_PREFIX))
            page = listed.page_token
            if not page:
                return names


def _lock(folder: Path) -> TextIO:
    """A lock on the folder, held until it is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise OSError(
            f"{folder} is open in another gateway: stop that one, or give this one its own data_dir"
        ) from error
    return file


def _clean(folder: Path) -> Path:
    """Removes what an interrupted change left; returns where the corpora are."""
    shutil.rmtree(folder / _DELETED, ignore_errors=True)
    # Absolute: LanceDB takes some relative paths for names in its cloud.
    corpora = folder.absolute() / "corpora"
    for table in corpora.glob(f"{_PREFIX}*.lance"):
        # Its first commit, which has no rows, was never finished.
        if not any(table.glob("_versions/*")) and not any(table.glob("data/*")):
            shutil.rmtree(table)
    return corpora
