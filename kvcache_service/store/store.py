"""The store: reserves, reads and promotes entries."""

import asyncio
import contextlib
from typing import Any

from fusionkv.kvcache_service.index import heat
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.store.core import StoreCore
from fusionkv.kvcache_service.store.prefetcher import Prefetcher
from fusionkv.kvcache_service.store.reading import Reader
from fusionkv.kvcache_service.store.writing import Writer
from fusionkv.kvcache_service.tiers.base import Place, Tier
from fusionkv.kvcache_service.tiers.extents import NoSpace
from fusionkv.protos.runtime.errors import NotFound, ResourceExhausted


class Store(StoreCore):
    """A StoreCore with readers, writers and a prefetcher."""

    def __init__(self, *args: Any, **more: Any) -> None:
        """See StoreCore."""
        super().__init__(*args, **more)
        self.prefetcher = Prefetcher(self.rise)

    async def close(self) -> None:
        """Waits for work in progress, saves heat, and closes the tiers."""
        self.prefetcher.close()
        while pending := [*self.tasks, *self.loading.values(), *self.prefetcher.running]:
            await asyncio.gather(*pending, return_exceptions=True)
        await self.save_heat()
        self.threads.shutdown(wait=True)
        for tier in self.residents.tiers:
            tier.close()

    def write(self, record: Record) -> Writer | None:
        """Reserves space for an entry. Must not be called before `opened`.

        The home tier evicts entries that are not held; faster tiers drop copies of colder entries.

        Returns:
            None if the entry exists, or is offered and superfluous.

        Raises:
            ResourceExhausted: There is no room, or the entry exceeds the limit.
        """
        if self.residents.get(record.key) is not None:
            self.used(record.key)
            return None
        return self._reserved(record) if self.wanted(record) else None

    def copy(self, record: Record) -> Writer | None:
        """As `write`, for an entry of the remote tier, which is never superfluous."""
        return None if self.residents.get(record.key) is not None else self._reserved(record, copied=True)

    def _reserved(self, record: Record, *, copied: bool = False) -> Writer:
        if record.size > self.config.max_entry_bytes:
            raise ResourceExhausted(
                f"an entry of {record.size} bytes exceeds the limit of {self.config.max_entry_bytes}: "
                "raise max_entry_bytes in [kvcache]"
            )
        assert self.ready.is_set(), "before `opened`"
        self.leases.expire()
        home = self.residents.home
        try:
            place, evicted = self.residents.reserve(home, record.size)
        except NoSpace:
            raise ResourceExhausted(
                f"no room for {record.size} bytes in the {home.name} tier of {home.capacity_bytes}: its entries "
                f"are leased or in use; try again later, or raise {home.name}_bytes in [kvcache]"
            ) from None
        warmth = heat.first(self.now, self.config.half_life_seconds)
        places: dict[Tier, Place] = {home: place}
        for tier in self.residents.tiers[:-1]:
            with contextlib.suppress(NoSpace):
                places[tier] = self.residents.reserve(tier, record.size, warmth)[0]
        return Writer(self, record, warmth, places, evicted, copied=copied)

    def read(self, key: bytes) -> Reader:
        """Pins an entry for reading.

        Raises:
            NotFound: There is no such entry.
        """
        entry = self.residents.get(key) or self.residents.replaced.get(key)
        if entry is None or not (entry.visible or entry.leases):
            raise NotFound(f"no entry {key.hex()}: never stored, evicted, or deleted")
        return Reader(self, entry)

    async def rise(self, key: bytes) -> bool:
        """Promotes an entry to a fast tier; returns whether it is in one afterwards."""
        if self.residents.get(key) is None:
            return False
        with contextlib.closing(self.read(key)) as reader:
            return await reader.rise()
