"""Connects a store to the remote tier: finds entries there, has them pulled, and new ones written back."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusionkv.kvcache_service.index.index import HitRanker
from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.keys import entry_key
from fusionkv.kvcache_service.remote.access import RemoteAccess
from fusionkv.kvcache_service.remote.pulls import Pulls
from fusionkv.kvcache_service.remote.tier import RemoteTier
from fusionkv.kvcache_service.remote.write_back import WriteBackQueue, put_newest
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.protos.runtime.errors import Unavailable

log = logging.getLogger(__name__)
LocalHits = Sequence[tuple[HitKind, StoredEntry | None]]

# Interval in which an unreachable tier is probed.
_PROBE_SECONDS = 1.0
# Limit of records whose deletion has not succeeded: as many as one Delete has keys. The oldest are dropped.
_MAX_DELETING = 65_536


class Sharing:
    """Runs on the store's event loop. Errors of the remote tier are misses, until `run` finds it reachable again."""

    def __init__(self, store: Store, tier: RemoteTier) -> None:
        self._store = store
        # Of an entry that can be copied here. A larger one would be found by each Lookup, and refused by each Fetch.
        home = store.residents.contents[store.residents.home.name]
        self._max_bytes = min(store.config.max_entry_bytes, home.tenants.limit)
        self._access = RemoteAccess(tier, store.counters, store.config.remote_lookup_ms / 1000)
        self.write_backs = WriteBackQueue(store, self._access)
        self.pulls = Pulls(store, self._access, self.write_backs.confirm)
        store.on_stored, store.on_used = self.write_backs.add, self.write_backs.renew
        # By key: a Delete that failed, or was cancelled, may have deleted the entries here, where the next one looks.
        self._deleting: dict[bytes, EntryRecord] = {}

    @property
    def reachable(self) -> bool:
        return self._access.reachable

    async def lookup(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]], local: LocalHits
    ) -> dict[int, tuple[HitKind, EntryRecord]]:
        """Finds entries of the remote tier that rank above local ones, and starts to pull some of them.

        local: result of `Store.lookup` for the same path. Returns the kind of hit and the record by element number;
        none if the tier is unreachable, or the index not loaded yet.
        """
        elements = [i for i, (kind, _) in enumerate(local) if kind is not HitKind.EXACT]
        elements.sort(key=lambda i: local[i][1] is not None)  # misses first: the tier may not look for all
        better = {}
        for i, records in await self._ask(elements, self._access.tier.lookup, namespace, path, variants, elements):
            if not records:  # a ranker hashes the whole path up to its element
                continue
            entry = local[i][1]
            ranker = HitRanker(namespace, path[: i + 1], variants[i])
            best = ranker.best(entry.record if entry is not None else None, records)
            if best is not None:
                better[i] = ranker.kind(best), best
        self._note(better)
        return better

    async def find(
        self, namespace: bytes, digests: Sequence[bytes], local: LocalHits
    ) -> dict[int, tuple[HitKind, EntryRecord]]:
        """As `lookup`, for entries with a path of one digest each. local: result of `Store.find`."""
        missing = [i for i, (_, entry) in enumerate(local) if entry is None]
        hits = {}
        asked = [digests[i] for i in missing]
        for i, records in await self._ask(missing, self._access.tier.find, namespace, asked):
            key = entry_key(namespace, [digests[i]])
            for record in records:
                if record.key == key and record.namespace == namespace and record.trail == digests[i]:
                    hits[i] = HitKind.EXACT, record
        self._note(hits)
        return hits

    async def _ask(
        self, elements: Sequence[int], lookup: Callable[..., Sequence[Sequence[EntryRecord]]], *args: Any
    ) -> list[tuple[int, Sequence[EntryRecord]]]:
        """What a lookup of the tier finds that has room here, by element; empty if it can't be asked."""
        if not elements or not self.reachable or not self._store.ready.is_set():
            return []
        try:
            found = await self._access.run_lookup(lookup, *args)
            fitting = ([record for record in records if record.size <= self._max_bytes] for records in found)
            return list(zip(elements, fitting, strict=True))
        except OSError as error:
            self._access.mark_unreachable(error)
            return []

    def _note(self, hits: Mapping[int, tuple[HitKind, EntryRecord]]) -> None:
        for kind, record in hits.values():
            self._store.counters.add("lookups.remote", kind=kind.value)
            self.pulls.offer(record)

    async def records(self, keys: Sequence[bytes], namespace: bytes) -> list[EntryRecord]:
        """Records, to `delete`, of keys that are local, or were recently found in the remote tier.

        Waits until none of these, or of the namespace, is being pulled.
        """
        remote = await self.pulls.settled({*keys}, namespace)
        for key in keys:
            entry = self._store.entries.get(key)
            if (record := remote.get(key) if entry is None else entry.record) is not None:
                put_newest(self._deleting, key, record, _MAX_DELETING)
        return [self._deleting[key] for key in keys if key in self._deleting]

    async def delete(self, entries: Sequence[EntryRecord], namespace: bytes) -> None:
        """Deletes entries from the remote tier, or all of a namespace. Waits for pulls of what was found before.

        Raises Unavailable if the tier is unreachable, or returned an error.
        """
        if not (entries or namespace or self.reachable):  # what it has of the keys is unknown
            raise Unavailable("can't delete in the remote tier: it is unreachable")
        try:
            if namespace:
                await self._access.run(self._access.tier.delete_all, namespace)
            else:
                await self._access.run(self._access.tier.delete, entries)
        except OSError as error:
            self._store.counters.add("remote.failures")
            raise Unavailable(f"can't delete in the remote tier: {error}") from error
        for record in entries:
            self._deleting.pop(record.key, None)
        await self.pulls.forget({record.key for record in entries}, namespace)

    async def run(self) -> None:
        """Writes back stored entries, renews used ones, and probes an unreachable tier, until cancelled."""
        self.write_backs.add_hottest()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_SECONDS):
                    await self.write_backs.changed.wait()
            self.write_backs.changed.clear()
            try:
                if not self.reachable and await self._access.probe():
                    self.write_backs.forget_confirmed()
                await self.write_backs.run()
            except Exception:
                log.exception("work on the remote tier failed and is repeated")

    async def close(self) -> None:
        """Cancels pulls in progress. `run` must be cancelled before."""
        await self.pulls.close()
        self._access.close()
