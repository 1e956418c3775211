"""Connects a store to the remote tier: finds entries there, copies them here on reads, and writes back new ones."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from fusionkv.kvcache_service.index.index import HitRanker
from fusionkv.kvcache_service.index.record import HitKind, Record
from fusionkv.kvcache_service.remote.tier import BLOCK_BYTES, RemoteTier
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.store.writing import reserve
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import DataLoss, Unavailable

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
T = TypeVar("T")
LocalHits = Sequence[tuple[HitKind, StoredEntry | None]]

_THREADS, _LOOKUP_THREADS = 8, 8
# Blocks written per round trip: at 1 GB/s, latency is 1% of the time for 8 MiB.
_BATCH = 8
# Maximum numbers of concurrent copies and write-backs, each with a batch in memory.
_PULLS, _WRITES = 4, 4
# Limits of entries to be written back or renewed, and of records found by Lookups. The oldest are dropped.
_MAX_ENTRIES = 65_536
_MAX_FOUND = 16_384
# Entries checked in the remote tier at start, which takes 0.5 ms each.
_MAX_CHECKED = 4096
_BEAT_SECONDS = 1.0
# Interval in which used entries are renewed in the remote tier, or written again if missing.
_ALIVE_SECONDS = 60.0
_TOUCH_BATCH = 256


class Sharing:
    """Runs on the store's event loop. Errors of the remote tier are misses, until `run` finds it reachable again.

    A Put is acknowledged before its entry is written back. An entry found in the remote tier is copied to the store
    when it is fetched, or in advance.
    """

    def __init__(self, store: Store, tier: RemoteTier) -> None:
        self._store = store
        self._tier = tier
        self._lookup_seconds = store.config.remote_lookup_ms / 1000
        self._alive_seconds = min(_ALIVE_SECONDS, store.config.remote_ttl_seconds / 4)
        self._threads = ThreadPoolExecutor(_THREADS, "kvcache-remote")
        # A pool of its own: copies may occupy every thread of the other one, and a lookup that is late because it
        # waited for a thread would make the tier count as unreachable.
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, "kvcache-remote-lookup")
        self._turns = asyncio.Semaphore(_PULLS)
        self._found: dict[bytes, Record] = {}
        self._pulls: dict[bytes, asyncio.Task[bool]] = {}
        self._waiting: dict[bytes, Record | None] = {}
        self._used: dict[bytes, None] = {}
        self._confirmed: dict[bytes, float] = {}
        """Time at which an entry was last known to be in the remote tier."""
        self._wake = asyncio.Event()
        self._kept_alive = time.monotonic()
        self._closed = False
        self.reachable = True
        store.on_stored, store.on_used = self.stored, self.used

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def find(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]], local: LocalHits
    ) -> dict[int, tuple[HitKind, Record]]:
        """Finds entries of the remote tier that rank above local ones, and starts to copy some of them.

        Args:
            local: Result of `Store.lookup` for the same path.

        Returns:
            Kind of hit and record by element number. Empty if the tier is unreachable, or the index not loaded yet.
        """
        wanted = [i for i, (kind, _) in enumerate(local) if kind is not HitKind.EXACT]
        if not wanted or not self.reachable or not self._store.ready.is_set():
            return {}
        try:
            async with asyncio.timeout(self._lookup_seconds):
                offers = await self._look_up(self._tier.find, namespace, path, variants, wanted)
        except TimeoutError:
            self._failed(Unreachable(f"no response within {self._lookup_seconds:g} s"))
            return {}
        except OSError as error:
            self._failed(error)
            return {}
        better = {}
        for i, offered in zip(wanted, offers, strict=True):
            if not offered:  # a ranker hashes the whole path up to its element
                continue
            own = local[i][1]
            ranker = HitRanker(namespace, path[: i + 1], variants[i])
            best = ranker.best(own.record if own is not None else None, offered)
            if best is not None:
                better[i] = ranker.kind(best), best
                _renew(self._found, best.key, best, _MAX_FOUND)
        for kind, n in Counter(kind for kind, _ in better.values()).items():
            self._store.counters.add("lookups.remote", n, kind=kind.value)
        for _, record in better.values():
            if len(self._pulls) < _PULLS:
                self._pull(record)
        return better

    async def bring(self, key: bytes) -> bool:
        """Copies an entry that a Lookup found in the remote tier; returns whether it is in the store afterwards.

        Raises ResourceExhausted if the store has no room.
        """
        pull = self._pulls.get(key)
        if pull is None:
            record = self._found.get(key)
            if record is None:
                return False
            pull = self._pull(record)
        return await asyncio.shield(pull)

    def stored(self, record: Record) -> None:
        _renew(self._waiting, record.key, record, _MAX_ENTRIES)
        if self.reachable:
            self._wake.set()

    def used(self, key: bytes) -> None:
        """Schedules the renewal of an entry that was looked up, or put again."""
        old = self._confirmed.get(key, 0.0) + self._alive_seconds < time.monotonic()
        # One that waits to be written back is renewed by that.
        if old and key not in self._waiting and len(self._used) < _MAX_ENTRIES:
            self._used[key] = None

    async def known(self, keys: Sequence[bytes], namespace: bytes) -> list[Record]:
        """Records of keys that are local, or were recently found in the remote tier.

        Waits until none of these, or of the namespace, is being copied.
        """
        named = set(keys)
        remote = {key: record for key, record in self._found.items() if key in named or record.namespace == namespace}
        if pulls := [pull for key in remote if (pull := self._pulls.get(key)) is not None]:
            await asyncio.wait(pulls)
        local = [(key, self._store.residents.get(key)) for key in keys]
        records = (remote.get(key) if entry is None else entry.record for key, entry in local)
        return [record for record in records if record is not None]

    async def delete(self, entries: Sequence[Record], namespace: bytes) -> None:
        """Deletes entries from the remote tier, or all of a namespace. Waits for copies of what was found before.

        Raises Unavailable if the tier is unreachable, or returned an error.
        """
        try:
            if namespace:
                await self._call(self._tier.delete_all, namespace)
            else:
                await self._call(self._tier.delete, entries)
        except OSError as error:
            raise Unavailable(f"can't delete in the remote tier: {error}") from error
        keys = {record.key for record in entries}
        await self.known([*keys], namespace)
        self._found = {k: found for k, found in self._found.items() if k not in keys and found.namespace != namespace}

    async def run(self) -> None:
        """Writes back stored entries, renews used ones, and probes an unreachable tier, until cancelled."""
        # Entries stored shortly before a kill -9 may not have been written back.
        self._waiting.update(dict.fromkeys(self._store.residents.warmest(_MAX_CHECKED)))
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._catch_up()
            except Exception:
                log.exception("work on the remote tier failed and is repeated")

    async def _catch_up(self) -> None:
        if not self.reachable:
            await self._probe()
        while self.reachable:
            await asyncio.gather(*map(self._write_back, list(islice(self._waiting, _WRITES))))
            if time.monotonic() - self._kept_alive >= self._alive_seconds / 4:
                self._kept_alive = time.monotonic()
                await self._keep_alive()
            if not self._waiting:
                break

    async def flush(self, seconds: float) -> None:
        """Waits until all stored entries are written back, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._waiting and self.reachable:  # noqa: ASYNC110 - `run` writes
                    await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Cancels copies in progress. `run` must be cancelled before."""
        self._closed = True
        pulls = list(self._pulls.values())
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        for threads in (self._threads, self._lookups):
            threads.shutdown(wait=False, cancel_futures=True)
        self._tier.engine.close()

    def _pull(self, record: Record) -> "asyncio.Task[bool]":
        task = self._pulls.get(record.key)
        if task is None:
            task = self._pulls[record.key] = asyncio.create_task(self._in_turn(record))

            def ended(done: "asyncio.Task[bool]") -> None:
                del self._pulls[record.key]
                if not done.cancelled():
                    done.exception()  # marks it as retrieved; waiters receive it

            task.add_done_callback(ended)
        return task

    async def _in_turn(self, record: Record) -> bool:
        async with self._turns:
            local = await self._copy_here(record)
        self._found.pop(record.key, None)
        return local

    async def _copy_here(self, record: Record) -> bool:
        if not self.reachable:  # known since this copy was requested; to reserve a place would evict entries
            return False
        writer = reserve(self._store, record, copied=True)
        if writer is None:
            return True

        def read(at: int, into: memoryview) -> None:
            self._tier.read(record, at // BLOCK_BYTES, into)
            if self._closed:  # by now, the files may belong to another process
                raise OSError("the service has ended")

        try:
            await writer.fill(read, self._threads)
            await writer.commit()
        except (DataLoss, FileNotFoundError) as error:
            if isinstance(error, DataLoss):
                _faults.warning(f"entry {record.key.hex()} was damaged in the remote tier and is deleted", error)
            with contextlib.suppress(OSError):
                await self._call(self._tier.delete, [record])
            return False
        except OSError as error:
            self._failed(error)
            return False
        finally:
            writer.abort()
        self._confirm(record.key)
        self._store.counters.add("remote.reads")
        return True

    async def _write_back(self, key: bytes) -> None:
        entry, stored = self._store.residents.get(key), self._waiting.get(key)
        try:
            if entry is not None and not (await self._call(self._tier.touch, [entry.record]))[0]:
                await self._copy_there(entry.record)
        except Unreachable as error:
            self._failed(error)
            return  # stays in the queue
        except Exception as error:
            # Damaged here, or refused by the remote tier, as by a Mooncake master that no client has rejoined yet, or
            # a fault of its client library. The next renewal tries again.
            self._used[key] = None
            self._store.counters.add("remote.failures")
            _faults.warning(f"entry {key.hex()} is not written to the remote tier", error)
        else:
            self._confirm(key)
        # An entry that was deleted and stored anew meanwhile is written again.
        if self._waiting.get(key) is stored:
            self._waiting.pop(key, None)

    async def _copy_there(self, record: Record) -> None:
        """Raises NotFound if the entry is gone, DataLoss if it is damaged here, OSError as the tier does."""
        first, batch = 0, list[bytes]()
        with self._store.pinned(record.key, record.checksum) as entry:
            async for frame in self._store.frames(entry):
                batch.append(bytes(frame))
                if len(batch) == _BATCH:
                    await self._call(self._tier.write, record, first, batch)
                    first, batch = first + len(batch), []
        if batch:
            await self._call(self._tier.write, record, first, batch)
        await self._call(self._tier.commit, record)
        self._store.counters.add("remote.writes")
        if self._store.residents.get(record.key) is None:  # deleted meanwhile
            await self._call(self._tier.delete, [record])

    async def _keep_alive(self) -> None:
        """Renews entries used here in the remote tier, and schedules the write-back of missing ones."""
        while self._used:
            keys = list(islice(self._used, _TOUCH_BATCH))
            entries = [entry for key in keys if (entry := self._store.residents.get(key)) is not None]
            try:
                there = await self._call(self._tier.touch, [entry.record for entry in entries])
            except OSError as error:
                self._failed(error)
                return
            for key in keys:
                self._used.pop(key, None)
            for entry, known in zip(entries, there, strict=True):
                if known:
                    self._confirm(entry.record.key)
                else:
                    self.stored(entry.record)

    def _confirm(self, key: bytes) -> None:
        _renew(self._confirmed, key, time.monotonic(), _MAX_ENTRIES)

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(self._lookup_seconds):
                await self._look_up(self._tier.engine.probe)
        except OSError:
            return
        log.info("the remote tier is reachable")
        # It may have been restarted empty.
        self._confirmed.clear()
        self.reachable = True

    def _failed(self, error: OSError) -> None:
        """Stops use of the remote tier until `run` finds it reachable."""
        self._store.counters.add("remote.failures")
        if self.reachable:
            _faults.warning("the remote tier is unreachable, only this service's own entries are found", error)
        self.reachable = False

    def _call(self, function: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _look_up(self, function: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._lookups, function, *args)


def _renew(entries: dict[bytes, T], key: bytes, value: T, limit: int) -> None:
    """Sets an item as the newest one, and drops the oldest above a limit."""
    entries.pop(key, None)
    entries[key] = value
    while len(entries) > limit:
        del entries[next(iter(entries))]
