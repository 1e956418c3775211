"""A table of LanceDB with indexes, to which new rows are added in the background, and the errors of its disk."""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from lancedb.index import FTS, BTree
from lancedb.table import AsyncTable

from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.cancellation import detached
from fusionkv.protos.runtime.errors import ServiceError, from_os

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
# LanceDB raises RuntimeErrors that contain the system's error number only in their text.
_NUMBER = re.compile(r"\(os error (\d+)\)")
T = TypeVar("T")
# Rows that are not indexed are scanned: 480 of them in as many fragments made a search take 31 ms instead of 8.
_COMMITS_BEFORE_OPTIMIZE = 100
_IDLE_SECONDS = 1.0
# Searches in flight read versions up to this old.
_KEEP_VERSIONS = timedelta(minutes=10)
# Deleted text leaves the disk within twice this time: its rows are rewritten first, the files of old versions removed
# later.
_ERASE_SECONDS = 3600.0
# Stop words by language.
_STOP_WORDS = {"english": Path(__file__).with_name("stop_words_english.txt").read_text().split()}


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


class IndexedTable:
    """One table, for concurrent use within one event loop, whose new rows are indexed in the background.

    `_lock` serialises all changes.
    """

    def __init__(self, table: AsyncTable, reopen: Callable[[], Awaitable[AsyncTable]]) -> None:
        """reopen: opens the table with new caches."""
        self._table = table
        self._reopen = reopen
        self._lock = asyncio.Lock()
        self._gone = False
        self._commits = 0
        self._changed = asyncio.Event()
        self._erases = True  # whether files may hold text that was deleted or replaced, also before the start
        self._changes: set[asyncio.Task[Any]] = set()
        self._reads: set[asyncio.Task[Any]] = set()
        self._upkeep = [asyncio.create_task(self._optimize_when_idle()), asyncio.create_task(self._erase_hourly())]

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
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, *self._changes, *self._reads, return_exceptions=True)

    async def _read(self, query: Any) -> pa.Table:
        """Runs a query, to its end even if its caller is cancelled.

        Others wait for the part of an index that it is loading; LanceDB would let them wait forever.
        """
        try:
            with disk_errors():
                return await detached(self._reads, query.to_arrow(), Exception)
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

        return await detached(self._changes, locked(), CorpusGone, ServiceError)

    def _touch(self) -> None:
        self._commits += 1
        self._erases = True
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
            await self._optimize()

    async def _erase_hourly(self) -> None:
        while True:
            await asyncio.sleep(_ERASE_SECONDS)
            if self._erases:
                await self._optimize(erases=True)

    async def _optimize(self, erases: bool = False) -> None:
        """Indexes new rows, and removes the files of old versions.

        erases: whether files with deleted rows are rewritten. 100,000 chunks take 2.4 s (two busy cores).
        """
        async with self._lock:
            if self._gone:  # its folder may now hold another table, whose files are not known here
                return
            self._commits = 0
            try:
                moved = erases and await _move_beside_deleted(self._table)
                await self._table.optimize(cleanup_older_than=_KEEP_VERSIONS)
                # The caches of the old table keep a file open for every past state of the indexes.
                self._table = await self._reopen()
                if erases:  # versions of a clock that has been set back since stay until it is there again
                    self._erases = moved or len(await self._table.list_versions()) > 1
            except Exception as error:
                cause = disk_error(error)
                log.error(
                    "new rows were not added to the indexes, which makes searches slower, and deleted text stays on "
                    "the disk: %s",
                    cause or error,
                    exc_info=cause is None,
                )


async def _move_beside_deleted(table: AsyncTable) -> bool:
    """Moves rows out of the fragments with deleted ones, so that compaction rewrites those; returns whether any did.

    Compaction leaves a fragment as it is while at most a tenth of its rows are deleted.
    """
    with_deleted = await asyncio.to_thread(_with_deleted, await table.uri())
    ids = (await table.query().select([]).with_row_id().to_arrow())["_rowid"].to_numpy()
    found = with_deleted.intersection(np.unique(ids >> 32).tolist())
    for fragment in found:
        rows = np.sort(ids[ids >> 32 == fragment])
        moved = f"_rowid BETWEEN {rows[0]} AND {rows[len(rows) // 10]}"
        await table.update(updates_sql={"document": "document"}, where=moved)
    return bool(found)


def _with_deleted(table: str) -> set[int]:
    """The numbers of fragments with deleted rows, with which the names of LanceDB's deletion files begin."""
    return {int(file.name.split("-")[0]) for file in Path(table, "_deletions").glob("*-*")}


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
