"""This service among those that share an index: alive, published, found by the others, and finding theirs."""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Sequence

from fusionkv.kvcache_service.cluster.elsewhere import Choice, Elsewhere
from fusionkv.kvcache_service.cluster.mover import Mover
from fusionkv.kvcache_service.cluster.publisher import Publisher
from fusionkv.kvcache_service.cluster.shared_index import SharedIndex, group_of
from fusionkv.kvcache_service.hits import HitKind
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.keys import replica_key
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime.errors import Unavailable
from fusionkv.protos.runtime.tls import ClientTLS

log = logging.getLogger(__name__)

# A member that misses four beats is not dead yet.
_BEATS = 5
# Keys found for others between two beats; what is above it is not counted as an access.
_MOST_SEEN = 4096


class Replica:
    """Belongs to the event loop of the store. Redis is asked for everything that concerns the others, and for nothing
    else: while it fails, this service finds and keeps its own entries as if it were alone.
    """

    def __init__(self, store: Store, shared: SharedIndex, tls: ClientTLS | None) -> None:
        self._store = store
        self._shared = shared
        self._interval = store.config.redis_expiry_seconds / _BEATS
        self._publisher = Publisher(store.residents, shared)
        self._mover = Mover(store, self._serving, tls)
        self._state = "serving"
        self._resumed = 0
        """Failures of Redis until the publisher last went on."""
        self._seen: dict[bytes, Counter[tuple[bytes, bool]]] = {}
        self._untold: dict[bytes, Counter[tuple[bytes, bool]]] = {}
        """What was seen when the last beat failed."""
        self._tasks: list[asyncio.Task[None]] = []
        self._moving: asyncio.Task[None] | None = None

    async def start(self, listens: Sequence[str]) -> None:
        """Announces this service, if Redis answers now, and begins to publish. `listens`: the addresses served on."""
        self._mover.own = self._store.config.advertise or listens[0]
        self._store.residents.watcher = self
        await self._beat()
        work = [self._beat_on(), self._publisher.write_changes(), self._publisher.write_everything()]
        self._tasks = [asyncio.create_task(task) for task in (*work, self._mover.copy())]
        self._moving = asyncio.create_task(self._mover.move())

    async def leave(self, seconds: float) -> None:
        """Takes no more entries, and hands over to the others what it can within `seconds`."""
        if self._moving is not None:
            self._moving.cancel()
        self._state = "leaving"
        await self._beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._mover.hand_over()

    async def close(self) -> None:
        """Says that this service is gone: from now on its entries are misses."""
        for task in (*self._tasks, *([self._moving] if self._moving else [])):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._state = "left"
        await self._beat()
        await self._mover.close()
        await self._shared.close()

    async def find(
        self,
        namespace: bytes,
        path: Sequence[bytes],
        variants: Sequence[Sequence[bytes]],
        own: Sequence[tuple[HitKind, StoredEntry | None]],
    ) -> dict[int, Elsewhere]:
        """For elements of the path, better entries than this service's `own`; nothing while Redis fails."""
        asked = [i for i, (kind, _) in enumerate(own) if kind is not HitKind.EXACT]
        if not asked or not self._shared.reachable:
            return {}
        groups = [replica_key(namespace, path[0], path[i]) for i in asked]
        try:
            entries = await self._shared.entries(groups)
        except Unavailable:
            self._store.counters.add("shared_index.failures")
            return {}
        found: dict[int, Elsewhere] = {}
        for i, group, there in zip(asked, groups, entries, strict=True):
            mine = own[i][1]
            others = [(r, [m for m in members if m.address != self._mover.own]) for r, members in there]
            choice = Choice(namespace, path[: i + 1], variants[i])
            reachable = [(record, members) for record, members in others if members]
            best = choice.best(mine.record if mine else None, group, reachable)
            if best is not None:
                found[i] = best
                self._store.counters.add("lookups.elsewhere", kind=best.kind.value)
                self._note_seen(best)
        return found

    def home(self, record: Record) -> str | None:
        """The address of the other service that an entry belongs to; None if it is this one, or nobody knows."""
        if not self._shared.reachable:
            return None
        home = self._mover.home(group_of(record))
        return home if home != self._mover.own else None

    async def delete(self, keys: list[bytes], namespace: bytes) -> int:
        """Deletes entries at all other services that are alive; gives their number.

        Raises:
            ServiceError: one of them, or Redis, which names them, is out of reach. One that is down by
                the index is not asked, and has its entries when it comes back.
        """
        if not self._shared.reachable:
            raise Unavailable("Redis is out of reach: entries of other services are not deleted; try again later")
        return await self._mover.delete({m.address for m in self._shared.members.values()}, keys, namespace)

    def stats(self) -> pb.SharedIndexStats:
        counters = self._store.counters
        return pb.SharedIndexStats(
            reachable=self._shared.reachable,
            members=len({m.address for m in self._shared.members.values()}),
            waiting=self._publisher.waiting,
            moved=counters.get("moves"),
            copied=counters.get("copies"),
        )

    def missed(self, key: bytes, group: bytes) -> None:
        """Somebody was told that an entry is here, which is not."""
        self._publisher.missed(key, group)

    def published(self, record: Record) -> None:
        self._mover.stays(record.key)
        self._publisher.published(record)

    def put_again(self, record: Record) -> None:
        self._mover.stays(record.key)

    def withdrawn(self, record: Record) -> None:
        self._publisher.withdrawn(record)

    def warmed(self, entry: StoredEntry) -> None:
        self._mover.warmed(entry)

    def _serving(self) -> list[str]:
        """Addresses that entries are placed at."""
        return list({m.address: None for m in self._shared.members.values() if not m.leaving})

    def _note_seen(self, found: Elsewhere) -> None:
        # One of the holders counts it; which one, chance decides, as it does for the fetch.
        counts = self._seen.setdefault(random.choice(found.holders).mark, Counter())
        if len(counts) < _MOST_SEEN:
            counts[found.record.key, found.kind is HitKind.EXACT] += 1

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._beat()

    async def _beat(self) -> None:
        fresh, self._seen = self._seen, {}
        seen, self._untold = self._untold, {}
        for mark, counts in fresh.items():
            seen.setdefault(mark, Counter()).update(counts)
        before = set(self._serving())
        serving = self._state == "serving"
        try:
            known, asked = await self._shared.beat(
                self._publisher.mark, self._mover.own, self._state, seen,
                announced=serving and self._publisher.announced,
            )  # fmt: skip
        except Unavailable:
            self._store.counters.add("shared_index.failures")
            # Once more with the next beat, and no more: a Redis that is late may have taken note each time.
            self._untold = fresh
            return
        for key, times, exact in asked:
            self._store.seen(key, times, exact=exact)
        if not known and self._publisher.announced and serving:
            # Silent for too long, or Redis lost all it had: nobody trusts the old mark any more.
            self._publisher.start_over()
            with contextlib.suppress(Unavailable):
                await self._shared.beat(self._publisher.mark, self._mover.own, self._state, {})
                self._publisher.announced = True
        else:
            self._publisher.announced = True
        # Others may have failed while this call was under way, and it did not: then too nothing else resumes.
        if self._shared.reachable and self._shared.failures != self._resumed:
            self._resumed = self._shared.failures
            self._publisher.resume()
        if set(self._serving()) != before:
            self._mover.members_changed()
