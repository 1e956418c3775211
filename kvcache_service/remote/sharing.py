"""Connects a store to the remote tier: finds entries there, copies them here, and has new ones written back."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from fusionkv.kvcache_service.index.index import HitRanker
from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.keys import entry_key
from fusionkv.kvcache_service.remote.access import RemoteAccess
from fusionkv.kvcache_service.remote.tier import RemoteTier
from fusionkv.kvcache_service.remote.write_back import WriteBackQueue, put_newest
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.store.writing import reserve
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import DataLoss, Unavailable

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
LocalHits = Sequence[tuple[HitKind, StoredEntry | None]]

# Maximum number of concurrent pulls, each with a batch in memory.
_PULLS = 4
# Bytes read per round trip, at least a block.
_READ_BYTES = 4 << 20
# Limit of records found by Lookups. The oldest are dropped.
_MAX_FOUND = 16_384
# Interval in which an unreachable tier is probed.
_PROBE_SECONDS = 1.0


class Sharing:
    """Runs on the store's event loop. Errors of the remote tier are misses, until `run` finds it reachable again.

    An entry found in the remote tier is pulled, which means copied to the store, when it is fetched, or in advance.
    """

    def __init__(self, store: Store, tier: RemoteTier) -> None:
        self._store = store
        self._access = RemoteAccess(tier, store.counters, store.config.remote_lookup_ms / 1000)
        self.write_backs = WriteBackQueue(store, self._access)
        self._pull_slots = asyncio.Semaphore(_PULLS)
        self._pulls: dict[bytes, asyncio.Task[bool]] = {}
        self._found: dict[bytes, EntryRecord] = {}  # by Lookups, in the remote tier
        self._closed = False
        store.on_stored, store.on_used = self.write_backs.add, self.write_backs.renew

    @property
    def reachable(self) -> bool:
        return self._access.reachable

    async def lookup(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]], local: LocalHits
    ) -> dict[int, tuple[HitKind, EntryRecord]]:
        """Finds entries of the remote tier that rank above local ones, and starts to pull some of them.

        Args:
            local: Result of `Store.lookup` for the same path.

        Returns:
            Kind of hit and record by element number. Empty if the tier is unreachable, or the index not loaded yet.
        """
        elements = [i for i, (kind, _) in enumerate(local) if kind is not HitKind.EXACT]
        if not elements or not self.reachable or not self._store.ready.is_set():
            return {}
        try:
            candidates = await self._access.run_lookup(self._access.tier.lookup, namespace, path, variants, elements)
        except OSError as error:
            self._access.mark_unreachable(error)
            return {}
        better = {}
        for i, records in zip(elements, candidates, strict=True):
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
        if not missing or not self.reachable or not self._store.ready.is_set():
            return {}
        try:
            candidates = await self._access.run_lookup(
                self._access.tier.find, namespace, [digests[i] for i in missing]
            )
        except OSError as error:
            self._access.mark_unreachable(error)
            return {}
        hits = {}
        for i, records in zip(missing, candidates, strict=True):
            key = entry_key(namespace, [digests[i]])
            for record in records:
                if record.key == key and record.namespace == namespace and record.trail == digests[i]:
                    hits[i] = HitKind.EXACT, record
        self._note(hits)
        return hits

    def _note(self, hits: Mapping[int, tuple[HitKind, EntryRecord]]) -> None:
        """Remembers what was found, and starts to pull some of it."""
        for kind, record in hits.values():
            self._store.counters.add("lookups.remote", kind=kind.value)
            put_newest(self._found, record.key, record, _MAX_FOUND)
            if len(self._pulls) < _PULLS:
                self._start_pull(record)

    async def pull(self, key: bytes) -> bool:
        """Pulls an entry that a Lookup found in the remote tier; returns whether it is in the store afterwards.

        Raises ResourceExhausted if the store has no room.
        """
        pull = self._pulls.get(key)
        if pull is None:
            record = self._found.get(key)
            if record is None:
                return False
            pull = self._start_pull(record)
        return await asyncio.shield(pull)

    async def records(self, keys: Sequence[bytes], namespace: bytes) -> list[EntryRecord]:
        """Records of keys that are local, or were recently found in the remote tier.

        Waits until none of these, or of the namespace, is being pulled.
        """
        named = set(keys)
        remote = {key: record for key, record in self._found.items() if key in named or record.namespace == namespace}
        if pulls := [pull for key in remote if (pull := self._pulls.get(key)) is not None]:
            await asyncio.wait(pulls)
        local = [(key, self._store.entries.get(key)) for key in keys]
        records = (remote.get(key) if entry is None else entry.record for key, entry in local)
        return [record for record in records if record is not None]

    async def delete(self, entries: Sequence[EntryRecord], namespace: bytes) -> None:
        """Deletes entries from the remote tier, or all of a namespace. Waits for pulls of what was found before.

        Raises Unavailable if the tier is unreachable, or returned an error.
        """
        try:
            if namespace:
                await self._access.run(self._access.tier.delete_all, namespace)
            else:
                await self._access.run(self._access.tier.delete, entries)
        except OSError as error:
            raise Unavailable(f"can't delete in the remote tier: {error}") from error
        keys = {record.key for record in entries}
        await self.records([*keys], namespace)
        self._found = {
            key: record for key, record in self._found.items() if key not in keys and record.namespace != namespace
        }

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
        self._closed = True
        pulls = list(self._pulls.values())
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        self._access.close()

    def _start_pull(self, record: EntryRecord) -> "asyncio.Task[bool]":
        task = self._pulls.get(record.key)
        if task is None:
            task = self._pulls[record.key] = asyncio.create_task(self._pull(record))

            def ended(done: "asyncio.Task[bool]") -> None:
                del self._pulls[record.key]
                if not done.cancelled():
                    done.exception()  # marks it as retrieved; waiters receive it

            task.add_done_callback(ended)
        return task

    async def _pull(self, record: EntryRecord) -> bool:
        async with self._pull_slots:
            pulled = await self._copy(record)
        self._found.pop(record.key, None)
        return pulled

    async def _copy(self, record: EntryRecord) -> bool:
        """Copies an entry to the store; returns whether it is there afterwards."""
        if not self.reachable:  # known since this copy was requested; to reserve a place would evict entries
            return False
        writer = reserve(self._store, record, from_remote=True)
        if writer is None:
            return True
        block_bytes = self._access.tier.engine.block_bytes

        def read(at: int, into: memoryview) -> None:
            self._access.tier.read(record, at // block_bytes, into)
            if self._closed:  # by now, the files may belong to another process
                raise OSError("the service has ended")

        try:
            await writer.fill(read, self._access.threads, max(_READ_BYTES, block_bytes))
            await writer.commit()
        except (DataLoss, FileNotFoundError) as error:
            if isinstance(error, DataLoss):
                _faults.warning(f"entry {record.key.hex()} was damaged in the remote tier and is deleted", error)
            with contextlib.suppress(OSError):
                await self._access.run(self._access.tier.delete, [record])
            return False
        except OSError as error:
            self._access.mark_unreachable(error)
            return False
        finally:
            writer.abort()
        self.write_backs.confirm(record.key)
        self._store.counters.add("remote.reads")
        return True
