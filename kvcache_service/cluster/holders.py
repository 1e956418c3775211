"""The other services of a shared index, as a caller reaches them: one connection each, and who is out of reach."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Protocol

from fusionkv.kvcache_service.answers import Entry, Hit, Lookup
from fusionkv.kvcache_service.hits import HitKind
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime.errors import DataLoss, DeadlineExceeded, NotFound, ServiceError, Unavailable

# What a service out of reach holds counts as a miss for so long; the shared index knows of its end by then.
_DOWN_SECONDS = 5.0
# So long an entry that was not there counts as a miss: the shared index is corrected meanwhile.
_GONE_SECONDS, _MOST_GONE = 2.0, 1024
_MOST_PEERS = 64
# One that fails is not asked again if nobody has named it for so long: what is dead is named for a few seconds more.
_NAMED_SECONDS = 60.0
# A service that was given less than that for its answer, and gave none, need not be dead.
_SILENT_SECONDS = 0.2
# With less time than that nobody else is asked.
_LEAST_SECONDS = 0.005


class Peer(Protocol):
    address: str

    async def fetch(self, entry: Entry, into: memoryview, *, timeout: float) -> None: ...

    async def ask(self, request: pb.LookupRequest, timeout: float) -> Lookup: ...

    async def release(self, lease: int) -> None: ...

    async def send(self, header: pb.PutHeader, data: memoryview, timeout: float) -> pb.PutResponse: ...

    async def close(self) -> None: ...


class Holders:
    """Belongs to one event loop. `connect` makes the client of an address."""

    def __init__(self, connect: Callable[[str], Peer]) -> None:
        self._connect = connect
        self._peers: dict[str, Peer] = {}
        self._named: dict[str, float] = {}
        """When each was a holder of something last, the oldest first."""
        self._releasing: set[asyncio.Task[None]] = set()
        self._down: dict[str, float] = {}
        self._gone: dict[bytes, float] = {}

    def reachable(self, hit: Hit) -> Hit:
        """The hit with those of its holders that may be reached; a miss if there were some and none is left."""
        if hit.entry is None or not hit.entry.holders:
            return hit
        now = time.monotonic()
        for address in hit.entry.holders:
            self._named.pop(address, None)
            self._named[address] = now
        while len(self._named) > _MOST_PEERS:
            del self._named[next(iter(self._named))]
        holders = tuple(filter(self._up, hit.entry.holders))
        if not holders or self._gone.get(hit.entry.key, 0.0) > now:
            return Hit(HitKind.MISS, None)
        return Hit(hit.kind, replace(hit.entry, holders=holders))

    def lookups(self, own: Peer, request: pb.LookupRequest, deadline: float) -> Iterator[Coroutine[Any, Any, Lookup]]:
        """The same lookup at `own`, then at others that were named as holders, as long as there is time.

        While `own` is out of reach it comes after all others. deadline: as time.monotonic says.
        """
        late = not self._up(own.address)
        if not late:
            yield self._ask(own, request, deadline)
        for address in random.sample(list(self._named), len(self._named)):
            if time.monotonic() + _LEAST_SECONDS >= deadline:
                break
            if address != own.address and self._up(address):
                yield self._lookup(address, request, deadline)
        if late:
            yield self._ask(own, request, deadline)

    async def _ask(self, peer: Peer, request: pb.LookupRequest, deadline: float) -> Lookup:
        given = deadline - time.monotonic()
        try:
            found = await peer.ask(request, given)
        except ServiceError as error:
            self._failed(peer.address, error, given)
            raise
        self._down.pop(peer.address, None)
        return found

    async def _lookup(self, address: str, request: pb.LookupRequest, deadline: float) -> Lookup:
        """What that service has itself is elsewhere for its caller: held while it is fetched, and not leased."""
        peer = await self._peer(address)
        found = await self._ask(peer, request, deadline)
        if found.lease:
            releasing = asyncio.create_task(self._release(peer, found.lease))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

        def theirs(hit: Hit) -> Hit:
            if hit.entry is None:
                return hit
            at = hit.entry.holders or (address,)
            entry = replace(hit.entry, tier="remote", holders=at, lease=0, shared=None, extent=None)
            return self.reachable(Hit(hit.kind, entry))

        return Lookup(tuple(map(theirs, found.hits)), 0)

    async def _release(self, peer: Peer, lease: int) -> None:
        with contextlib.suppress(ServiceError):  # it expires
            await peer.release(lease)

    async def fetch(self, entry: Entry, into: memoryview, timeout: float) -> None:
        """Fills `into` from the first holder that can; a share of the time is left, in which to do without them.

        Raises:
            NotFound: none of them can.
        """
        reasons = []
        deadline = time.monotonic() + timeout
        for i, address in enumerate(entry.holders):
            if not self._up(address):  # another fetch has found out meanwhile
                reasons.append(f"{address} was out of reach just now")
                continue
            share = (deadline - time.monotonic()) / (len(entry.holders) - i + 1)
            try:
                await (await self._peer(address)).fetch(replace(entry, holders=()), into, timeout=share)
                return
            except ServiceError as error:
                self._failed(address, error, share)
                reasons.append(str(error))
        if len(self._gone) >= _MOST_GONE:
            self._gone.clear()
        self._gone[entry.key] = time.monotonic() + _GONE_SECONDS
        raise NotFound(f"no holder of entry {entry.key.hex()} can be asked for it: {'; '.join(reasons)}")

    async def store(self, own: Peer, header: pb.PutHeader, data: memoryview, timeout: float) -> pb.PutResponse:
        """A Put where `own` says that it belongs; while that is out of reach, where one of the others says so.

        Raises:
            ServiceError: `own` refuses it, or is out of reach, and no other takes it.
        """
        deadline, failed = time.monotonic() + timeout, None
        if self._up(own.address):
            try:
                return await self._placed(own, header, data, timeout)
            except Unavailable as error:
                self._failed(own.address, error, timeout)
                failed = error
        for address in random.sample(list(self._named), len(self._named)):
            share = (deadline - time.monotonic()) / 2
            if share < _LEAST_SECONDS:
                break
            if address != own.address and self._up(address):
                try:
                    return await self._placed(await self._peer(address), header, data, share)
                except DataLoss:
                    raise
                except ServiceError as error:
                    self._failed(address, error, share)
        if failed is not None:
            raise failed
        return await self._placed(own, header, data, deadline - time.monotonic())

    async def _placed(self, peer: Peer, header: pb.PutHeader, data: memoryview, timeout: float) -> pb.PutResponse:
        """A Put at `peer`, or where it says that the entry belongs; if it is not taken there, at `peer` after all."""
        deadline = time.monotonic() + timeout
        response = await peer.send(header, data, timeout)
        if response.outcome == pb.PutResponse.OUTCOME_ELSEWHERE:
            header.here, header.asked = True, response.asked
            sent = await self._put(response.address, header, data, (deadline - time.monotonic()) / 2)
            response = sent or await peer.send(header, data, deadline - time.monotonic())
        return response

    async def _put(
        self, address: str, header: pb.PutHeader, data: memoryview, timeout: float
    ) -> pb.PutResponse | None:
        """Puts an entry where it belongs; None where that service is out of reach, or has no room."""
        if not self._up(address):
            return None
        try:
            return await (await self._peer(address)).send(header, data, timeout)
        except DataLoss:
            raise
        except ServiceError as error:
            self._failed(address, error, timeout)
            return None

    async def close(self) -> None:
        """Ends all connections."""
        for releasing in self._releasing:
            releasing.cancel()
        while self._peers:
            await self._peers.popitem()[1].close()

    def _up(self, address: str) -> bool:
        return self._down.get(address, 0.0) <= time.monotonic()

    def _failed(self, address: str, error: ServiceError, given: float) -> None:
        """given: seconds that the service had for its answer."""
        if isinstance(error, Unavailable) or (isinstance(error, DeadlineExceeded) and given >= _SILENT_SECONDS):
            now = time.monotonic()
            self._down[address] = now + _DOWN_SECONDS
            if self._named.get(address, now) + _NAMED_SECONDS < now:
                del self._named[address]

    async def _peer(self, address: str) -> Peer:
        if address not in self._peers:
            if len(self._peers) >= _MOST_PEERS:
                oldest = next(iter(self._peers))
                self._down.pop(oldest, None)
                with contextlib.suppress(ServiceError):
                    await self._peers.pop(oldest).close()
            self._peers[address] = self._connect(address)
        return self._peers[address]
