"""Entries of a chaos run, put and fetched without a worker: none that was acknowledged is lost, none is torn."""

import contextlib
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.runtime import errors
from tests.chaos.answers import ASK_SECONDS, SHORT_SECONDS, UPSET
from tests.chaos.process import Wrong
from tests.chaos.world import World
from tests.system.cache_process import find, payload, put

_MOST_ENTRIES = 150
# A copy that turns out to be damaged is deleted, then what the remote tier has is found, or is gone there too.
_TRIES = 3
_SETTLED_SECONDS = 120
HONEST = (*UPSET, errors.NotFound, errors.DataLoss)


@dataclass
class Entries:
    """Puts and gets at any of the cache services."""

    world: World
    dice: random.Random
    seen: Counter[str]
    stored: dict[int, int] = field(default_factory=dict)
    """Acknowledged ones: name -> size."""
    put_at: dict[int, int] = field(default_factory=dict)
    """Which service each was given to, acknowledged or not."""
    shared: set[int] = field(default_factory=set)
    """Those that the remote tier has: their service had written back what it was given, and it has lost nothing."""
    _fresh: set[int] = field(default_factory=set)
    _alone: set[int] = field(default_factory=set)
    """Those whose service may not have them any more."""
    _names: "itertools.count[int]" = field(default_factory=itertools.count)

    def settled(self, gone: set[int], lossless: bool) -> None:
        """All services have written back what they were given since the last time, but those `gone`.

        lossless: the remote tier had no fault meanwhile; otherwise it may have lost anything.
        """
        self._alone |= gone
        self.shared = self.shared | self._fresh - gone if lossless else set()
        self._fresh.clear()
        if not lossless:
            # What had lost its service's disk was in the remote tier alone.
            for name in self._alone & self.stored.keys():
                self._forget(name)

    async def everything_is_there(self, gone: set[int], share: float = 1.0) -> None:
        """No acknowledged entry is lost, but those `gone` with their service's bytes; what is found is whole.

        The service that acknowledged an entry finds it; and every service, once it is shared.
        """
        for name in sorted(self.stored):
            if name not in gone and self.dice.random() > share:
                continue
            clients = self.world.cache_clients
            at = self.dice.randrange(len(clients)) if name in self.shared else self.put_at[name]
            found = await self._found(clients[at], name)
            self.seen["entries checked"] += found
            self.seen["entries checked at another service"] += found and at != self.put_at[name]
            if name in gone and name not in self.shared:
                # A copy in memory may hide for a while that its bytes on the disk are damaged.
                self._forget(name)
                self.seen["entries gone with a damaged disk"] += not found
            elif not found:
                shared = ", and shared" if name in self.shared else ""
                raise Wrong(
                    f"entry {name} was acknowledged by cache{self.put_at[name]}{shared}; cache{at} has it not"
                )
        while len(self.stored) > _MOST_ENTRIES:
            name = self.dice.choice(sorted(self.stored))
            client = self.world.cache_clients[self.put_at[name]]
            self._forget(name)
            entry = (await find(client, name, ASK_SECONDS)).entry
            if entry is not None:
                await client.delete([entry.key])

    async def put_one(self) -> None:
        number, name = self.dice.randrange(len(self.world.cache_clients)), next(self._names)
        client, self.put_at[name] = self.world.cache_clients[number], number
        size = self.dice.choice((100, 5_000, 60_000, 200_000)) + name % 100
        try:
            await put(client, name, payload(name, size), timeout=SHORT_SECONDS)
            self.stored[name] = size
            self._fresh.add(name)
            self.seen["puts"] += 1
        except HONEST as error:
            self.seen[f"puts refused: {type(error).__name__}"] += 1

    async def get_one(self) -> None:
        if self.stored:
            name = self.dice.choice(sorted(self.stored))
            with contextlib.suppress(*HONEST):
                await self._get_from(self.dice.choice(self.world.cache_clients), name, SHORT_SECONDS)

    async def _get_from(self, client: CacheClient, name: int, timeout: float) -> bool:
        size = self.stored.get(name)
        entry = (await find(client, name, timeout)).entry
        if entry is None or size is None:
            return False
        buffer = bytearray(entry.size)
        await client.fetch(entry, memoryview(buffer), timeout=timeout)
        if bytes(buffer) != payload(name, size):
            raise Wrong(f"entry {name} from {client.address} has other bytes than were put")
        self.seen["entries fetched"] += 1
        return True

    async def _found(self, client: CacheClient, name: int) -> bool:
        tries = 0
        while tries < _TRIES:
            with contextlib.suppress(errors.NotFound, errors.DataLoss):
                if await self._get_from(client, name, ASK_SECONDS):
                    return True
            # On a busy machine a lookup in the remote tier may be late (0.3 s): the service then takes the tier for
            # unreachable, and finds its own entries alone until it has reached it again.
            stats = await client.stats(timeout=ASK_SECONDS)
            if stats.HasField("remote") and not stats.remote.reachable:
                await self.world.settled(_SETTLED_SECONDS)
            else:
                tries += 1
        return False

    def _forget(self, name: int) -> None:
        del self.stored[name]
        self.shared.discard(name)
