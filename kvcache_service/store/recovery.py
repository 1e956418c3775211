"""Makes the entries of the home tier visible at start: one after another, and at once those that are asked for."""

import asyncio
from collections.abc import Iterable
from itertools import islice

from fusionkv.kvcache_service.store.residents import Residents
from fusionkv.kvcache_service.store.work import Work
from fusionkv.kvcache_service.tiers.base import Recovered

# Entries that a thread reads per batch, and that become visible per slice: 0.3 ms on the event loop.
_BATCH, _SLICE = 512, 32


class Recovery:
    """One recovery. Until it ends, `Entries.get` finds entries by key in the home tier."""

    def __init__(self, residents: Residents) -> None:
        self._residents, self._entries, self._home = residents, residents.entries, residents.home
        self._contents = residents.contents[self._home.name]
        self._persisted = self._home.finder()
        self._unrecovered: set[int] = set()  # rows found by key that were not recovered yet
        self._entries.finder = self._find

    async def run(self, work: Work) -> None:
        """Recovers all entries. Raises OSError if the tier cannot be used."""
        entries, batch = self._home.recover(), list[Recovered]()
        while batch := await work.in_thread(list, islice(entries, _BATCH)):
            for at in range(0, len(batch), _SLICE):
                self.recover(batch[at : at + _SLICE])
                await asyncio.sleep(0)  # serves calls, each of which takes several rounds of the event loop
        self._end()

    def recover(self, entries: Iterable[Recovered]) -> None:
        """Makes persisted entries of the home tier visible."""
        for recovered in entries:
            try:
                self._add(recovered)
            except KeyError:  # already found by key
                known = self._entries.index.row(recovered.record.key)
                if known is not None and self._entries.offsets[self._home.name][known] == recovered.place.offset:
                    self._unrecovered.discard(known)

    def _end(self) -> None:
        """Deletes entries found by key but not recovered: the index is damaged, or their place overlaps another."""
        self._entries.finder = None
        for entry in map(self._entries.of, self._unrecovered):
            if not self._home.claim(entry.places[self._home.name]):
                assert entry.row is not None
                self._contents.remove(entry.row)
                self._contents.tenants.count(entry.record, -1)
                del entry.places[self._home.name]
            self._residents.withdraw(entry)

    def _find(self, key: bytes) -> int | None:
        persisted = self._persisted(key)
        if persisted is None:
            return None
        row = self._add(persisted)
        self._unrecovered.add(row)
        return row

    def _add(self, recovered: Recovered) -> int:
        """Makes a persisted entry visible; returns its row. Raises KeyError if it is."""
        row = self._entries.index.add(recovered.record, recovered.heat)
        self._contents.tenants.count(recovered.record, 1)
        self._contents.add(row, recovered.place)
        return row
