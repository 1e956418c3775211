"""The store: lookups, leases, heat, eviction, deletion, and I/O threads."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.index import heat
from fusionkv.kvcache_service.index.record import EntryRecord, HitKind
from fusionkv.kvcache_service.keys import entry_key
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.store.entries import Leases, StoredEntry
from fusionkv.kvcache_service.store.reading import Reader
from fusionkv.kvcache_service.store.recovery import Recovery
from fusionkv.kvcache_service.store.residents import Residents
from fusionkv.kvcache_service.tiers.base import Tier
from fusionkv.protos.runtime.cancellation import background
from fusionkv.protos.runtime.errors import ResourceExhausted, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

_IO_THREADS = 8
_SWEEP_SECONDS = 1.0
# Entries deleted per batch: about 5 ms on the event loop.
_DELETE_BATCH = 1024
# Maximum wait of a Put or Delete for the index, in which a few hundred thousand entries are loaded.
_OPEN_SECONDS = 10.0
# Limit of plausible heat above that of the clock: log2 of accesses. Above it, the clock was ahead.
_MAX_LOG_ACCESSES = 40.0
# Interval in which heat is saved: kill -9 loses the accesses since, but no entries.
_SAVE_HEAT_SECONDS = 10.0


class Store:
    """All entries of one process. Methods must be called on one event loop; blocking work runs in threads.

    `reader` reads entries, and `writing.reserve` begins to write one.

    `clock` (monotonic seconds) determines leases and heat. Since heat persists, it is based on `wall` (seconds since
    the epoch), which is read only at start: later changes of the system clock have no effect on heat. If `wall` is
    far behind persisted heat, time continues from the hottest entry.
    """

    def __init__(
        self,
        config: Config,
        tiers: Sequence[Tier],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.counters = Counters()
        self.residents = Residents(tiers, self.counters, config.tenant_share)
        self.entries = self.residents.entries
        # In-progress commits by group (index.py).
        self.committing: dict[bytes, asyncio.Event] = {}
        self.reader = Reader(self.residents, self.counters, self.in_thread, self.delete_damaged)
        self.leases = Leases(config.max_leases, clock, self.residents.reclaim)
        self._clock, self._wall = clock, wall
        self._epoch = wall() - clock()
        self.threads = ThreadPoolExecutor(_IO_THREADS, "kvcache-io")
        self.tasks: set[asyncio.Task[Any]] = set()
        self.demand = heat.FrequencySketch()
        self.ready = asyncio.Event()
        self.ready.set()
        # Called for every stored entry that is no copy, and for every access to an existing one by Lookup or Put.
        self.on_stored: Callable[[EntryRecord], None] = lambda record: None
        self.on_used: Callable[[bytes], None] = lambda key: None

    @property
    def now(self) -> float:
        """Seconds since the epoch, by `clock`."""
        return self._epoch + self._clock()

    async def open(self) -> None:
        """Loads the index of the home tier, in about 20 s per million entries.

        Meanwhile, lookups find entries by key on the disk, and reads work. Changes of the home tier wait
        (`wait_until_open`). Raises OSError if the home tier cannot be used; nothing of it was changed then.
        """
        home = self.residents.home
        self.ready.clear()
        await Recovery(self.residents).run(self.in_thread)
        self.ready.set()
        hottest, half_life = max(self.entries.index.rows.heats, default=0.0), self.config.half_life_seconds
        if hottest > self._wall() / half_life + _MAX_LOG_ACCESSES:
            self._epoch = hottest * half_life - self._clock()
        log.info("%d entries, %d bytes in the %s tier", len(self.entries), home.used_bytes, home.name)

    async def wait_until_open(self) -> None:
        """Waits until `open` has ended. Before, it is unknown which space of the home tier is free.

        Raises Unavailable if `open` has not ended after 10 s.
        """
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await self.ready.wait()
        except TimeoutError:
            raise Unavailable(
                "the index is being loaded; until then nothing is stored or deleted: try again"
            ) from None

    async def sweep(self) -> None:
        """Expires leases, evicts above the watermark and saves heat, until cancelled."""
        saved = time.monotonic()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                self.leases.expire()
                await self.evict_to_watermark()
                if time.monotonic() - saved >= _SAVE_HEAT_SECONDS:
                    saved = time.monotonic()
                    await self.save_heat()
            except Exception:
                log.exception("the sweep failed and is repeated")

    async def evict_to_watermark(self) -> None:
        """Evicts the coldest entries of the home tier from the high watermark down to the low one.

        A Put that must evict waits for the deletion of index records, and a batch of a thousand deletions costs as
        much as ten single ones. Faster tiers need no watermark: dropping a copy writes nothing.
        """
        home = self.residents.home
        if home.used_bytes <= self.config.high_watermark * home.capacity_bytes:
            return
        limit = int(self.config.low_watermark * home.capacity_bytes)
        while entries := self.residents.eviction_candidates(home, limit, _DELETE_BATCH):
            try:
                await self.to_the_end(self.withdraw(entries))
            except OSError as error:
                log.warning("can't record the eviction of %d entries: %s", len(entries), error)
                return
            self.counters.add("evictions", len(entries), tier=home.name)

    def lookup(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]], lease_seconds: float
    ) -> tuple[list[tuple[HitKind, StoredEntry | None]], int]:
        """Finds and leases the best entry for each element of a path, and increases their heat.

        Exact paths behind at least one other chunk are counted, for `writing.reserve`. Raises ResourceExhausted at
        the limit of active leases.

        Returns:
            Kind of hit and entry for each element, and the lease: 0 if nothing was found.
        """
        hits = self.entries.lookup(namespace, path, variants)
        lease = self._lease([entry for _, entry, _ in hits], lease_seconds)
        for _, _, key in hits[2:]:
            self.demand.add(key)
        return [(kind, entry) for kind, entry, _ in hits], lease

    def find(
        self, namespace: bytes, digests: Sequence[bytes], lease_seconds: float
    ) -> tuple[list[tuple[HitKind, StoredEntry | None]], int]:
        """As `lookup`, for entries with a path of one digest each."""
        entries = [self.entries.get(entry_key(namespace, [digest])) for digest in digests]
        lease = self._lease(entries, lease_seconds)
        return [(HitKind.MISS if entry is None else HitKind.EXACT, entry) for entry in entries], lease

    def _lease(self, hits: Iterable[StoredEntry | None], seconds: float) -> int:
        """Leases entries, and increases their heat; returns the lease, 0 without entries."""
        entries = dict.fromkeys(entry for entry in hits if entry is not None)
        lease = self.leases.grant(entries, seconds) if entries else 0
        for entry in entries:
            self.residents.use(entry, heat.after_access(entry.heat, self.now, self.config.half_life_seconds))
            self.on_used(entry.record.key)
        return lease

    def check_integrity(self, idle: bool = False) -> None:
        """Checks that index, entries, tiers and leases agree. No thread may be working on the store.

        idle: no call is in progress, so nothing is reserved or pinned.

        Raises:
            AssertionError: a check failed.
        """
        self.residents.check_integrity(idle)
        self.leases.check_integrity([*self.entries, *self.entries.withdrawn])
        assert not self.committing

    def withdraw(self, entries: Sequence[StoredEntry]) -> Coroutine[Any, Any, None]:
        """Deletes visible entries. They become invisible at once, before the result is awaited.

        Otherwise they could be leased, or deleted by another call, in between. Places are freed after the index
        records are deleted.

        Raises OSError if the deletion cannot be recorded; the entries reappear at the next start then.
        """
        for entry in entries:
            entry.pins += 1
            self.residents.withdraw(entry)
        return self._forget(entries)

    async def _forget(self, entries: Sequence[StoredEntry]) -> None:
        home = self.residents.home
        try:
            if entries:
                await self.in_thread(home.forget, [(e.record.key, e.places[home.name]) for e in entries])
        finally:
            for entry in entries:
                entry.pins -= 1
                self.residents.reclaim(entry)

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes entries persistently, and returns their number.

        Raises ResourceExhausted if the deletion cannot be recorded; the entries reappear at the next start then.
        Raises Unavailable while the index is being loaded.
        """
        await self.wait_until_open()
        deleted, names = 0, list(dict.fromkeys(keys))
        for at in range(0, len(names), _DELETE_BATCH):
            batch = names[at : at + _DELETE_BATCH]
            entries = [entry for key in batch if (entry := self.entries.get(key)) is not None]
            try:
                await self.to_the_end(self.withdraw(entries))
            except OSError as error:
                raise ResourceExhausted(f"can't record the deletion: {error}") from error
            deleted += len(entries)
        return deleted

    async def delete_damaged(self, entry: StoredEntry) -> None:
        """Deletes a damaged entry; never raises."""
        with contextlib.suppress(OSError, Unavailable):  # the next read tries again
            await self.wait_until_open()
            if entry.visible:
                await self.to_the_end(self.withdraw([entry]))

    def in_thread(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.threads, function, *args)

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Completes `work` in the background even if the caller is cancelled, who no longer waits; `close` does."""
        return await asyncio.shield(background(self.tasks, work))

    async def save_heat(self) -> None:
        touched, self.residents.touched = self.residents.touched, set()
        rows = self.entries.index.rows
        heats = [(rows.key(row), rows.heats[row]) for row in touched if row in rows]
        if heats:
            try:
                await self.in_thread(self.residents.home.save_heat, heats)
            except OSError as error:
                log.warning("can't save the heat of %d entries: %s", len(heats), error)

    async def close(self) -> None:
        """Cancels prefetching, waits for work in progress, saves heat, and closes the tiers."""
        self.reader.cancel_prefetching()
        while pending := [*self.tasks, *self.reader.pending]:
            await asyncio.gather(*pending, return_exceptions=True)
        await self.save_heat()
        self.threads.shutdown(wait=True)
        for tier in self.residents.tiers:
            tier.close()
