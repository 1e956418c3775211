"""A store's use of the remote tier: entries found there, copied here when they are read, and written back there."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from fusionkv.kvcache_service.hits import HitKind
from fusionkv.kvcache_service.index.ranker import HitRanker
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.remote.tier import RemoteTier, blocks_of
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import DataLoss, InvalidArgument, ServiceError, Unavailable

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)
T = TypeVar("T")
Found = Sequence[tuple[HitKind, StoredEntry | None]]

_THREADS = 8
# Blocks of one round trip, 8 MiB: at 1 GB/s the round trip itself is 1% of it.
_BATCH = 8
# Entries copied here at once, and entries written back at once: each has a batch in memory.
_PULLS, _WRITES = 4, 4
# Entries that wait to be written back or kept alive, and records that a Lookup found: the oldest are forgotten.
_MOST = 65_536
_MOST_FOUND = 16_384
# Entries that are looked for in the remote tier at a start: half a millisecond each.
_MOST_DOUBTFUL = 4096
_BEAT_SECONDS = 1.0
# An entry that is used here is kept alive there, and written anew if it is gone, this often.
_ALIVE_SECONDS = 60.0
_TOUCHED_AT_ONCE = 256


class Sharing:
    """Belongs to the store's event loop. A remote tier that fails is a miss to all, and is asked again by `run`.

    An entry that is put here is acknowledged first and written back afterwards. One that a Lookup finds there is
    copied here as if it were put, when it is fetched or a moment before.
    """

    def __init__(self, store: Store, tier: RemoteTier, *, lookup_seconds: float, ttl: float) -> None:
        """lookup_seconds: longest wait of a Lookup. ttl: seconds after which the tier forgets what nobody touches."""
        self._store = store
        self._tier = tier
        self._lookup_seconds = lookup_seconds
        self._alive_seconds = min(_ALIVE_SECONDS, ttl / 4)
        self._threads = ThreadPoolExecutor(_THREADS, "kvcache-remote")
        self._turns = asyncio.Semaphore(_PULLS)
        self._found: dict[bytes, Record] = {}
        self._pulls: dict[bytes, asyncio.Task[bool]] = {}
        self._waiting: dict[bytes, None] = {}
        self._used: dict[bytes, None] = {}
        self._confirmed: dict[bytes, float] = {}
        """When an entry was last known to be in the remote tier."""
        self._wake = asyncio.Event()
        self._kept_alive = time.monotonic()
        self.reachable = True
        store.watcher = self

    @property
    def waiting(self) -> int:
        """Entries that are not written back yet."""
        return len(self._waiting)

    def stats(self) -> pb.RemoteStats:
        counters = self._store.counters
        return pb.RemoteStats(
            reachable=self.reachable,
            waiting=self.waiting,
            written=counters.get("remote.writes"),
            read=counters.get("remote.reads"),
        )

    async def find(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]], found: Found
    ) -> dict[int, tuple[HitKind, Record]]:
        """Entries of the remote tier that are better than what was `found` here, by the number of their element.

        They are copied here from now on, as far as that keeps nobody waiting. Empty while the tier is out of reach,
        and while the store is loading, which takes no copies then.
        """
        wanted = [i for i, (kind, _) in enumerate(found) if kind is not HitKind.EXACT]
        if not wanted or not self.reachable or not self._store.ready.is_set():
            return {}
        try:
            async with asyncio.timeout(self._lookup_seconds):
                offers = await self._call(self._tier.find, namespace, path, variants, wanted)
        except TimeoutError:
            self._failed(Unreachable(f"no answer within {self._lookup_seconds:g} s"))
            return {}
        except OSError as error:
            self._failed(error)
            return {}
        better = {}
        for i, offered in zip(wanted, offers, strict=True):
            own = found[i][1]
            ranker = HitRanker(namespace, path[: i + 1], variants[i])
            best = ranker.best(own.record if own is not None else None, offered)
            if best is not None:
                better[i] = ranker.kind(best), best
                self._found.pop(best.key, None)
                self._found[best.key] = best
        _cut(self._found, _MOST_FOUND)
        for kind, n in Counter(kind for kind, _ in better.values()).items():
            self._store.counters.add("lookups.remote", n, kind=kind.value)
        for _, record in better.values():
            if len(self._pulls) < _PULLS:
                self._pull(record)
        return better

    async def bring(self, key: bytes) -> bool:
        """Copies an entry here that a Lookup found in the remote tier; whether it is here then.

        Raises:
            ResourceExhausted: there is no room here.
        """
        pull = self._pulls.get(key)
        if pull is None:
            record = self._found.get(key)
            if record is None:
                return False
            pull = self._pull(record)
        return await asyncio.shield(pull)

    def stored(self, record: Record) -> None:
        """An entry was put here, and is to be written back."""
        self._waiting[record.key] = None
        _cut(self._waiting, _MOST)
        if self.reachable:
            self._wake.set()

    def used(self, key: bytes) -> None:
        """An entry that is here was looked up, or put again."""
        if self._confirmed.get(key, 0.0) + self._alive_seconds < time.monotonic() and len(self._used) < _MOST:
            self._used[key] = None

    async def known(self, keys: Sequence[bytes], namespace: bytes) -> list[Record]:
        """The records of those keys that are here, or were found in the remote tier of late.

        Nothing of these, or of the namespace, is being copied here any more.
        """
        named = set(keys)
        found = {key: record for key, record in self._found.items() if key in named or record.namespace == namespace}
        if pulls := [pull for key in found if (pull := self._pulls.get(key)) is not None]:
            await asyncio.wait(pulls)
        here = [(key, self._store.residents.get(key)) for key in keys]
        records = (found.get(key) if entry is None else entry.record for key, entry in here)
        return [record for record in records if record is not None]

    async def delete(self, entries: Sequence[Record], namespace: bytes) -> None:
        """Deletes entries from the remote tier, or all of a namespace.

        Raises:
            Unavailable: it can't be reached, or refuses.
        """
        for record in entries:
            self._found.pop(record.key, None)
        try:
            if namespace:
                self._found = {key: record for key, record in self._found.items() if record.namespace != namespace}
                await self._call(self._tier.delete_all, namespace)
            else:
                await self._call(self._tier.delete, entries)
        except OSError as error:
            raise Unavailable(f"can't delete in the remote tier: {error}") from error

    async def run(self) -> None:
        """Writes back what is put, keeps alive what is used, looks whether a lost tier is back; until cancelled."""
        # Those that were put last before a kill -9 may be here alone.
        self._waiting.update(dict.fromkeys(self._store.residents.warmest(_MOST_DOUBTFUL)))
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
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
        """Waits until all that was put here is written back, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._waiting and self.reachable:  # noqa: ASYNC110 - `run` writes
                    await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Ends what is under way. `run` has been cancelled."""
        pulls = list(self._pulls.values())
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._tier.close()

    def _pull(self, record: Record) -> "asyncio.Task[bool]":
        task = self._pulls.get(record.key)
        if task is None:
            task = self._pulls[record.key] = asyncio.create_task(self._in_turn(record))

            def ended(done: "asyncio.Task[bool]") -> None:
                del self._pulls[record.key]
                if not done.cancelled():
                    done.exception()  # whoever waits is told

            task.add_done_callback(ended)
        return task

    async def _in_turn(self, record: Record) -> bool:
        async with self._turns:
            here = await self._copy_here(record)
        self._found.pop(record.key, None)
        return here

    async def _copy_here(self, record: Record) -> bool:
        writer = self._store.copy(record)
        if writer is None:
            return True
        try:
            for first in range(0, blocks_of(record), _BATCH):
                for block in await self._call(self._tier.read, record, first, _BATCH):
                    await writer.write(memoryview(block))
            await writer.commit()
        except (DataLoss, InvalidArgument, FileNotFoundError) as error:
            if not isinstance(error, FileNotFoundError):
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
        entry = self._store.residents.get(key)
        try:
            if entry is not None and not (await self._call(self._tier.touch, [entry.record]))[0]:
                await self._copy_there(entry.record)
        except Unreachable as error:
            self._failed(error)
            return  # it waits
        except (OSError, ServiceError) as error:
            # Damaged here, or refused there; what is used again is tried again.
            self._store.counters.add("remote.failures")
            _faults.warning(f"entry {key.hex()} is not written to the remote tier", error)
        else:
            self._confirm(key)
        self._waiting.pop(key, None)

    async def _copy_there(self, record: Record) -> None:
        """Raises NotFound if it is not here any more, DataLoss if it is damaged here, OSError as the tier does."""
        first, batch = 0, list[bytes]()
        with contextlib.closing(self._store.read(record.key)) as reader:
            async for frame in reader.frames():
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
        """Entries that were used here begin their time in the remote tier anew; those that it lost are written."""
        while self._used:
            keys = list(islice(self._used, _TOUCHED_AT_ONCE))
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
        self._confirmed.pop(key, None)
        self._confirmed[key] = time.monotonic()
        _cut(self._confirmed, _MOST)

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(self._lookup_seconds):
                await self._call(self._tier.probe)
        except OSError:
            return
        log.info("the remote tier answers")
        # It may be back empty.
        self._confirmed.clear()
        self.reachable = True

    def _failed(self, error: OSError) -> None:
        """Nobody asks until `run` has got an answer."""
        self._store.counters.add("remote.failures")
        if self.reachable:
            _faults.warning("the remote tier is out of reach, only this service's own entries are found", error)
        self.reachable = False

    def _call(self, function: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _cut(waiting: dict[bytes, Any], most: int) -> None:
    """Forgets what came first."""
    while len(waiting) > most:
        del waiting[next(iter(waiting))]
