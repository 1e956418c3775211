"""What the retrieval engine does in Milvus: collections, and reads and writes of rows."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from fusionkv.gateway.retrieval import milvus_rows as rows
from fusionkv.gateway.retrieval.milvus_calls import MilvusCalls
from fusionkv.gateway.retrieval.milvus_rows import Row
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.errors import Unavailable

Hits = list[tuple[Row, float]]
# Rows per write, a few kilobytes each; a message may have 64 MiB.
BATCH = 500
MAX_ROWS = 16_384  # per reply


class MilvusConnection:
    """A strongly consistent connection: reads see all earlier writes, including those of other clients.

    Raises as `MilvusCalls` does.
    """

    def __init__(self, calls: MilvusCalls) -> None:
        self._calls = calls
        self._client = calls.client

    async def collections(self, prefix: str) -> list[str]:
        names = await self._calls.run(self._client.list_collections)
        return [name for name in names if name.startswith(prefix)]

    async def create(self, name: str, dim: int) -> None:
        """Creates a collection, unless it exists, and waits until it can be searched."""
        if not await self._calls.run(self._client.has_collection, name):
            try:
                await self._calls.run(
                    self._client.create_collection, name, schema=rows.schema(dim), index_params=rows.indexes(),
                    consistency_level="Strong",
                )  # fmt: skip
            except Unavailable:
                if not await self._calls.run(self._client.has_collection, name):
                    raise
        await self._calls.run(self._client.load_collection, name)

    async def drop(self, name: str) -> None:
        await self._calls.run(self._client.drop_collection, name)

    async def write(self, name: str, changed: Sequence[Row]) -> None:
        """Inserts rows, replacing rows with the same keys."""
        for at in range(0, len(changed), BATCH):
            await self._calls.run(self._client.upsert, name, list(changed[at : at + BATCH]))

    async def delete(self, name: str, condition: str) -> None:
        await self._calls.run(self._client.delete, name, filter=condition)

    async def query(self, name: str, condition: str, fields: Sequence[str] = rows.COLUMNS) -> list[Row]:
        """The rows that match a condition, at most `MAX_ROWS`."""
        return list(await self._query(name, condition, fields, limit=MAX_ROWS))

    async def count(self, name: str, condition: str) -> int:
        (row,) = await self._query(name, condition, ["count(*)"])
        return int(row["count(*)"])

    async def walk(self, name: str, condition: str, fields: Sequence[str]) -> list[Row]:
        def read(name: str, timeout: float) -> list[Row]:
            rows_read: list[Row] = []
            deadline = Deadline.after(timeout)
            pages = self._client.query_iterator(
                name, 1000, filter=condition, output_fields=[*fields], timeout=timeout
            )
            with contextlib.closing(pages):
                # `timeout` applies to each page.
                while page := pages.next():
                    rows_read += page
                    if deadline.passed:
                        raise Unavailable("Milvus: the deadline passed before all documents were read")
            return rows_read

        return await self._calls.read(read, name)

    async def search(self, name: str, field: str, data: Any, limit: int, condition: str) -> Hits:
        """The best rows by a vector field, best first, with their scores."""
        (hits,) = await self._calls.read(
            self._client.search, name, data=[data], anns_field=field, limit=limit, filter=condition,
            output_fields=rows.COLUMNS, consistency_level="Strong",
        )  # fmt: skip
        return [(dict(hit["entity"]), float(hit["distance"])) for hit in hits]

    async def close(self) -> None:
        await self._calls.close()

    async def _query(self, name: str, condition: str, fields: Sequence[str], **options: Any) -> Any:
        options |= {"filter": condition, "output_fields": [*fields], "consistency_level": "Strong"}
        return await self._calls.read(self._client.query, name, **options)


def listed(names: Iterable[str]) -> str:
    """Formats a list for a condition; names are hexadecimal, so they need no escaping."""
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
