"""Writes new entries of a store back to the remote tier, and renews those that are used."""

import asyncio
import contextlib
import logging
import math
import time
from itertools import islice
from typing import TypeVar

from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.remote.access import RemoteAccess
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import NotFound
from fusionkv.protos.runtime.frames import FRAME_BYTES

T = TypeVar("T")
_faults = logs.RateLimitedLog(logging.getLogger(__name__))

# Bytes written per round trip, at least a block: at 1 GB/s, latency is 1% of the time for 8 MiB.
_BATCH_BYTES = 8 << 20
# Maximum number of concurrent write-backs, each with a batch in memory.
_WRITES = 4
# Limit of entries to be written back or renewed. The oldest are dropped.
_MAX_ENTRIES = 65_536
# Entries checked in the remote tier at start, which takes 0.5 ms each.
_MAX_CHECKED = 4096
# Interval of renewals, each of the entries that are due by then.
_RENEW_SECONDS = 15.0
_RENEW_BATCH = 256


class WriteBackQueue:
    """Entries that are to be written back or renewed. `run` does both while the tier is reachable.

    A Put is acknowledged before its entry is written back.
    """

    def __init__(self, store: Store, access: RemoteAccess) -> None:
        self._store = store
        self._access = access
        # Interval in which an entry that is used is renewed in the remote tier, or written again if missing there.
        self._renew_seconds = min(access.tier.engine.renew_seconds, store.config.remote_ttl_seconds / 4)
        # By key: the records whose writing has begun. Not of others: 65,536 with long paths take 0.5 GB.
        self._to_write: dict[bytes, list[EntryRecord]] = {}
        self._to_renew: dict[bytes, None] = {}
        self._confirmed: dict[bytes, float] = {}
        """Time at which an entry was last known to be in the remote tier."""
        self._renewed_at = time.monotonic()
        self.changed = asyncio.Event()
        """Set when an entry was added that can be written now."""

    def __len__(self) -> int:
        """Number of entries that are to be written back."""
        return len(self._to_write)

    def add(self, key: bytes) -> None:
        """Schedules the write-back of a stored entry."""
        put_newest(self._to_write, key, [], _MAX_ENTRIES)
        if self._access.reachable:
            self.changed.set()

    def add_hottest(self) -> None:
        """Schedules the hottest entries: those stored shortly before a kill -9 may not have been written back."""
        self._to_write.update({key: [] for key in self._store.residents.hottest(_MAX_CHECKED)})

    def renew(self, key: bytes) -> None:
        """Schedules the renewal of an entry that was looked up, or put again."""
        due = self._confirmed.get(key, -math.inf) + self._renew_seconds < time.monotonic()
        # One that waits to be written back is renewed by that.
        if due and key not in self._to_write and len(self._to_renew) < _MAX_ENTRIES:
            self._to_renew[key] = None

    def confirm(self, key: bytes) -> None:
        """Records that an entry is in the remote tier."""
        put_newest(self._confirmed, key, time.monotonic(), _MAX_ENTRIES)

    def forget_confirmed(self) -> None:
        """Entries need to be confirmed again: the remote tier may have been restarted empty."""
        self._confirmed.clear()

    async def run(self) -> None:
        """Writes back and renews entries until there are none, or the tier is unreachable."""
        while self._access.reachable:
            await asyncio.gather(*map(self._write_back, list(islice(self._to_write, _WRITES))))
            if time.monotonic() - self._renewed_at >= min(_RENEW_SECONDS, self._renew_seconds / 4):
                self._renewed_at = time.monotonic()
                await self._renew_used()
            if not self._to_write:
                break

    async def flush(self, seconds: float) -> None:
        """Waits until all stored entries are written back, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._to_write and self._access.reachable:  # noqa: ASYNC110 - `run` writes
                    await asyncio.sleep(0.02)

    async def _write_back(self, key: bytes) -> None:
        entry, begun = self._store.entries.get(key), self._to_write.get(key, [])
        tier, run = self._access.tier, self._access.run
        try:
            if entry is not None and not (await run(tier.touch, [entry.record]))[0]:
                with contextlib.suppress(NotFound):  # it was evicted, deleted or stored anew meanwhile
                    await self._copy(entry.record, begun)
            if begun and self._store.entries.get(key) is None:  # deleted meanwhile, or since a try that failed
                await run(tier.delete, begun)
        except Unreachable as error:
            self._access.mark_unreachable(error)
            return  # stays in the queue
        except Exception as error:
            # Damaged here, or refused by the remote tier, as by a Mooncake master that no client has rejoined yet, or
            # a fault of its client library. The next renewal tries again.
            self._to_renew[key] = None
            self._store.counters.add("remote.failures")
            _faults.warning(f"entry {key.hex()} is not written to the remote tier", error)
        else:
            self.confirm(key)
        # An entry that was deleted and stored anew meanwhile is written again.
        if self._to_write.get(key) is begun:
            self._to_write.pop(key, None)

    async def _copy(self, record: EntryRecord, begun: list[EntryRecord]) -> None:
        """Copies an entry to the remote tier; adds it to `begun` before.

        Raises NotFound if the entry is gone, DataLoss if it is damaged here, OSError as the tier does.
        """
        tier, run = self._access.tier, self._access.run
        first, batch = 0, list[bytes]()
        frames_of_block = tier.engine.block_bytes // FRAME_BYTES

        async def write() -> None:
            nonlocal first, batch
            blocks = [b"".join(batch[at : at + frames_of_block]) for at in range(0, len(batch), frames_of_block)]
            await run(tier.write, record, first, blocks)
            first, batch = first + len(blocks), []

        with self._store.reader.pinned(record.key, record.checksum) as entry:
            begun.append(record)
            async for frame in self._store.reader.frames(entry):
                batch.append(bytes(frame))
                if len(batch) == max(_BATCH_BYTES // FRAME_BYTES, frames_of_block):
                    await write()
        if batch:
            await write()
        await run(tier.commit, record)
        self._store.counters.add("remote.writes")

    async def _renew_used(self) -> None:
        """Renews entries used here in the remote tier, and schedules the write-back of missing ones."""
        while self._to_renew:
            keys = list(islice(self._to_renew, _RENEW_BATCH))
            entries = [entry for key in keys if (entry := self._store.entries.get(key)) is not None]
            try:
                present = await self._access.run(self._access.tier.touch, [entry.record for entry in entries])
            except OSError as error:
                self._access.mark_unreachable(error)
                return
            for key in keys:
                self._to_renew.pop(key, None)
            for entry, is_present in zip(entries, present, strict=True):
                if is_present:
                    self.confirm(entry.record.key)
                else:
                    self.add(entry.record.key)


def put_newest(entries: dict[bytes, T], key: bytes, value: T, limit: int) -> None:
    """Sets an item as the newest one, and drops the oldest above a limit."""
    entries.pop(key, None)
    entries[key] = value
    while len(entries) > limit:
        del entries[next(iter(entries))]
