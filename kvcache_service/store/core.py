"""What reading and writing an entry need of the store: entries, leases, heat, eviction, threads."""

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
# Entries deleted at once: about 5 ms on the event loop.
_DELETE_BATCH = 1024
# The longest wait of a Put or Delete. An index of a few hundred thousand entries is loaded by then.
_OPEN_SECONDS = 10.0
# Entries that a thread reads at once at a start, and those made visible at once: about 0.3 ms on the event loop.
_LOAD_BATCH, _LOAD_SLICE = 512, 32
# As a logarithm: what is hotter was not asked for so often, but by a clock that was ahead.
_MOST_ACCESSES = 40.0
# Heat is saved this often: after a kill -9 the accesses of the last seconds are forgotten, the entries are not.
_SAVE_HEAT_SECONDS = 10.0


class Watcher(Protocol):
    """Learns of every entry that is put, and of every entry that is there and looked up, or put again."""

    def stored(self, record: Record) -> None: ...

    def used(self, key: bytes) -> None: ...


class StoreCore:
    """All entries of one process. Its methods belong to one event loop; blocking work goes to its threads.

    `clock` is monotonic seconds and rules leases and heat. Heat is kept over restarts, so `wall`, seconds since the
    epoch, is asked at the start alone: a clock that is set later makes no entry hot or cold. If it is far behind what
    is stored, time goes on from there.
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
        # By group (index.py).
        self.committing: dict[bytes, asyncio.Event] = {}
        self.loading: dict[StoredEntry, asyncio.Task[bool]] = {}
        self.leases: Leases[StoredEntry] = Leases(config.max_leases, clock, self.residents.let_go)
        self._clock, self._wall = clock, wall
        self._epoch = wall() - clock()
        self.threads = ThreadPoolExecutor(_IO_THREADS, "kvcache-io")
        self.tasks: set[asyncio.Task[Any]] = set()
        self._touched: set[int] = set()  # rows whose heat is not saved
        self.demand = FrequencySketch()
        self.ready = asyncio.Event()
        self.ready.set()
        self.watcher: Watcher | None = None

    @property
    def now(self) -> float:
        """Seconds since the epoch, by the clock that rules heat."""
        return self._epoch + self._clock()

    async def open(self) -> None:
        """Makes visible what the home tier has from before: 20 s per million entries.

        Lookups and reads work meanwhile: entries are found by key. What changes the home tier waits (`opened`).

        Raises:
            OSError: the home tier can't be used; nothing of it was changed.
        """
        home = self.residents.home
        self.ready.clear()
        self.residents.begin_recovery()
        found, batch = home.recover(), list[Recovered]()
        while batch := await self.in_thread(list, islice(found, _LOAD_BATCH)):
            for at in range(0, len(batch), _LOAD_SLICE):
                self.residents.recover(batch[at : at + _LOAD_SLICE])
                await asyncio.sleep(0)  # for calls, each of which takes several rounds of the event loop
        self.residents.end_recovery()
        self.ready.set()
        hottest, half_life = self.residents.hottest(), self.config.half_life_seconds
        if hottest > self._wall() / half_life + _MOST_ACCESSES:
            self._epoch = hottest * half_life - self._clock()
        log.info("%d entries, %d bytes in the %s tier", len(self.residents), home.used_bytes, home.name)

    async def opened(self) -> None:
        """Waits until `open` has ended: before, it is not known which space of the home tier is free.

        Raises:
            Unavailable: that takes longer than 10 s.
        """
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await self.ready.wait()
        except TimeoutError:
            raise Unavailable(
                "the index is being loaded; until then nothing is stored or deleted: try again"
            ) from None

    async def sweep(self) -> None:
        """Ends leases whose time is over, makes room and saves heat, until it is cancelled."""
        saved = time.monotonic()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.leases.expire()
            await self.make_room()
            if time.monotonic() - saved >= _SAVE_HEAT_SECONDS:
                await self.save_heat()
                saved = time.monotonic()

    async def make_room(self) -> None:
        """Evicts the coldest entries when the home tier is over its high watermark, down to the low one.

        A Put that has to evict waits until that is recorded; one that finds room does not, and a thousand evictions
        recorded together cost what ten do alone. A faster tier needs none of this: a copy is dropped at once.
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
        """Finds the entries of a path, leases those found and makes them hotter; the lease is 0 when none was.

        It notes which exact paths are asked for, behind at least one other chunk (`wanted`).

        Raises:
            ResourceExhausted: as many leases are out as allowed.
        """
        found = self.residents.find(namespace, path, variants)
        entries = dict.fromkeys(entry for _, entry, _ in found if entry is not None)
        lease = self.leases.grant(entries, lease_seconds) if entries else 0
        for entry in entries:
            self.touch(entry)
        for _, _, key in found[2:]:
            self.demand.ask(key)
        return [(kind, entry) for kind, entry, _ in found], lease

    def touch(self, entry: StoredEntry) -> None:
        """Counts an access to a visible entry."""
        self.residents.warm(entry, heat.again(entry.heat, self.now, self.config.half_life_seconds))
        if entry.row is not None:
            self._touched.add(entry.row)
        self.used(entry.record.key)

    def used(self, key: bytes) -> None:
        if self.watcher is not None:
            self.watcher.used(key)

    def wanted(self, record: Record) -> bool:
        """Whether an entry is kept: one replica of a chunk serves every path, unless there is a reason for a second.

        What was encoded on purpose always is. What a request happened to compute is kept if it is the chunk's first
        entry, if it has fewer chunks before it than every other one (it carries less of theirs, so it serves other
        paths better), or if its own path was asked for before the request that computed it, since there it is
        lossless.
        """
        if not record.offered or record.depth == 1 or record.variant:
            return True
        others = self.residents.replicas(record)
        return all(record.depth < other.record.depth for other in others) or self.demand.count(record.key) > 1

    def replaced_by(self, entry: StoredEntry) -> list[StoredEntry]:
        """What goes when an entry is published: worse replicas, if they were offered and nobody asks for their path.

        Worse is one with more chunks before it. What was encoded on purpose never goes this way.
        """
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
        """The coldest versions, above what their variant allows once `entry`, one of them, is published."""
        most = VERSIONS.get(entry.record.variant)
        if most is None:
            return []
        others = sorted(self.residents.replicas(entry.record), key=lambda other: other.heat, reverse=True)
        return others[most - 1 :]

    async def withdraw(self, entries: Sequence[StoredEntry]) -> None:
        """Deletes entries: invisible at once, the places free only after the home tier has forgotten who was there.

        Raises:
            OSError: it can't be recorded; they are gone until the next start.
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
        """Deletes entries, also from what survives a restart, before it returns; gives how many there were.

        Raises:
            ResourceExhausted: it can't be recorded; they are gone until the next start.
            Unavailable: as `opened`.
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
        with contextlib.suppress(OSError, Unavailable):  # then the next read tries again
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
        """Asserts that index, entries, tiers and leases agree; nothing may be under way in a thread."""
        self.residents.check_integrity()
        self.leases.check_integrity(self.residents.all())
        assert not self.committing
