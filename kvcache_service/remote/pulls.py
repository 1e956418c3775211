"""Pulls entries that Lookups found in the remote tier: copies them to the store."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Set

from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.remote.access import RemoteAccess
from fusionkv.kvcache_service.remote.write_back import put_newest
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.store.writing import reserve
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import DataLoss

_faults = logs.RateLimitedLog(logging.getLogger(__name__))

# Maximum number of concurrent pulls, each with a batch in memory.
_PULLS = 4
# Bytes read per round trip, at least a block.
_READ_BYTES = 4 << 20
# Limit of records found by Lookups. The oldest are dropped.
_MAX_FOUND = 16_384


class Pulls:
    """An entry is pulled when it is fetched, or in advance. Runs on the store's event loop."""

    def __init__(self, store: Store, access: RemoteAccess, confirm: Callable[[bytes], None]) -> None:
        """confirm: is told the key of an entry that was pulled, and so is in the remote tier."""
        self._store = store
        self._access = access
        self._confirm = confirm
        self._slots = asyncio.Semaphore(_PULLS)
        self._tasks: dict[bytes, asyncio.Task[bool]] = {}
        self._found: dict[bytes, EntryRecord] = {}

    def offer(self, record: EntryRecord) -> None:
        """Remembers what was found in the remote tier, and starts to pull it unless others are being pulled."""
        put_newest(self._found, record.key, record, _MAX_FOUND)
        if len(self._tasks) < _PULLS:
            self._start(record)

    async def pull(self, key: bytes) -> bool:
        """Pulls an entry that was found; returns whether it is in the store afterwards.

        Raises ResourceExhausted if the store has no room.
        """
        pull = self._tasks.get(key)
        if pull is None:
            record = self._found.get(key)
            if record is None:
                return False
            pull = self._start(record)
        return await asyncio.shield(pull)

    async def settled(self, keys: Set[bytes], namespace: bytes) -> dict[bytes, EntryRecord]:
        """What was found under these keys, or in the namespace, once none of it is being pulled."""
        found = {key: record for key, record in self._found.items() if key in keys or record.namespace == namespace}
        if pulls := [pull for key in found if (pull := self._tasks.get(key)) is not None]:
            await asyncio.wait(pulls)
        return found

    async def forget(self, keys: Set[bytes], namespace: bytes) -> None:
        """Forgets what was found under these keys, or in the namespace, once none of it is being pulled."""
        await self.settled(keys, namespace)
        self._found = {
            key: record for key, record in self._found.items() if key not in keys and record.namespace != namespace
        }

    async def close(self) -> None:
        """Cancels pulls in progress, at the end of the service: threads may still be filling places of theirs."""
        pulls = list(self._tasks.values())
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)

    def _start(self, record: EntryRecord) -> "asyncio.Task[bool]":
        task = self._tasks.get(record.key)
        if task is None:
            task = self._tasks[record.key] = asyncio.create_task(self._pull(record))

            def ended(done: "asyncio.Task[bool]") -> None:
                del self._tasks[record.key]
                if not done.cancelled():
                    done.exception()  # marks it as retrieved; waiters receive it

            task.add_done_callback(ended)
        return task

    async def _pull(self, record: EntryRecord) -> bool:
        async with self._slots:
            pulled = await self._copy(record)
        self._found.pop(record.key, None)
        return pulled

    async def _copy(self, record: EntryRecord) -> bool:
        """Copies an entry to the store; returns whether it is there afterwards."""
        if not self._access.reachable:  # known since this copy was requested; to reserve a place would evict entries
            return False
        writer = reserve(self._store, record, from_remote=True)
        if writer is None:
            return True
        tier = self._access.tier
        block_bytes = tier.engine.block_bytes
        step = max(_READ_BYTES, block_bytes)
        try:
            for at in range(0, record.size, step):
                space = writer.space(min(step, record.size - at))
                await self._access.run(tier.read, record, at // block_bytes, space)
                await writer.filled(space)
            await writer.commit()
        except (DataLoss, FileNotFoundError) as error:
            if isinstance(error, DataLoss):
                _faults.warning(f"entry {record.key.hex()} was damaged in the remote tier and is deleted", error)
            with contextlib.suppress(OSError):
                await self._access.run(tier.delete, [record])
            return False
        except OSError as error:
            self._access.mark_unreachable(error)
            return False
        finally:
            writer.abort()
        self._confirm(record.key)
        self._store.counters.add("remote.reads")
        return True
