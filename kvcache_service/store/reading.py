"""Reads one entry: pinned, verified if in a slow tier, promoted if hot, and returned in frames."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from opentelemetry import trace

from fusionkv.kvcache_service.store.core import StoreCore
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.tiers.base import Place, Tier, Unreachable
from fusionkv.kvcache_service.tiers.extents import NoSpace
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.checksum import Checksum
from fusionkv.protos.runtime.errors import DataLoss, Unavailable
from fusionkv.protos.runtime.frames import FRAME_BYTES

tracer = trace.get_tracer(__name__)
_faults = logs.RateLimitedLog(logging.getLogger(__name__))


class Reader:
    """A pinned entry. `close` must be called after reading; further calls are no-ops."""

    def __init__(self, store: StoreCore, entry: StoredEntry) -> None:
        self._store = store
        self.entry = entry
        self._open = True
        entry.pins += 1

    def close(self) -> None:
        if self._open:
            self._open = False
            self.entry.pins -= 1
            self._store.residents.let_go(self.entry)

    async def frames(self) -> AsyncIterator[memoryview]:
        """Yields the bytes in frames of 1 MiB, each valid until the next one.

        Raises:
            DataLoss: The checksum does not match, or the bytes cannot be read. The entry is deleted.
            Unavailable: The tier is temporarily unreachable.
        """
        tier = self._fastest()
        try:
            intact = await self._loaded()
        except Unreachable as error:
            raise Unavailable(str(error)) from error
        if not intact:
            raise DataLoss(f"entry {self.entry.record.key.hex()} was damaged on {tier.name}; it is deleted")
        tier = self._fastest()
        place = self.entry.places[tier.name]
        for at in range(0, place.size, FRAME_BYTES):
            length = min(FRAME_BYTES, place.size - at)
            if tier.blocking:
                try:
                    data = await self._store.in_thread(tier.read, place, at, length)
                except Unreachable as error:
                    raise Unavailable(str(error)) from error
                except OSError as error:
                    await self._store.drop(self.entry)
                    raise DataLoss(f"entry {self.entry.record.key.hex()}: {error}; it is deleted") from error
            else:
                data = tier.read(place, at, length)
            self._store.counters.add("bytes.fetched", length, tier=tier.name)
            yield data

    def _fastest(self) -> Tier:
        return next(tier for tier in self._store.residents.tiers if tier.name in self.entry.places)

    async def rise(self) -> bool:
        """Verifies and promotes the entry to a fast tier; False if there is no room, or it is damaged."""
        if self._fastest().blocking and self.entry not in self._store.loading:
            copies = _room_above(self._store, self.entry)
            if not copies:
                return False
            self._start(copies)
        with contextlib.suppress(Unreachable):
            return await self._loaded() and not self._fastest().blocking
        return False

    async def _loaded(self) -> bool:
        """Verifies the entry in its slow tier, shared between concurrent readers; not cancelled with the caller."""
        if not self._fastest().blocking:
            return True
        if self.entry not in self._store.loading:
            self._start(_room_above(self._store, self.entry))
        return await asyncio.shield(self._store.loading[self.entry])

    def _start(self, copies: dict[Tier, Place]) -> None:
        task = asyncio.create_task(load(self._store, self.entry, copies))
        self._store.loading[self.entry] = task
        task.add_done_callback(lambda _: self._store.loading.pop(self.entry))


def _room_above(store: StoreCore, entry: StoredEntry) -> dict[Tier, Place]:
    """Reserves a place in the fastest tier with room for an entry, dropping colder copies; empty if there is none."""
    residents = store.residents
    for tier in residents.tiers:
        if tier.name in entry.places:
            break
        with contextlib.suppress(NoSpace):
            return {tier: residents.reserve(tier, entry.record.size, entry.heat)[0]}
    return {}


async def load(store: StoreCore, entry: StoredEntry, copies: dict[Tier, Place]) -> bool:
    """Verifies an entry's bytes in its fastest tier, and copies them to the reserved places.

    Returns:
        False if they are damaged. The entry is deleted.

    Raises:
        Unreachable: The tier is temporarily unreachable.
    """
    residents, record = store.residents, entry.record
    tier = next(tier for tier in residents.tiers if tier.name in entry.places)
    source, intact, unreachable = entry.places[tier.name], False, None
    fault: Exception = DataLoss("checksum mismatch")
    entry.pins += 1
    try:
        with tracer.start_as_current_span("kvcache.read") as span:
            span.set_attributes({"fusionkv.tier": tier.name, "fusionkv.bytes": record.size})
            span.set_attribute("fusionkv.promoted", bool(copies))
            intact = await store.in_thread(_copy_verified, tier, source, copies, record.checksum)
    except Unreachable as error:
        unreachable = error
    except OSError as error:
        fault = error
    finally:
        entry.pins -= 1
        for above, place in copies.items():
            if intact and entry.visible:
                residents.settle(entry, above, place)
                store.counters.add("promotions", tier=above.name)
            else:
                residents.cancel(above, place)
    if unreachable is not None:
        residents.let_go(entry)
        raise unreachable
    if not intact:
        store.counters.add("checksum.failures", tier=tier.name)
        _faults.warning(f"entry {record.key.hex()} was damaged in the {tier.name} tier and is deleted", fault)
        await store.drop(entry)
    residents.let_go(entry)
    return intact


def _copy_verified(tier: Tier, source: Place, copies: dict[Tier, Place], checksum: bytes) -> bool:
    """Copies a place to other tiers; returns whether its checksum matches."""
    hasher = Checksum()
    for at in range(0, source.size, FRAME_BYTES):
        piece = tier.read(source, at, min(FRAME_BYTES, source.size - at))
        hasher.update(piece)
        for above, place in copies.items():
            above.write(place, at, [piece])
    return hasher.digest() == checksum
