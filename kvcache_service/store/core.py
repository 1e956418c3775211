"""The base of the store: lookups, leases, heat, eviction, deletion, and I/O threads."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol, TypeVar

from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.hits import HitKind
from fusionkv.kvcache_service.index import heat
from fusionkv.kvcache_service.index.frequency_sketch import FrequencySketch
from fusionkv.kvcache_service.index.leases import Leases
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.keys import VERSIONS
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.store.entries import Residents, StoredEntry
from fusionkv.kvcache_service.tiers.base import Recovered, Tier
from fusionkv.protos.runtime.errors import ResourceExhausted, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

_IO_THREADS = 8
_SWEEP_SECONDS = 1.0
# Entries deleted per batch: about 5 ms on the event loop.
_DELETE_BATCH = 1024
# Maximum wait of a Put or Delete for the index, in which a few hundred thousand entries are loaded.
_OPEN_SECONDS = 10.0
# Entries that a thread reads per batch at start, and that become visible per slice: 0.3 ms on the event loop.
_LOAD_BATCH, _LOAD_SLICE = 512, 32
# Limit of plausible heat above that of the clock: log2 of accesses. Above it, the clock was ahead.
_MAX_LOG_ACCESSES = 40.0
# Interval in which heat is saved: kill -9 loses the accesses since, but no entries.
_SAVE_HEAT_SECONDS = 10.0


class Watcher(Protocol):
    """Observes every stored entry, and every access to an existing one by Lookup or Put."""

    def stored(self, record: Record) -> None: ...

    def used(self, key: bytes) -> None: ...


class StoreCore:
    """All entries of one process. Methods must be called on one event loop; blocking work runs in threads.

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
        self.residents = Residents(tiers, self.counters)
        # In-progress commits by group (index.py).
        self.committing: dict[bytes, asyncio.Event] = {}
        self.loading: dict[StoredEntry, asyncio.Task[bool]] = {}
        self.leases: Leases[StoredEntry] = Leases(config.max_leases, clock, self.residents.let_go)
        self._clock, self._wall = clock, wall
        self._epoch = wall() - clock()
        self.threads = ThreadPoolExecutor(_IO_THREADS, "kvcache-io")
        self.tasks: set[asyncio.Task[Any]] = set()
        self._touched: set[int] = set()  # rows whose heat is to be saved
        self.demand = FrequencySketch()
        self.ready = asyncio.Event()
        self.ready.set()
        self.watcher: Watcher | None = None

    @property
    def now(self) -> float:
        """Seconds since the epoch, by `clock`."""
        return self._epoch + self._clock()

    async def open(self) -> None:
        """Loads the index of the home tier, in about 20 s per million entries.

        Meanwhile, lookups find entries by key on the disk, and reads work. Changes of the home tier wait (`opened`).

        Raises:
            OSError: The home tier cannot be used. Nothing of it was changed.
        """
        home = self.residents.home
        self.ready.clear()
        self.residents.begin_recovery()
        entries, batch = home.recover(), list[Recovered]()
        while batch := await self.in_thread(list, islice(entries, _LOAD_BATCH)):
            for at in range(0, len(batch), _LOAD_SLICE):
                self.residents.recover(batch[at : at + _LOAD_SLICE])
                await asyncio.sleep(0)  # serves calls, each of which takes several rounds of the event loop
        self.residents.end_recovery()
        self.ready.set()
        hottest, half_life = self.residents.hottest(), self.config.half_life_seconds
        if hottest > self._wall() / half_life + _MAX_LOG_ACCESSES:
            self._epoch = hottest * half_life - self._clock()
        log.info("%d entries, %d bytes in the %s tier", len(self.residents), home.used_bytes, home.name)

    async def opened(self) -> None:
        """Waits until `open` has ended. Before, it is unknown which space of the home tier is free.

        Raises:
            Unavailable: `open` has not ended after 10 s.
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
            self.leases.expire()
            await self.make_room()
            if time.monotonic() - saved >= _SAVE_HEAT_SECONDS:
                await self.save_heat()
                saved = time.monotonic()

    async def make_room(self) -> None:
        """Evicts the coldest entries of the home tier from the high watermark down to the low one.

        A Put that must evict waits for the deletion of index records, and a batch of a thousand deletions costs as
        much as ten single ones. Faster tiers need no watermark: dropping a copy writes nothing.
        """
        home = self.residents.home
        if home.used_bytes <= self.config.high_watermark * home.capacity_bytes:
            return
        limit = int(self.config.low_watermark * home.capacity_bytes)
        while entries := self.residents.surplus(home, limit, _DELETE_BATCH):
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

        Exact paths behind at least one other chunk are counted, for `wanted`.

        Returns:
            Kind of hit and entry for each element, and the lease: 0 if nothing was found.

        Raises:
            ResourceExhausted: The limit of active leases is reached.
        """
        hits = self.residents.find(namespace, path, variants)
        entries = dict.fromkeys(entry for _, entry, _ in hits if entry is not None)
        lease = self.leases.grant(entries, lease_seconds) if entries else 0
        for entry in entries:
            self.touch(entry)
        for _, _, key in hits[2:]:
            self.demand.add(key)
        return [(kind, entry) for kind, entry, _ in hits], lease

    def touch(self, entry: StoredEntry) -> None:
        """Records an access to a visible entry."""
        self.residents.warm(entry, heat.again(entry.heat, self.now, self.config.half_life_seconds))
        if entry.row is not None:
            self._touched.add(entry.row)
        self.used(entry.record.key)

    def used(self, key: bytes) -> None:
        if self.watcher is not None:
            self.watcher.used(key)

    def wanted(self, record: Record) -> bool:
        """Whether to store an entry. One replica of a chunk serves every path, so others need a reason.

        Precomputed entries are always stored. An offered entry is stored if it is the first of its chunk, if it has
        fewer preceding chunks than all others (it depends on fewer, so it serves other paths better), or if its exact
        path was looked up before the request that computed it, since it is lossless there.
        """
        if not record.offered or record.depth == 1 or record.variant:
            return True
        others = self.residents.replicas(record)
        return all(record.depth < other.record.depth for other in others) or self.demand.count(record.key) > 1

    def replaced_by(self, entry: StoredEntry) -> list[StoredEntry]:
        """Replicas to delete on publication: offered, deeper, and without recent lookups of their exact path."""
        if entry.record.depth == 1 or entry.record.variant:
            return []
        return [
            other
            for other in self.residents.replicas(entry.record)
            if other.record.offered
            and other.record.depth > entry.record.depth
            and self.demand.count(other.record.key) <= 1
        ]

    def crowded_out(self, entry: StoredEntry) -> list[StoredEntry]:
        """The coldest versions beyond the limit of their variant, once `entry` is published as one of them."""
        limit = VERSIONS.get(entry.record.variant)
        if limit is None:
            return []
        others = sorted(self.residents.replicas(entry.record), key=lambda other: other.heat, reverse=True)
        return others[limit - 1 :]

    async def withdraw(self, entries: Sequence[StoredEntry]) -> None:
        """Deletes entries. They become invisible at once; places are freed after their index records are deleted.

        Raises:
            OSError: The deletion cannot be recorded. The entries reappear at the next start.
        """
        home = self.residents.home
        for entry in entries:
            entry.pins += 1
            self.residents.withdraw(entry)
        try:
            if entries:
                await self.in_thread(home.forget, [(e.record.key, e.places[home.name]) for e in entries])
        finally:
            for entry in entries:
                entry.pins -= 1
                self.residents.let_go(entry)

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes entries persistently, and returns their number.

        Raises:
            ResourceExhausted: The deletion cannot be recorded. The entries reappear at the next start.
            Unavailable: The index is being loaded.
        """
        await self.opened()
        deleted, names = 0, list(dict.fromkeys(keys))
        for at in range(0, len(names), _DELETE_BATCH):
            batch = names[at : at + _DELETE_BATCH]
            entries = [entry for key in batch if (entry := self.residents.get(key)) is not None]
            try:
                await self.to_the_end(self.withdraw(entries))
            except OSError as error:
                raise ResourceExhausted(f"can't record the deletion: {error}") from error
            deleted += len(entries)
        return deleted

    async def drop(self, entry: StoredEntry) -> None:
        """Deletes a damaged entry; never raises."""
        with contextlib.suppress(OSError, Unavailable):  # the next read tries again
            await self.opened()
            if entry.visible:
                await self.to_the_end(self.withdraw([entry]))

    def in_thread(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.threads, function, *args)

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return await asyncio.shield(task)

    async def save_heat(self) -> None:
        touched, self._touched = self._touched, set()
        heats = [saved for row in touched if (saved := self.residents.saved(row)) is not None]
        if heats:
            try:
                await self.in_thread(self.residents.home.save_heat, heats)
            except OSError as error:
                log.warning("can't save the heat of %d entries: %s", len(heats), error)

    def check_integrity(self) -> None:
        """Asserts that index, entries, tiers and leases agree. No thread may be working."""
        self.residents.check_integrity()
        self.leases.check_integrity(self.residents.all())
        assert not self.committing
