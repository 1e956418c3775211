"""Reads entries: pinned, verified if in a slow tier, promoted if hot, and returned in frames; or only promoted."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence

from opentelemetry import trace

from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.base import Place, Tier, Unreachable
from fusionkv.kvcache_service.tiers.extents import NoSpace
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import DataLoss, NotFound, Unavailable
from fusionkv.protos.runtime.frames import FRAME_BYTES

tracer = trace.get_tracer(__name__)
_faults = logs.RateLimitedLog(logging.getLogger(__name__))
# Lookups prefetched concurrently, each in one of the store's eight threads. The others serve calls.
_MAX_LOOKUPS = 4


@contextlib.contextmanager
def pinned(store: Store, key: bytes) -> Iterator[StoredEntry]:
    """Pins an entry for reading. Raises NotFound if there is none."""
    entry = store.residents.get(key) or store.residents.replaced.get(key)
    if entry is None or not (entry.visible or entry.leases):
        raise NotFound(f"no entry {key.hex()}: never stored, evicted, or deleted")
    entry.pins += 1
    try:
        yield entry
    finally:
        entry.pins -= 1
        store.residents.let_go(entry)


async def frames(store: Store, entry: StoredEntry) -> AsyncIterator[memoryview]:
    """Yields a pinned entry's bytes in frames of 1 MiB, each valid until the next one.

    Raises DataLoss if the bytes are damaged or cannot be read, after deleting the entry; Unavailable if the tier is
    temporarily unreachable.
    """
    tier = store.residents.fastest(entry)
    try:
        if not await _verified(store, entry):
            raise DataLoss(f"entry {entry.record.key.hex()} was damaged on {tier.name}; it is deleted")
        tier = store.residents.fastest(entry)
        place = entry.places[tier.name]
        for at in range(0, place.size, FRAME_BYTES):
            length = min(FRAME_BYTES, place.size - at)
            if tier.blocking:
                data = await store.in_thread(tier.read, place, at, length)
            else:
                data = tier.read(place, at, length)
            store.counters.add("bytes.fetched", length, tier=tier.name)
            yield data
    except Unreachable as error:
        raise Unavailable(str(error)) from error
    except OSError as error:
        await store.drop(entry)
        raise DataLoss(f"entry {entry.record.key.hex()}: {error}; it is deleted") from error


async def _verified(store: Store, entry: StoredEntry) -> bool:
    """Verifies an entry in its slow tier, once for concurrent readers; not cancelled with the caller."""
    if not store.residents.fastest(entry).blocking:
        return True
    if entry not in store.loading:
        _start(store, entry, _room_above(store, entry))
    return await asyncio.shield(store.loading[entry])


def _room_above(store: Store, entry: StoredEntry) -> dict[Tier, Place]:
    """Reserves a place in the fastest tier with room for an entry, dropping colder copies; empty if there is none."""
    residents = store.residents
    for tier in residents.tiers:
        if tier.name in entry.places:
            break
        with contextlib.suppress(NoSpace):
            return {tier: residents.reserve(tier, entry.record.size, entry.heat)[0]}
    return {}


def _start(store: Store, entry: StoredEntry, copies: dict[Tier, Place]) -> None:
    task = store.loading[entry] = asyncio.create_task(_load(store, entry, copies))
    task.add_done_callback(lambda _: store.loading.pop(entry))


async def _load(store: Store, entry: StoredEntry, copies: dict[Tier, Place]) -> bool:
    """Verifies an entry's bytes in its fastest tier, and copies them to the reserved places.

    Deletes the entry if they are damaged, and returns False. Raises Unreachable if the tier is.
    """
    residents, record = store.residents, entry.record
    tier = residents.fastest(entry)
    source, intact = entry.places[tier.name], False
    fault: Exception = DataLoss("checksum mismatch")
    entry.pins += 1
    try:
        with tracer.start_as_current_span("kvcache.read") as span:
            span.set_attributes({"fusionkv.tier": tier.name, "fusionkv.bytes": record.size})
            span.set_attribute("fusionkv.promoted", bool(copies))
            intact = await store.in_thread(tier.copy, source, copies) == record.checksum
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
    if not intact and not isinstance(fault, Unreachable):
        store.counters.add("checksum.failures", tier=tier.name)
        _faults.warning(f"entry {record.key.hex()} was damaged in the {tier.name} tier and is deleted", fault)
        await store.drop(entry)
    residents.let_go(entry)
    if isinstance(fault, Unreachable):
        raise fault
    return intact


async def rise(store: Store, key: bytes) -> None:
    """Verifies an entry and promotes it to a fast tier, if it exists and there is room."""
    if store.residents.get(key) is None:
        return
    with pinned(store, key) as entry, contextlib.suppress(Unreachable):
        if store.residents.fastest(entry).blocking and entry not in store.loading:
            copies = _room_above(store, entry)
            if copies:
                _start(store, entry, copies)
        if entry in store.loading:
            await asyncio.shield(store.loading[entry])


def prefetch(store: Store, entries: Sequence[StoredEntry]) -> None:
    """Promotes a Lookup's entries in the background, unless too many Lookups are being prefetched.

    An entry is promoted only if a Fetch would promote it too.
    """
    if entries and len(store.prefetching) < _MAX_LOOKUPS:
        task = asyncio.create_task(_rise_leased(store, entries))
        store.prefetching.add(task)
        task.add_done_callback(store.prefetching.discard)


async def _rise_leased(store: Store, entries: Sequence[StoredEntry]) -> None:
    for entry in entries:
        if entry.leases:  # otherwise the caller no longer needs it
            await rise(store, entry.record.key)
