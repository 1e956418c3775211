"""Entries of a chaos run, put and fetched without a worker: none that was acknowledged is lost, none is torn."""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.kvcache_service.keys import entry_key
from fusionkv.protos.runtime import errors
from tests.chaos.answers import ASK_SECONDS, SHORT_SECONDS, UPSET
from tests.chaos.process import Wrong
from tests.chaos.world import World
from tests.system.cache_process import NAMESPACE, SYSTEM, ask, chunk, payload, put

_MOST_ENTRIES = 150
# Behind a fault: 5 s for which a service counts as out of reach, twice, and 2 s for the index to follow.
_FOUND_AGAIN_SECONDS = 12.0
HONEST = (*UPSET, errors.NotFound, errors.DataLoss)


@dataclass
class Entries:
    """Puts and gets at any of the cache services."""

    world: World
    dice: random.Random
    seen: Counter[str]
    stored: dict[int, int] = field(default_factory=dict)
    """Acknowledged ones: name -> size."""
    _names: "itertools.count[int]" = field(default_factory=itertools.count)

    async def everything_is_there(self, gone: set[int], share: float = 1.0) -> None:
        """No acknowledged entry is lost, but those `gone` with their holder's bytes; what is found is whole."""
        for name in sorted(self.stored):
            if name not in gone and self.dice.random() > share:
                continue
            found = await self._found_somewhere(name)
            self.seen["entries checked"] += found
            if name in gone:
                # A copy in memory may hide for a while that its bytes on the disk are damaged.
                del self.stored[name]
                self.seen["entries gone with a damaged disk"] += not found
            elif not found:
                await self._overlooked(name)
        while len(self.stored) > _MOST_ENTRIES:
            name = self.dice.choice(sorted(self.stored))
            del self.stored[name]
            entry = await _find(self.world.cache_clients[0], name, ASK_SECONDS)
            if entry is not None:
                await self.world.cache_clients[0].delete([entry.key])

    async def held_by(self, number: int) -> set[int]:
        """The entries that this service says it holds; none while it does not answer."""
        held, client = set(), self.world.cache_clients[number]
        with contextlib.suppress(*UPSET):
            for name in sorted(self.stored):  # others may be put meanwhile
                entry = (await ask(client, name)).hits[1].entry
                if entry is not None and not entry.holders:
                    held.add(name)
        return held

    def on_disk(self, data: Path) -> set[int]:
        """The entries in a disk tier's index, of a service that runs or was killed."""
        keys = {entry_key(NAMESPACE, [SYSTEM, chunk(name)]): name for name in self.stored}
        folder = str(data / "index")
        with lmdb.open(folder, max_dbs=2, readonly=True, lock=False) as index, index.begin() as txn:
            records = index.open_db(b"records", txn, create=False)
            return {name for key, name in keys.items() if txn.get(key, db=records) is not None}

    async def put_one(self) -> None:
        client, name = self.dice.choice(self.world.cache_clients), next(self._names)
        size = self.dice.choice((100, 5_000, 60_000, 200_000)) + name % 100
        try:
            await put(client, name, payload(name, size), timeout=SHORT_SECONDS)
            self.stored[name] = size
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
        entry = await _find(client, name, timeout)
        if entry is None or size is None:
            return False
        buffer = bytearray(entry.size)
        await client.fetch(entry, memoryview(buffer), timeout=timeout)
        if bytes(buffer) != payload(name, size):
            raise Wrong(f"entry {name} from {client.address} has other bytes than were put")
        self.seen["entries fetched"] += 1
        return True

    async def _overlooked(self, name: int) -> None:
        """Tells a lost entry from one that callers do not find for a moment, though a service has it.

        A caller takes what a service out of reach holds for a miss, for up to 5 s after that service is back.
        """
        about = [await self._held(client, name) for client in self.world.cache_clients]
        if True not in about:
            raise Wrong(f"entry {name} was acknowledged, and no service has it: {about}")
        self.seen["entries that callers did not find for a moment"] += 1
        until = time.monotonic() + _FOUND_AGAIN_SECONDS
        while not await self._found_somewhere(name):
            if time.monotonic() > until:
                raise Wrong(f"entry {name} is not found for {_FOUND_AGAIN_SECONDS:g} s, held by {about}")
            await asyncio.sleep(0.2)

    async def _held(self, client: CacheClient, name: int) -> bool | str:
        """Whether this service has the bytes of an entry itself, or what it says instead."""
        try:
            entry = (await ask(client, name)).hits[1].entry
            if entry is None or entry.holders:
                return f"elsewhere: {entry.holders}" if entry else False
            buffer = bytearray(entry.size)
            await client.fetch(entry, memoryview(buffer), timeout=ASK_SECONDS)
        except HONEST as error:
            return repr(error)
        return bytes(buffer) == payload(name, self.stored[name])

    async def _found_somewhere(self, name: int) -> bool:
        """Any service finds what the others hold; where the index was damaged, its holder does."""
        clients = list(self.world.cache_clients)
        self.dice.shuffle(clients)
        for client in clients:
            with contextlib.suppress(errors.NotFound, errors.DataLoss):
                if await self._get_from(client, name, ASK_SECONDS):
                    return True
        return False


async def _find(client: CacheClient, name: int, timeout: float) -> Entry | None:
    return (
        (await client.lookup(NAMESPACE, [(SYSTEM, []), (chunk(name), [])], lease_ms=1, timeout=timeout)).hits[1].entry
    )
