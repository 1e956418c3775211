"""A corpus's collection in Milvus, as readers see it: the current revisions of its documents."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusionkv.gateway.client.results import Item
from fusionkv.gateway.retrieval import milvus_rows as rows
from fusionkv.gateway.retrieval.milvus_calls import NoCollection
from fusionkv.gateway.retrieval.milvus_connection import BATCH, MAX_ROWS, Hits, MilvusConnection, listed
from fusionkv.gateway.retrieval.milvus_rows import Row, Version
from fusionkv.protos.runtime.errors import NotFound, Unavailable

# Documents changed more recently are read twice. Also the tolerated difference between gateways' clocks.
_RECENT_SECONDS = 5
# Attempts to read, or to write, a document or a corpus that others change meanwhile.
TRIES = 50


@dataclass(frozen=True, slots=True)
class MilvusCollection:
    """Calls raise NoCollection if there is none of this name."""

    milvus: MilvusConnection
    name: str

    async def corpus_row(self) -> Row:
        """The row that says with what the corpus was made."""
        corpus_rows = await self.milvus.query(self.name, rows.IS_CORPUS, rows.OWN)
        if not corpus_rows:
            raise NoCollection("the corpus is incomplete")
        return corpus_rows[0]

    async def item(self) -> Item | None:
        """The corpus; None while it is being created or deleted."""
        try:
            described = await self.corpus_row()
            documents = await self.documents()
        except NotFound:
            return None
        chunks, tokens, size = (
            sum(getattr(item, what) for item in documents) for what in ("chunks", "tokens", "bytes")
        )
        name, made_with = described["document"], rows.identity(described)
        return Item(name, len(documents), chunks, tokens, size, made_with.name, made_with.embedder)

    async def documents(self) -> list[Item]:
        fields = ["document", "chunks", "tokens", "bytes", "source"]
        return [
            Item(row["document"], 1, row["chunks"], row["tokens"], row["bytes"], source=row["source"])
            for row in await self.milvus.walk(self.name, rows.IS_DOCUMENT, fields)
        ]

    async def version(self, document: str) -> Version | None:
        return (await self.versions([rows.owner(document)])).get(document)

    async def versions(self, owners: Iterable[str]) -> dict[str, Version]:
        """Current versions of the documents with these keys, by document; missing ones are left out."""
        fields = ["document", "revision", "since", "chunks"]
        version_rows = await self.milvus.query(self.name, f"key in {listed(owners)}", fields)
        return {row["document"]: Version(row["revision"], row["since"], row["chunks"]) for row in version_rows}

    async def chunk_rows(self, document: str, version: Version) -> list[Row]:
        chunk_rows = []
        for start in range(0, version.chunks, BATCH):
            part = f"position >= {start} and position < {start + BATCH}"
            chunk_rows += await self.milvus.query(self.name, f"{_of(document, version.revision)} and {part}")
        return chunk_rows

    async def count(self, document: str, revision: str) -> int:
        """The number of chunks of a document's revision."""
        return await self.milvus.count(self.name, _of(document, revision))

    async def clean(self, document: str, dead: Iterable[str], current: str = "") -> None:
        """Deletes revisions that are no longer read, and leftovers of gateways that ended during a change.

        current: the revision that is read, which a clock that has jumped, or another gateway's, may take for old.
        """
        gone = f'revision in {listed(dead)} or revision < "{rows.hour_old()}" and revision != "{current}"'
        await self.milvus.delete(self.name, f"{_of(document)} and ({gone})")

    async def search(self, queries: Mapping[str, Any], depth: int, selected: str = rows.IS_CHUNK) -> list[Hits]:
        """The `depth` best of the selected chunks of documents' current revisions for each vector field.

        A document may change between the search and the reading of its row, so that its new chunks were not searched.
        The search is repeated until the rows are the same before and after.
        """
        previous: dict[str, Version] = {}
        dead: set[str] = set()
        owners: set[str] = set()
        limit = min(MAX_ROWS, depth + 16)
        for _ in range(TRIES):
            began = time.time()
            condition = f"{selected} and revision not in {listed(dead)}" if dead else selected
            searches = (self.milvus.search(self.name, field, x, limit, condition) for field, x in queries.items())
            results = await asyncio.gather(*searches)
            owners |= {row["owner"] for hits in results for row, _ in hits}
            versions = await self.versions(owners)
            settled = all(v.since < began - _RECENT_SECONDS or previous.get(d) == v for d, v in versions.items())
            current = {version.revision for version in versions.values()}
            kept = [[hit for hit in hits if hit[0]["revision"] in current] for hits in results]
            # Chunks of old revisions may displace current ones until the search excludes them.
            short = any(len(k) < depth and len(hits) == limit for k, hits in zip(kept, results, strict=True))
            if settled and not short and not dead & current:
                return [hits[:depth] for hits in kept]
            previous = versions
            dead = (dead | {row["revision"] for hits in results for row, _ in hits}) - current
        raise Unavailable("documents of the corpus keep changing: try again later")


def _of(document: str, revision: str = "") -> str:
    """The condition for a document's chunks, of one revision or of all."""
    chunks = f'owner == "{rows.owner(document)}"'
    return f'{chunks} and revision == "{revision}"' if revision else chunks
