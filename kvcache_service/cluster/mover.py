"""Moves entries to the service where they belong, copies hot ones to a second, and hands all over before an end."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable

import numpy as np

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.kvcache_service.cluster.rendezvous import ranking
from fusionkv.kvcache_service.cluster.shared_index import group_of
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.keys import DIGEST_BYTES
from fusionkv.kvcache_service.store.entries import StoredEntry
from fusionkv.kvcache_service.store.store import Store
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime.errors import DataLoss, NotFound, ServiceError
from fusionkv.protos.runtime.tls import ClientTLS

log = logging.getLogger(__name__)

# An entry asked for so often within a half-life or so is hot, and one asked for a quarter as often no more.
_HOT, _WARM = 16.0, 4.0
_MOST_HOT = 1024
# A moved entry stays so long: whoever was told just now that it is here finds it here.
_GRACE_SECONDS = 5.0
# Without a join or a leave, what is elsewhere than it belongs is looked for so often; sooner if some could not go.
_ROUND_SECONDS, _AGAIN_SECONDS = 60.0, 3.0
_GIVE_SECONDS = 30.0
# Rows looked at between two breaths of the event loop: about 1 ms.
_BATCH = 64
# Entries handed over at once before an end: more would only compete for the same bandwidth.
_HANDS = 4


class Mover:
    """Works in the background on one entry at a time, and pauses as long as each took.

    `serving` gives the addresses that take entries; `own`, the one of this service, is known once it serves.
    """

    def __init__(self, store: Store, serving: Callable[[], list[str]], tls: ClientTLS | None) -> None:
        self._store = store
        self.own = ""
        self._serving = serving
        self._tls = tls
        self._peers: dict[str, CacheClient] = {}
        self._hot: dict[bytes, None] = {}
        self._copied: dict[bytes, str] = {}
        self._departing: dict[bytes, float] = {}
        self._due = asyncio.Event()

    def home(self, group: bytes) -> str:
        """Where a group belongs."""
        return next(iter(ranking(group, self._serving())), self.own)

    def members_changed(self) -> None:
        """Somebody joined or left."""
        self._copied.clear()
        self._due.set()

    def stays(self, key: bytes) -> None:
        """Somebody was told that an entry is here: perhaps a service that gives it back, and deletes its own.

        Two that disagree about who is alive may each think that an entry belongs to the other.
        """
        self._departing.pop(key, None)

    def warmed(self, entry: StoredEntry) -> None:
        """An entry was asked for."""
        if self._accesses(entry.heat) >= _HOT and len(self._hot) < _MOST_HOT:
            self._hot[entry.record.key] = None

    async def move(self) -> None:
        """Moves what belongs elsewhere, on a join or a leave at once. Until it is cancelled."""
        pause = _ROUND_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._due.wait()
            self._due.clear()
            await self._close_peers()
            rows, at, failed = self._store.residents.index.rows, 0, set[str]()
            while at < rows.end and not self._due.is_set():
                for row in range(at, min(at + _BATCH, rows.end)):
                    record = rows.record(row) if row in rows else None
                    home = self._moves_to(record, rows.heats[row]) if record is not None else ""
                    if record is None or not home or home in failed:
                        continue
                    try:
                        await self._depart(record.key, home)
                    except ServiceError as error:
                        log.warning("entries that belong to %s stay for now: %s", home, error)
                        failed.add(home)
                await asyncio.sleep(0)
                at += _BATCH
            pause = _AGAIN_SECONDS if failed else _ROUND_SECONDS

    async def copy(self) -> None:
        """Copies hot entries to the second in their ranking, and forgets what was moved. Until it is cancelled."""
        while True:
            await asyncio.sleep(1.0)
            for key in list(self._hot):
                del self._hot[key]
                entry = self._store.residents.get(key)
                hot = entry is not None and self._accesses(entry.heat) >= _HOT
                order = ranking(group_of(entry.record), self._serving()) if entry is not None and hot else []
                if len(order) > 1 and order[0] == self.own and self._copied.get(key) != order[1]:
                    with contextlib.suppress(ServiceError):  # tried again when it is asked for again
                        await self._give_gently(key, order[1], "copies")
                        self._copied[key] = order[1]
            while len(self._copied) > _MOST_HOT:
                del self._copied[next(iter(self._copied))]
            await self._store.to_the_end(self._forget_moved())

    async def hand_over(self) -> None:
        """Gives entries to those who take them after this service, the hottest first, until done or cancelled."""
        others = [address for address in self._serving() if address != self.own]
        if not others:
            return
        # What was moved of late stays: an entry that is forgotten while it is given again would look deleted, and be
        # deleted where it belongs.
        self._departing.clear()
        rows, failed = self._store.residents.index.rows, set[str]()
        coldest_first = [int(row) for row in np.argsort(np.frombuffer(rows.heats, np.float64).copy())]

        async def work() -> None:
            while coldest_first:
                row = coldest_first.pop()
                if row in rows:
                    record = rows.record(row)
                    to = ranking(group_of(record), others)[0]
                    try:
                        if to not in failed:
                            await self._give(record.key, to, "moves")
                    except ServiceError as error:
                        log.warning("entries that %s is to take over are not handed over: %s", to, error)
                        failed.add(to)

        await asyncio.gather(*(work() for _ in range(_HANDS)))

    async def delete(self, addresses: Iterable[str], keys: list[bytes], namespace: bytes) -> int:
        """Deletes entries at other services; gives their number.

        Raises:
            ServiceError: one can't be reached; the others have deleted theirs.
        """
        calls = (
            self._peer(address).delete(keys, namespace=namespace, here=True, timeout=_GIVE_SECONDS)
            for address in addresses
            if address != self.own
        )
        done = await asyncio.gather(*calls, return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return sum(result for result in done if isinstance(result, int))

    async def close(self) -> None:
        """Ends the connections."""
        for peer in self._peers.values():
            await peer.close()

    def _moves_to(self, record: Record, heat: float) -> str:
        """Where an entry is to go; nothing where it may stay: at its home, or a warm one at the second."""
        if record.key in self._departing:
            return ""
        order = ranking(group_of(record), self._serving())
        stays = order[:2] if self._accesses(heat) >= _WARM else order[:1]
        return "" if not order or self.own in stays else order[0]

    async def _depart(self, key: bytes, home: str) -> None:
        """Gives an entry to its home, and notes when, unless it was put here meanwhile. Raises as `_give` does."""
        self._departing[key] = math.inf
        given = False
        try:
            given = await self._give_gently(key, home, "moves")
        finally:
            if not given:
                self.stays(key)
        if key in self._departing:
            self._departing[key] = time.monotonic()

    async def _forget_moved(self) -> None:
        """Nothing comes between the look at what departs and its end: whoever puts it then puts it anew."""
        now = time.monotonic()
        while due := [key for key, since in self._departing.items() if since + _GRACE_SECONDS <= now][:_BATCH]:
            for key in due:
                del self._departing[key]
            entries = [entry for key in due if (entry := self._store.residents.get(key)) is not None]
            # Who left in the meantime may have made this service the home.
            gone = [entry for entry in entries if self.home(group_of(entry.record)) != self.own]
            with contextlib.suppress(OSError):  # it is gone until the next start
                await self._store.withdraw(gone)

    async def _give_gently(self, key: bytes, address: str, what: str) -> bool:
        started = time.monotonic()
        given = await self._give(key, address, what)
        await asyncio.sleep(time.monotonic() - started)
        return given

    async def _give(self, key: bytes, address: str, what: str) -> bool:
        """Puts an entry at another service; whether it is there then.

        Raises:
            ServiceError: that service is out of reach, or refuses it.
        """
        try:
            with contextlib.closing(self._store.read(key)) as reader:
                entry, data, at = reader.entry, bytearray(reader.entry.record.size), 0
                async for frame in reader.frames():
                    data[at : at + len(frame)] = frame
                    at += len(frame)
            header = _header(entry.record, self._accesses(entry.heat), self._store.asked(key))
            await self._peer(address).send(header, memoryview(data), _GIVE_SECONDS)
            if not entry.visible:  # deleted everywhere meanwhile, and there too early
                await self._peer(address).delete([key], here=True, timeout=_GIVE_SECONDS)
                return False
        except (NotFound, DataLoss):
            return False  # evicted, or damaged and deleted
        self._store.counters.add(what)
        return True

    def _accesses(self, heat: float) -> float:
        """How often an entry of this heat was asked for, older accesses counting less."""
        return 2.0 ** min(heat - self._store.now / self._store.config.half_life_seconds, 20.0)

    def _peer(self, address: str) -> CacheClient:
        return self._peers.setdefault(address, CacheClient(address, self._tls))

    async def _close_peers(self) -> None:
        for address in set(self._peers) - set(self._serving()):
            await self._peers.pop(address).close()


def _header(record: Record, accesses: float, asked: int) -> pb.PutHeader:
    """For an entry as it is here. Its checksum travels with it: bytes damaged here are refused there.

    asked: how often its exact path was looked up of late; an offered entry may be there for that alone.
    """
    return pb.PutHeader(
        namespace=record.namespace,
        path=[record.trail[at - DIGEST_BYTES : at] for at in range(len(record.trail), 0, -DIGEST_BYTES)],
        variant=record.variant,
        size_bytes=record.size,
        tokens=record.tokens,
        base=record.base,
        checksum=record.checksum,
        offered=record.offered,
        here=True,
        accesses=accesses,
        asked=asked,
        signature=record.signature,
    )
