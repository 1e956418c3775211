"""The store: lookups, leases and deletion, with all that it consists of."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any

from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.index.heat import FrequencySketch
from fusionkv.kvcache_service.index.record import HitKind
from fusionkv.kvcache_service.keys import entry_key
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.store.entries import Leases, StoredEntry
from fusionkv.kvcache_service.store.heats import Heats
from fusionkv.kvcache_service.store.reading import Reader
from fusionkv.kvcache_service.store.residents import Residents
from fusionkv.kvcache_service.store.work import Work
from fusionkv.kvcache_service.tiers.base import Place, Recovered, Tier
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import ResourceExhausted, Unavailable

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)

# Entries deleted per batch: about 5 ms on the event loop.
DELETE_BATCH = 1024
# Entries that a thread reads per batch, and that become visible per slice: 0.3 ms on the event loop.
_RECOVERY_BATCH, _RECOVERY_SLICE = 512, 32
# Maximum wait of a Put or Delete for the index, in which a few hundred thousand entries are loaded.
_OPEN_SECONDS = 10.0


class Store:
    """All entries of one process. Methods must be called on one event loop; blocking work runs in threads.

    `reader` reads entries, `writing.reserve` begins to write one, and `upkeep.sweep` runs beside.
    """

    def __init__(
        self,
        config: Config,
        tiers: Sequence[Tier],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """clock: monotonic seconds, for leases and heat. wall: seconds since the epoch, for heat."""
        self.config = config
        self.counters = Counters()
        self.work = Work()
        self.residents = Residents(tiers, self.counters, config.tenant_share)
        self.entries = self.residents.entries
        # In-progress commits by group (index.py).
        self.committing: dict[bytes, asyncio.Event] = {}
        # Deleted entries that the home tier still records, each with a pin.
        self._forgotten: dict[StoredEntry, None] = {}
        # Places of evicted entries that the home tier still records, by key.
        self.evicted: dict[bytes, Place] = {}
        self._recording = asyncio.Lock()
        self.reader = Reader(self.residents, self.counters, self.work.in_thread, self.delete_damaged)
        self.leases = Leases(config.max_leases, clock, self.residents.reclaim)
        self.heats = Heats(self.residents, config.half_life_seconds, clock, wall)
        self.demand = FrequencySketch()
        self.ready = asyncio.Event()
        self.ready.set()
        # Called with the key of every stored entry that is no copy, and of one that a Lookup or a Put finds.
        self.on_stored: Callable[[bytes], None] = lambda key: None
        self.on_used: Callable[[bytes], None] = lambda key: None

    async def open(self) -> None:
        """Loads the index of the home tier, in about 20 s per million entries.

        Meanwhile, lookups find what is loaded, and changes of the home tier wait (`wait_until_open`). Raises OSError
        if the home tier cannot be used; nothing of it was changed then.
        """
        home = self.residents.home
        self.ready.clear()
        entries, batch = home.recover(), list[Recovered]()
        while batch := await self.work.in_thread(list, islice(entries, _RECOVERY_BATCH)):
            for at in range(0, len(batch), _RECOVERY_SLICE):
                self.residents.recover(batch[at : at + _RECOVERY_SLICE])
                await asyncio.sleep(0)  # serves calls, each of which takes several rounds of the event loop
        self.ready.set()
        self.heats.recovered()
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

    def lookup(
        self, namespace: bytes, path: Sequence[bytes], variants: Sequence[Sequence[bytes]], lease_seconds: float
    ) -> tuple[list[tuple[HitKind, StoredEntry | None]], int]:
        """Finds and leases the best entry for each element of a path, and increases their heat.

        Returns the kind of hit and the entry for each element, and the lease: 0 if nothing was found. Exact paths
        behind at least one other chunk are counted, for `writing.reserve`. Raises ResourceExhausted at the limit of
        active leases.
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
            self.heats.use(entry)
            self.on_used(entry.record.key)
        return lease

    def check_integrity(self, idle: bool = False) -> None:
        """Raises AssertionError unless index, entries, tiers and leases agree. No thread may work on the store.

        idle: no call is in progress, so nothing is reserved or pinned.
        """
        self.residents.check_integrity(idle)
        self.leases.check_integrity([*self.entries, *self.entries.withdrawn])
        assert not self.committing

    def withdraw(self, entries: Sequence[StoredEntry]) -> Coroutine[Any, Any, None]:
        """Deletes visible entries. They become invisible at once, before the result is awaited.

        Otherwise they could be leased, or deleted by another call, in between. Places are freed after the index
        records are deleted.

        Raises OSError as `forget`.
        """
        for entry in entries:
            entry.pins += 1
            self.residents.withdraw(entry)
            self._forgotten[entry] = None
        return self.forget()

    async def forget(self) -> None:
        """Deletes the home tier's records of entries that were withdrawn or evicted. To be run to the end.

        Raises OSError if that fails. Each later call tries again; until one succeeds, they would reappear at a start.
        """
        home = self.residents.home
        async with self._recording:
            deleted, evicted = [*self._forgotten], dict(self.evicted)
            places = [(entry.record.key, entry.places[home.name]) for entry in deleted]
            if places or evicted:
                await self.work.in_thread(home.forget, [*places, *evicted.items()])
            for key, place in evicted.items():
                if self.evicted[key] == place:  # and not evicted once more
                    del self.evicted[key]
            for entry in deleted:
                del self._forgotten[entry]
                entry.pins -= 1
                self.residents.reclaim(entry)

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes entries persistently, and returns their number.

        Raises ResourceExhausted if the deletion, or an earlier one, cannot be recorded, as `withdraw` does.
        Raises Unavailable while the index is being loaded.
        """
        await self.wait_until_open()
        deleted, names = 0, list(dict.fromkeys(keys))
        for at in range(0, max(1, len(names)), DELETE_BATCH):
            batch = names[at : at + DELETE_BATCH]
            entries = [entry for key in batch if (entry := self.entries.get(key)) is not None]
            try:
                await self.work.to_the_end(self.withdraw(entries))
            except OSError as error:
                raise ResourceExhausted(f"can't record the deletion: {error}") from error
            deleted += len(entries)
        return deleted

    async def delete_damaged(self, entry: StoredEntry, tier: Tier, fault: Exception) -> None:
        """Reports an entry that is damaged in a tier, or can't be read there, and deletes it; never raises."""
        self.counters.add("checksum.failures", tier=tier.name)
        key = entry.record.key.hex()
        _faults.warning(f"entry {key} was damaged in the {tier.name} tier and is deleted", fault)
        with contextlib.suppress(OSError, Unavailable):  # the next read tries again
            await self.wait_until_open()
            if entry.visible:
                await self.work.to_the_end(self.withdraw([entry]))

    async def close(self) -> None:
        """Cancels prefetching, waits for work in progress, saves heat, and closes the tiers."""
        self.reader.cancel_prefetching()
        while pending := [*self.work.tasks, *self.reader.pending]:
            await asyncio.gather(*pending, return_exceptions=True)
        await self.heats.save(self.work)
        self.work.threads.shutdown(wait=True)
        for tier in self.residents.tiers:
            tier.close()
