"""Keeps the shared index true to what this service holds: changes as they come, everything again and again."""

import asyncio
import contextlib
import logging
import secrets
from itertools import islice

from fusionkv.kvcache_service.cluster.shared_index import MARK_BYTES, Change, SharedIndex, group_of
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.store.entries import Residents
from fusionkv.protos.runtime.errors import Unavailable

log = logging.getLogger(__name__)

# Changes written at once: about 3 ms, most of it Python's.
_BATCH = 64
# Changes that wait while Redis is out of reach; above it all is published anew, which costs less than to remember.
_MOST_WAITING = 65_536
# Everything is published again in this time, unless that is more than 1,280 entries a second. It mends what a
# failover of Redis lost, and keeps groups from expiring.
_ROUND_SECONDS, _LEAST_PAUSE = 600.0, 0.05


class Publisher:
    """Writes to the shared index under a mark, 8 random bytes. To start over is to take a new mark.

    So a change that got lost, in a crash or in Redis, harms nothing: nobody alive has the old mark.
    """

    def __init__(self, residents: Residents, shared: SharedIndex) -> None:
        self._residents = residents
        self._shared = shared
        self._waiting: dict[bytes, Change] = {}
        self._under_way = 0
        self._changed = asyncio.Event()
        self._again = asyncio.Event()
        self._writing = asyncio.Lock()
        self.mark = secrets.token_bytes(MARK_BYTES)
        self.announced = False
        """Whether others know the mark."""
        self.complete = False
        """Whether everything is in the shared index, but for what waits."""

    @property
    def waiting(self) -> int:
        """Changes that others do not see yet, those among them that are being written just now."""
        if self.complete and self.announced:
            return len(self._waiting) + self._under_way
        return max(len(self._residents), 1)

    def published(self, record: Record) -> None:
        """An entry turned visible."""
        self._note(Change(record.key, group_of(record), record))

    def withdrawn(self, record: Record) -> None:
        """An entry turned invisible."""
        self._note(Change(record.key, group_of(record), None))

    def missed(self, key: bytes, group: bytes) -> None:
        """Somebody came for an entry that is not here."""
        if self._residents.get(key) is None:
            self._note(Change(key, group, None))

    def start_over(self) -> None:
        """Publishes everything under a new mark: at the start, and when Redis lost the old one."""
        self.mark = secrets.token_bytes(MARK_BYTES)
        self.announced = self.complete = False
        self._waiting.clear()
        self._again.set()

    def resume(self) -> None:
        """Redis answers again."""
        self._changed.set()
        if not self.complete:
            self._again.set()

    async def write_changes(self) -> None:
        """Writes what changes, until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting and self._shared.reachable:
                async with self._writing:
                    batch = [self._waiting.pop(key) for key in list(islice(self._waiting, _BATCH))]
                    self._under_way = len(batch)
                    try:
                        await self._write(batch)
                    finally:
                        self._under_way = 0

    async def write_everything(self) -> None:
        """Writes all entries round after round: slowly, or at once after a start over. Until it is cancelled."""
        while True:
            hurry, count = not self.complete, len(self._residents)
            self._again.clear()
            pause = min(max(_ROUND_SECONDS * _BATCH / max(count, 1), _LEAST_PAUSE), _ROUND_SECONDS)
            if await self._round(0.0 if hurry else pause):
                self.complete = True
            await self._due(pause if self.complete else None)

    async def _round(self, pause: float) -> bool:
        rows, at = self._residents.index.rows, 0
        while at < rows.end:
            async with self._writing:
                # Read and written under the lock: a change in between is written later, and stands.
                found = [rows.record(row) for row in range(at, min(at + _BATCH, rows.end)) if row in rows]
                written = await self._write([Change(record.key, group_of(record), record) for record in found])
            if not written or await self._due(pause):
                return False
            at += _BATCH
        return self._shared.reachable and not self._again.is_set()

    async def _due(self, seconds: float | None) -> bool:
        """Waits; whether everything is to be written again, at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._again.wait()
        return self._again.is_set()

    async def _write(self, changes: list[Change]) -> bool:
        """Under the lock."""
        if not changes:
            return True
        try:
            if self._shared.reachable:
                await self._shared.apply(self.mark, changes)
                return True
        except Unavailable:
            pass
        for change in changes:
            # What changed meanwhile is newer.
            self._waiting.setdefault(change.key, change)
        return False

    def _note(self, change: Change) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            log.warning("%d changes wait for Redis: everything is published anew", len(self._waiting))
            self.start_over()
            return
        self._waiting[change.key] = change
        self._changed.set()
