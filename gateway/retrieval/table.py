"""One corpus in LanceDB: its rows and indexes. Queued writes share a commit, and are indexed in the background."""

import asyncio
import bisect
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lancedb.index import FTS, BTree
from lancedb.query import MatchQuery
from lancedb.table import AsyncTable

from fusionkv.gateway.client.results import Item
from fusionkv.gateway.retrieval.base import TextChunk, no_document
from fusionkv.gateway.tokens import ModelIdentity
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.cancellation import background
from fusionkv.protos.runtime.errors import ServiceError, from_os

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
# LanceDB raises RuntimeErrors that contain the system's error number only in their text.
_NUMBER = re.compile(r"\(os error (\d+)\)")
T = TypeVar("T")
Size = tuple[int, int, int]  # chunks, tokens and bytes of text
_NOTHING: Size = (0, 0, 0)
# A commit costs about 20 ms whatever its size, so documents that arrive together share one.
_MAX_BATCH = 64
# Rows that are not indexed are scanned: 480 of them in as many fragments made a search take 31 ms instead of 8.
_COMMITS_BEFORE_OPTIMIZE = 100
_IDLE_SECONDS = 1.0
# Searches in flight read versions up to this old.
_KEEP_VERSIONS = timedelta(minutes=10)
# Stop words by language.
_STOP_WORDS = {"english": Path(__file__).with_name("stop_words_english.txt").read_text().split()}
# The columns of a Chunk.
_COLUMNS = ["document", "position", "text", "ids", "variant", "neighbours", "title", "source", "metadata"]
_VECTOR = "vector"
_FORMAT = "3"
_SCHEMA = pa.schema(
    {
        "document": pa.string(),
        "position": pa.uint32(),
        "text": pa.string(),
        "ids": pa.list_(pa.uint32()),
        "tokens": pa.uint32(),
        "digest": pa.binary(),
        "variant": pa.binary(),
        "neighbours": pa.uint32(),
        "title": pa.string(),
        "source": pa.string(),
        "metadata": pa.list_(pa.string()),
    }
)


async def create_indexes(table: AsyncTable, language: str) -> None:
    """Creates the indexes that a table lacks: of text, with ICU segmentation for all scripts; and of documents.

    Stop words are set for English only. LanceDB's own list is that of all languages together, and would drop "1", "C"
    and "El" from any text. Raises as `disk_errors`.
    """
    text = FTS(
        base_tokenizer="icu/split",
        language=language.capitalize(),
        stem=True,
        remove_stop_words=language in _STOP_WORDS,
        custom_stop_words=_STOP_WORDS.get(language),
        lower_case=True,
        ascii_folding=True,
        max_token_length=200,
    )
    indexed = {column for index in await table.list_indices() for column in index.columns}
    with disk_errors():
        if "text" not in indexed:
            await table.create_index("text", config=text)
        if "document" not in indexed:
            await table.create_index("document", config=BTree())


class CorpusGone(Exception):
    """The corpus was deleted or replaced while the call waited."""


@dataclass(eq=False)
class _Write:
    """Rows of a document to be stored; `existed` is set once they are."""

    document: str
    data: pa.Table
    existed: bool | None = None


class CorpusTable:
    """One table, for concurrent use within one event loop. `_lock` serialises all changes."""

    def __init__(self, table: AsyncTable, schema: pa.Schema, reopen: Callable[[], Awaitable[AsyncTable]]) -> None:
        self.model = _identity(schema)
        self.dim: int = schema.field(_VECTOR).type.list_size if _VECTOR in schema.names else 0
        self._columns = [*_COLUMNS, *[_VECTOR] * bool(self.dim)]
        self._table = table
        self._reopen = reopen
        self._lock = asyncio.Lock()
        self._gone = False
        self._queue: list[_Write] = []
        self._writing = asyncio.Lock()  # inside _lock; held by a commit of documents
        self._replaced: list[set[str]] = []  # for each search in flight, the documents replaced since it began
        self._sizes: dict[str, Size] = {}
        self._sources: dict[str, str] = {}  # where documents came from, if that is known
        self._names: list[str] = []  # the documents, sorted
        self._total: Size = (0, 0, 0)
        self._commits = 0
        self._changed = asyncio.Event()
        self._changes: set[asyncio.Task[Any]] = set()
        self._optimizing = asyncio.create_task(self._optimize_when_idle())

    @classmethod
    async def open(cls, reopen: Callable[[], Awaitable[AsyncTable]], language: str) -> "CorpusTable":
        """Opens a table, and creates missing indexes; an existing text index keeps its language.

        `reopen` opens the table with new caches. Raises ServiceError if missing indexes can't be created; such a
        table has no rows yet.
        """
        table = await reopen()
        schema = await table.schema()
        _check_format(schema)
        await create_indexes(table, language)
        columns = {"document": "document", "source": "source", "tokens": "tokens", "bytes": "octet_length(text)"}
        sizes = await table.query().select(columns).to_arrow()
        # After the last await: it starts a task, which a caller that leaves before could not end.
        opened = cls(table, schema, reopen)
        sums = sizes.group_by("document").aggregate(
            [("source", "min"), ("tokens", "count"), ("tokens", "sum"), ("bytes", "sum")]
        )
        # Sorted, so that each name is appended to `_names`: 300,000 names in any order take 3 s to insert.
        for name, source, *size in sorted(zip(*(c.to_pylist() for c in sums.columns), strict=True)):
            opened._resize(name, tuple(size), source)
        if len(sizes):
            opened._touch()
        return opened

    def item(self, name: str) -> Item:
        return Item(name, len(self._names), *self._total, self.model.name, self.model.embedder)

    def documents(self, after: str, limit: int) -> list[Item]:
        start = bisect.bisect_right(self._names, after)
        names = self._names[start : start + limit] if limit else self._names[start:]
        return [Item(name, 1, *self._sizes[name], source=self._sources.get(name, "")) for name in names]

    async def replace(self, document: str, data: pa.Table) -> bool:
        """Stores the rows of a document, replacing earlier ones; returns whether it existed before."""
        write = _Write(document, data)
        self._queue.append(write)
        for replaced in self._replaced:
            replaced.add(document)

        async def change() -> bool:
            try:
                if write.existed is None:  # otherwise it shared an earlier commit
                    await self._commit_queue()
            except BaseException:
                self._queue.remove(write)
                raise
            return bool(write.existed)

        return await self._change(change)

    async def delete(self, document: str) -> int:
        """Deletes a document; returns its number of chunks."""

        async def change() -> int:
            if document not in self._sizes:
                raise no_document(document)
            chunks = self._sizes[document][0]
            await self._table.delete(f"document = {_quoted(document)}")
            self._resize(document, _NOTHING)
            self._touch()
            return chunks

        return await self._change(change)

    async def set_variants(self, data: pa.Table) -> None:
        async def change() -> None:
            merge = self._table.merge_insert(["document", "position"])
            await merge.when_matched_update_all(where="target.digest = source.digest").execute(data)
            self._touch()

        await self._change(change)

    async def by_words(self, question: str, limit: int, condition: str = "") -> pa.Table:
        # A plain string would be parsed: one in quotes is a phrase query, which the index refuses.
        query = self._table.query().nearest_to_text(MatchQuery(question, "text")).limit(limit)  # type: ignore[call-arg]
        return await self._rows(query, condition, "_score")

    async def by_meaning(self, vector: np.ndarray, limit: int, condition: str = "") -> pa.Table:
        # Exact search without an index takes 2 to 8 ms for up to 100k chunks.
        query = self._table.query().nearest_to(vector).distance_type("dot").limit(limit)
        return await self._rows(query, condition, "_distance")

    async def by_both(
        self, question: str, vector: np.ndarray, limit: int, condition: str
    ) -> tuple[pa.Table, pa.Table]:
        """The rows of both searches, which see the same version of every document that both find."""

        async def search() -> tuple[pa.Table, pa.Table]:
            by_words, by_meaning = (
                self.by_words(question, limit, condition),
                self.by_meaning(vector, limit, condition),
            )
            return await asyncio.gather(by_words, by_meaning)

        replaced = {write.document for write in self._queue}
        self._replaced.append(replaced)
        try:
            words, meaning = await search()
        finally:
            self._replaced = [other for other in self._replaced if other is not replaced]
        if replaced.intersection(words["document"].to_pylist()).isdisjoint(meaning["document"].to_pylist()):
            return words, meaning
        async with self._writing:
            return await search()

    async def of_document(self, document: str) -> pa.Table:
        return await self._rows(self._table.query(), f"document = {_quoted(document)}")

    @contextlib.asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """Blocks changes of the table while inside."""
        async with self._lock:
            if self._gone:
                raise CorpusGone
            yield

    async def thawed(self) -> None:
        """Waits until the table is not frozen."""
        async with self._lock:
            pass

    def retire(self) -> None:
        """Marks the table as replaced: waiting changes and failing reads raise CorpusGone. Call it in `frozen`."""
        self._gone = True

    async def close(self) -> None:
        """Waits for the change in progress; later changes raise CorpusGone."""
        async with self._lock:
            self._gone = True
        self._optimizing.cancel()
        await asyncio.gather(self._optimizing, *self._changes, return_exceptions=True)

    async def _rows(self, query: Any, condition: str, *more: str) -> pa.Table:
        if condition:
            query = query.where(condition)
        try:
            with disk_errors():
                return await query.select([*self._columns, *more]).to_arrow()
        except (RuntimeError, OSError, ValueError) as error:
            if self._gone:
                raise CorpusGone from error
            raise

    async def _change(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a change after those before it; it completes even if its caller is cancelled."""

        async def locked() -> T:
            async with self.frozen():
                with disk_errors():
                    return await change()

        return await asyncio.shield(background(self._changes, locked()))

    async def _commit_queue(self) -> None:
        """Writes queued documents in one commit, each name at most once, up to a limit; the rest waits."""
        batch: dict[str, _Write] = {}
        for write in self._queue[:_MAX_BATCH]:
            if write.document in batch:
                break
            batch[write.document] = write
        names = ", ".join(map(_quoted, batch))
        merge = self._table.merge_insert(["document", "position"])
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        merge = merge.when_not_matched_by_source_delete(f"document IN ({names})")
        async with self._writing:
            await merge.execute(pa.concat_tables([write.data for write in batch.values()]))
        del self._queue[: len(batch)]
        for name, write in batch.items():
            write.existed = name in self._sizes
            self._resize(name, _size(write.data), write.data["source"][0].as_py() if len(write.data) else "")
        self._touch()

    def _resize(self, document: str, size: Size, source: str = "") -> None:
        before = self._sizes.pop(document, _NOTHING)
        self._sources.pop(document, None)
        if source:
            self._sources[document] = source
        chunks, tokens, text = (t + new - old for t, new, old in zip(self._total, size, before, strict=True))
        self._total = chunks, tokens, text
        if size[0]:
            self._sizes[document] = size
        if size[0] and not before[0]:
            bisect.insort(self._names, document)
        elif before[0] and not size[0]:
            del self._names[bisect.bisect_left(self._names, document)]

    def _touch(self) -> None:
        self._commits += 1
        self._changed.set()

    async def _optimize_when_idle(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._commits < _COMMITS_BEFORE_OPTIMIZE:
                # Not wait_for: in Python 3.11, it loses a cancellation that coincides with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_SECONDS):
                        await self._changed.wait()
                    continue
            async with self._lock:
                if self._gone:  # its folder may now hold another table, whose files are not known here
                    return
                self._commits = 0
                try:
                    await self._table.optimize(cleanup_older_than=_KEEP_VERSIONS)
                    # The caches of the old table keep a file open for every past state of the indexes.
                    self._table = await self._reopen()
                except Exception as error:
                    cause = disk_error(error)
                    log.error(
                        "new rows were not added to the indexes; searches stay correct, but slower: %s",
                        cause or error,
                        exc_info=cause is None,
                    )


def schema_of(model: ModelIdentity, dim: int) -> pa.Schema:
    """The schema of a corpus's table, with the models as metadata; without an embedder, it has no vector column."""
    columns = _SCHEMA.append(pa.field(_VECTOR, pa.list_(pa.float32(), dim))) if dim else _SCHEMA
    made_with = {
        "fusionkv.form": _FORMAT,
        "fusionkv.fingerprint": model.fingerprint.hex(),
        "fusionkv.tokenizer": model.tokenizer.hex(),
        "fusionkv.embedder": model.embedder,
        "fusionkv.model": model.name,
    }
    return columns.with_metadata(made_with)


def _check_format(schema: pa.Schema) -> None:
    """Raises ValueError if another version wrote a table, whose data a change might lose."""
    form = (schema.metadata or {}).get(b"fusionkv.form", b"").decode()
    columns = sorted({*schema.names} - {*_SCHEMA.names, _VECTOR})
    if form != _FORMAT or columns:
        difference = f"has the columns {', '.join(columns)}" if columns else f"has format {form!r}"
        raise ValueError(f"another version of FusionKV wrote it: it {difference}")


def _identity(schema: pa.Schema) -> ModelIdentity:
    """The models that a corpus was built with. Raises KeyError if the table's metadata lack one."""
    names = ("fingerprint", "tokenizer", "embedder", "model")
    fingerprint, tokenizer, *more = (schema.metadata[f"fusionkv.{name}".encode()].decode() for name in names)
    return ModelIdentity(bytes.fromhex(fingerprint), bytes.fromhex(tokenizer), *more)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def condition_of(where: Mapping[str, str], without: Collection[bytes]) -> str:
    """The condition for chunks with all metadata of `where` and no digest of `without`; empty if all are meant."""
    conditions = []
    if where:
        pairs = ", ".join(_quoted(f"{key}={value}") for key, value in where.items())
        conditions.append(f"array_has_all(metadata, make_array({pairs}))")
    if without:
        digests = ", ".join(f"X'{digest.hex()}'" for digest in sorted(without))
        conditions.append(f"digest NOT IN ({digests})")
    return " AND ".join(conditions)


def rows_of(chunks: Sequence[TextChunk], vectors: np.ndarray) -> pa.Table:
    """Complete rows; `vectors` is float32 `[chunk, dim]`."""
    values = [
        vars(chunk)
        | {"tokens": len(chunk.ids), "digest": chunk.digest}
        | {"metadata": ["=".join(pair) for pair in chunk.metadata]}
        for chunk in chunks
    ]
    table = pa.Table.from_pylist(values, schema=_SCHEMA)
    if dim := vectors.shape[1]:
        flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
        table = table.append_column(_VECTOR, pa.FixedSizeListArray.from_arrays(flat, dim))
    return table


def variants_of(chunks: Sequence[TextChunk]) -> pa.Table:
    """Rows with only a chunk's key columns and the columns that Precompute sets."""
    return rows_of(chunks, np.zeros((len(chunks), 0))).select(
        ["document", "position", "digest", "variant", "neighbours"]
    )


def chunks_of(table: pa.Table) -> list[TextChunk]:
    chunks = []
    for row in table.select(_COLUMNS).to_pylist():
        pairs = (pair.partition("=") for pair in row["metadata"])
        metadata = tuple((key, value) for key, _, value in pairs)
        chunks.append(TextChunk(**row | {"ids": tuple(row["ids"]), "metadata": metadata}))
    return chunks


def vectors_of(table: pa.Table) -> np.ndarray:
    """Vectors, float32 `[row, dim]`; of width 0 if the table has none."""
    if _VECTOR not in table.column_names:
        return np.zeros((len(table), 0), np.float32)
    dim = table.schema.field(_VECTOR).type.list_size
    return table[_VECTOR].combine_chunks().flatten().to_numpy().reshape(len(table), dim)


def _size(data: pa.Table) -> Size:
    texts = pc.sum(pc.binary_length(data["text"])).as_py()
    return len(data), pc.sum(data["tokens"]).as_py() or 0, texts or 0


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Maps operating-system errors raised inside.

    Raises:
        ResourceExhausted: the disk is full, or there are no file descriptors or memory left.
        Unavailable: the disk can't be read or written.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        service_error = disk_error(error)
        if service_error is None:
            raise
        _faults.warning("the corpora can't be used", error)
        raise service_error from error


def disk_error(error: Exception) -> ServiceError | None:
    """The service error for an operating-system error; None for any other error."""
    match = _NUMBER.search(str(error))
    number = error.errno if isinstance(error, OSError) and error.errno else int(match[1]) if match else 0
    return from_os(number, f"the gateway's data_dir can't be used: {os.strerror(number)}")
