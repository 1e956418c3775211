"""The other services of a shared index, as a caller reaches them: one connection each, and who is out of reach."""

import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from fusionkv.kvcache_service.answers import Entry, Hit, Lookup
from fusionkv.kvcache_service.hits import HitKind
from fusionkv.protos.errors import DataLoss, DeadlineExceeded, NotFound, ServiceError, Unavailable
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb

# What a service out of reach holds counts as a miss for so long; the shared index knows of its end by then.
_DOWN_SECONDS = 5.0
# So long an entry that was not there counts as a miss: the shared index is corrected meanwhile.
_GONE_SECONDS, _MOST_GONE = 2.0, 1024
_MOST_PEERS = 64


class Peer(Protocol):
    async def fetch(self, entry: Entry, into: memoryview, *, timeout: float) -> None: ...

    async def ask(self, request: pb.LookupRequest, timeout: float) -> Lookup: ...

    async def release(self, lease: int, *, timeout: float) -> None: ...

    async def send(self, header: pb.PutHeader, data: memoryview, timeout: float) -> pb.PutResponse: ...

    async def close(self) -> None: ...


class Holders:
    """Belongs to one event loop. `connect` makes the client of an address."""

    def __init__(self, connect: Callable[[str], Peer]) -> None:
        self._connect = connect
        self._peers: dict[str, Peer] = {}
        self._named: set[str] = set()
        self._down: dict[str, float] = {}
        self._gone: dict[bytes, float] = {}

    def reachable(self, hit: Hit) -> Hit:
        """The hit with those of its holders that may be reached; a miss if there were some and none is left."""
        if hit.entry is None or not hit.entry.holders:
            return hit
        now = time.monotonic()
        if len(self._named) < _MOST_PEERS:
            self._named.update(hit.entry.holders)
        holders = tuple(address for address in hit.entry.holders if self._down.get(address, 0.0) <= now)
        if not holders or self._gone.get(hit.entry.key, 0.0) > now:
            return Hit(HitKind.MISS, None)
        return Hit(hit.kind, replace(hit.entry, holders=holders))

    def lookup(self, request: pb.LookupRequest, timeout: float) -> Coroutine[Any, Any, Lookup] | None:
        """The same lookup at another service; None if none was named of late that may be reached."""
        now = time.monotonic()
        named = [address for address in self._named if self._down.get(address, 0.0) <= now]
        return self._lookup(random.choice(named), request, timeout) if named else None

    async def _lookup(self, address: str, request: pb.LookupRequest, timeout: float) -> Lookup:
        """What that service has itself is elsewhere for its caller: held while it is fetched, and not leased."""
        peer = await self._peer(address)
        found = await peer.ask(request, timeout)
        if found.lease:
            with contextlib.suppress(ServiceError):  # it expires
                await peer.release(found.lease, timeout=timeout)

        def theirs(hit: Hit) -> Hit:
            if hit.entry is None:
                return hit
            at = hit.entry.holders or (address,)
            return Hit(hit.kind, replace(hit.entry, tier="remote", holders=at, lease=0, shared=None, extent=None))

        return Lookup(tuple(map(theirs, found.hits)), 0)

    async def fetch(self, entry: Entry, into: memoryview, timeout: float) -> None:
        """Fills `into` from the first holder that can; a share of the time is left, in which to do without them.

        Raises:
            NotFound: none of them can.
        """
        reasons = []
        deadline = time.monotonic() + timeout
        for i, address in enumerate(entry.holders):
            if self._down.get(address, 0.0) > time.monotonic():  # another fetch has found out meanwhile
                reasons.append(f"{address} was out of reach just now")
                continue
            share = (deadline - time.monotonic()) / (len(entry.holders) - i + 1)
            try:
                await (await self._peer(address)).fetch(replace(entry, holders=()), into, timeout=share)
                return
            except ServiceError as error:
                self._failed(address, error)
                reasons.append(str(error))
        if len(self._gone) >= _MOST_GONE:
            self._gone.clear()
        self._gone[entry.key] = time.monotonic() + _GONE_SECONDS
        raise NotFound(f"no holder of entry {entry.key.hex()} can be asked for it: {'; '.join(reasons)}")

    async def put(
        self, address: str, header: pb.PutHeader, data: memoryview, timeout: float
    ) -> pb.PutResponse | None:
        """Puts an entry where it belongs; None where that service is out of reach, or has no room."""
        if self._down.get(address, 0.0) > time.monotonic():
            return None
        try:
            return await (await self._peer(address)).send(header, data, timeout)
        except DataLoss:
            raise
        except ServiceError as error:
            self._failed(address, error)
            return None

    async def close(self) -> None:
        """Ends all connections."""
        while self._peers:
            await self._peers.popitem()[1].close()

    def _failed(self, address: str, error: ServiceError) -> None:
        if isinstance(error, Unavailable | DeadlineExceeded):
            self._down[address] = time.monotonic() + _DOWN_SECONDS

    async def _peer(self, address: str) -> Peer:
        if address not in self._peers:
            if len(self._peers) >= _MOST_PEERS:
                oldest = next(iter(self._peers))
                self._down.pop(oldest, None)
                with contextlib.suppress(ServiceError):
                    await self._peers.pop(oldest).close()
            self._peers[address] = self._connect(address)
        return self._peers[address]
