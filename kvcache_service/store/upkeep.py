"""What a store does once a second: expires leases, records deletions, evicts above the watermark, and saves heat."""

import asyncio
import logging
import time

from fusionkv.kvcache_service.store.store import DELETE_BATCH, Store
from fusionkv.protos.observe import logs

log = logging.getLogger(__name__)
_faults = logs.RateLimitedLog(log)

_SWEEP_SECONDS = 1.0
# Interval in which heat is saved: kill -9 loses the accesses since, but no entries.
_SAVE_HEAT_SECONDS = 10.0


async def sweep(store: Store) -> None:
    """Expires leases, records deletions, evicts above the watermark and saves heat, until cancelled."""
    saved = time.monotonic()
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        try:
            store.leases.expire()
            try:
                await store.work.to_the_end(store.forget())
                await evict_to_watermark(store)
            except OSError as error:
                _faults.warning("deletions can't be recorded, and are tried again", error)
            if time.monotonic() - saved >= _SAVE_HEAT_SECONDS:
                saved = time.monotonic()
                await store.heats.save(store.work)
        except Exception:
            log.exception("the sweep failed and is repeated")


async def evict_to_watermark(store: Store) -> None:
    """Evicts the coldest entries of the home tier from the high watermark down to the low one.

    A Put that must evict waits for the deletion of index records, and a batch of a thousand deletions costs as
    much as ten single ones. Faster tiers need no watermark: dropping a copy writes nothing.

    Raises OSError if the eviction cannot be recorded.
    """
    home = store.residents.home
    if home.used_bytes <= store.config.high_watermark * home.capacity_bytes:
        return
    limit = int(store.config.low_watermark * home.capacity_bytes)
    while entries := store.residents.eviction_candidates(home, limit, DELETE_BATCH):
        store.counters.add("evictions", len(entries), tier=home.name)  # gone, even if that can't be recorded yet
        await store.work.to_the_end(store.withdraw(entries))
