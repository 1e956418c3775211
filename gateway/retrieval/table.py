"""One corpus in LanceDB: its rows, and its documents. Queued writes share a commit."""

import asyncio
import bisect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lancedb.query import MatchQuery
from lancedb.table import AsyncTable

from fusionkv.gateway.client.results import Item
from fusionkv.gateway.retrieval.base import Query, TextChunk, no_document
from fusionkv.gateway.retrieval.indexed_table import IndexedTable, create_indexes
from fusionkv.gateway.tokens import ModelIdentity

Size = tuple[int, int, int]  # chunks, tokens and bytes of text
_NOTHING: Size = (0, 0, 0)
# A commit costs about 20 ms whatever its size, so documents that arrive together share one.
_MAX_BATCH = 64
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


@dataclass(eq=False)
class _Write:
    """Rows of a document to be stored; `existed` is set once they are."""

    document: str
    data: pa.Table
    existed: bool | None = None


class Documents:
    """The sizes and sources of a corpus's documents."""

    def __init__(self) -> None:
        self.sizes: dict[str, Size] = {}
        self._sources: dict[str, str] = {}  # where documents came from, if that is known
        self._names: list[str] = []  # sorted
        self.total: Size = (0, 0, 0)

    def items(self, after: str = "", limit: int = 0) -> list[Item]:
        """Those whose names follow `after`, in order; 0 sets no limit."""
        start = bisect.bisect_right(self._names, after)
        names = self._names[start : start + limit] if limit else self._names[start:]
        return [Item(name, 1, *self.sizes[name], source=self._sources.get(name, "")) for name in names]

    def resize(self, document: str, size: Size, source: str = "") -> None:
        """Adds or replaces a document, or removes it: it has no chunks then."""
        before = self.sizes.pop(document, _NOTHING)
        self._sources.pop(document, None)
        if source:
            self._sources[document] = source
        chunks, tokens, text = (t + new - old for t, new, old in zip(self.total, size, before, strict=True))
        self.total = chunks, tokens, text
        if size[0]:
            self.sizes[document] = size
        if size[0] and not before[0]:
            bisect.insort(self._names, document)
        elif before[0] and not size[0]:
            del self._names[bisect.bisect_left(self._names, document)]


class CorpusTable(IndexedTable):
    """The rows of a corpus, and what is known of its documents."""

    def __init__(self, table: AsyncTable, schema: pa.Schema, reopen: Callable[[], Awaitable[AsyncTable]]) -> None:
        self.model = _identity(schema)
        self.dim: int = schema.field(_VECTOR).type.list_size if _VECTOR in schema.names else 0
        self._columns = [*_COLUMNS, *[_VECTOR] * bool(self.dim)]
        self.documents = Documents()
        self._queue: list[_Write] = []
        self._writing = asyncio.Lock()  # inside _lock; held by a commit of documents
        self._replaced: list[set[str]] = []  # for each search in flight, the documents replaced since it began
        super().__init__(table, reopen)  # last: it starts a task

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
        # Sorted, so that each name is appended: 300,000 names in any order take 3 s to insert.
        for name, source, *size in sorted(zip(*(c.to_pylist() for c in sums.columns), strict=True)):
            opened.documents.resize(name, tuple(size), source)
        if len(sizes):
            opened._touch()
        return opened

    def item(self, name: str) -> Item:
        documents = self.documents
        return Item(name, len(documents.sizes), *documents.total, self.model.name, self.model.embedder)

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
            if document not in self.documents.sizes:
                raise no_document(document)
            chunks = self.documents.sizes[document][0]
            await self._table.delete(f"document = {_quoted(document)}")
            self.documents.resize(document, _NOTHING)
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
            by_words = self.by_words(question, limit, condition)
            return await asyncio.gather(by_words, self.by_meaning(vector, limit, condition))

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
        if document not in self.documents.sizes:  # as most that are ingested; a query takes 6 ms
            return _SCHEMA.empty_table()
        return await self._rows(self._table.query(), f"document = {_quoted(document)}")

    async def _rows(self, query: Any, condition: str, *more: str) -> pa.Table:
        if condition:
            query = query.where(condition)
        return await self._read(query.select([*self._columns, *more]))

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
            write.existed = name in self.documents.sizes
            source = write.data["source"][0].as_py() if len(write.data) else ""
            self.documents.resize(name, _size(write.data), source)
        self._touch()


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


def condition_of(query: Query) -> str:
    """The condition for the chunks among which a query searches; empty for all."""
    conditions = []
    if query.where:
        pairs = ", ".join(_quoted(f"{key}={value}") for key, value in query.where.items())
        conditions.append(f"array_has_all(metadata, make_array({pairs}))")
    if query.without:
        digests = ", ".join(f"X'{digest.hex()}'" for digest in sorted(query.without))
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
