"""The heat of a store's entries: raised by every use, and saved."""

import logging
from collections.abc import Callable

from fusionkv.kvcache_service.index import heat
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.residents import Residents
from fusionkv.kvcache_service.store.work import Work

log = logging.getLogger(__name__)

# Limit of plausible heat above that of the clock: log2 of accesses. Above it, the clock was ahead.
_MAX_LOG_ACCESSES = 40.0


class Heats:
    """Since heat persists, it is based on `wall` (seconds since the epoch), which is read only at start.

    Later changes of the system clock have no effect. `clock` gives monotonic seconds.
    """

    def __init__(
        self, residents: Residents, half_life: float, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._residents = residents
        self._half_life = half_life
        self._clock, self._wall = clock, wall
        self._epoch = wall() - clock()
        self._touched: set[bytes] = set()  # keys of entries whose heat is to be saved

    @property
    def now(self) -> float:
        """Half-lives since the epoch: the heat of an entry that is stored now."""
        return (self._epoch + self._clock()) / self._half_life

    def use(self, entry: StoredEntry) -> None:
        """Counts a use of a visible entry."""
        self._residents.use(entry, heat.after_access(entry.heat, self.now))
        self._touched.add(entry.record.key)

    def recovered(self) -> None:
        """Lets time continue from the hottest of the entries that were recovered, if `wall` is far behind it."""
        hottest = max(self._residents.entries.index.rows.heats, default=0.0)
        if hottest > self._wall() / self._half_life + _MAX_LOG_ACCESSES:
            self._epoch = hottest * self._half_life - self._clock()

    async def save(self, work: Work) -> None:
        touched, self._touched = self._touched, set()
        index = self._residents.entries.index
        heats = [(key, index.rows.heats[row]) for key in touched if (row := index.row(key)) is not None]
        if heats:
            try:
                await work.in_thread(self._residents.home.save_heat, heats)
            except OSError as error:
                log.warning("can't save the heat of %d entries: %s", len(heats), error)
