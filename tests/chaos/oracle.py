"""What must hold in a chaos run, whatever happens: answers right or honest errors, nothing lost or left behind."""

import asyncio
import contextlib
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fusionkv.protos.deadline import Deadline
from tests.chaos.answers import ASK_SECONDS, UPSET, Answers
from tests.chaos.entries import Entries
from tests.chaos.process import Wrong
from tests.chaos.world import POOL_TOKENS, World
from tests.processes import Footing
from tests.system.prompts import request

_RECOVERY_SECONDS = 120.0
# A prompt of a second, on a machine where others come first.
_FILL_SECONDS = 240.0
_INGEST = 0.3
# Of a process that has run for a while already.
_BOUNDS = (1.25, 64 << 20, 24)  # growth, bytes more, files more


class Oracle:
    """Asks and stores, and holds all replies to what is known to be right."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.seen: Counter[str] = Counter()
        self.answers = Answers(world, dice, self.seen)
        self.entries = Entries(world, dice, self.seen)
        self._world, self._dice = world, dice
        self._footing: dict[int, Footing] = {}
        self.answers_fail = False
        """Whether a question may be answered by an error: gateway or workers have a fault until the episode ends."""

    async def traffic(self, asks: int = 3) -> None:
        """Some questions and entries at once, while something has a fault or nothing has."""
        answers, entries, may_fail = self.answers, self.entries, self.answers_fail
        jobs: list[Coroutine[Any, Any, None]] = [answers.question(may_fail) for _ in range(asks)]
        jobs += [answers.prefix(may_fail)]
        jobs += [job for _ in range(3) for job in (entries.put_one(), entries.get_one())]
        if self._dice.random() < _INGEST:
            jobs.append(answers.ingest(may_fail))
        await asyncio.gather(*jobs)

    async def recovered(self) -> None:
        """After a fault is over: soon answers are right without errors and are not degraded, and nothing is held."""
        await self._world.settled(_RECOVERY_SECONDS)
        for ask in (self.answers.gateway_once, self.answers.prefix_once):
            async with _within(_RECOVERY_SECONDS, "answers that are not degraded"):
                degraded = True
                while degraded:
                    try:
                        degraded = await ask(ASK_SECONDS)
                    except UPSET:
                        await asyncio.sleep(0.1)
        clients = self._world.cache_clients
        async with _within(_RECOVERY_SECONDS, "all leases to end"):
            while any([(await client.stats(timeout=20)).active_leases for client in clients]):  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.1)

    async def nothing_is_left_behind(self) -> None:
        """No page of a pool is pinned: a prompt that needs all of it is answered. Memory and files did not grow."""
        await self.empty_pools()
        for process in self._world.processes:
            early = self._footing.setdefault(process.pid, Footing.of(process.pid))
            until = time.monotonic() + _RECOVERY_SECONDS
            while (now := Footing.of(process.pid)).outgrew(early, *_BOUNDS):
                if time.monotonic() > until:
                    raise Wrong(f"{process.name} grew from {early} to {now}: {_open_files(process.pid)}")
                await asyncio.sleep(1)  # what is given back late is no leak

    async def empty_pools(self) -> None:
        """By a prompt that needs all of each, so that what comes next has to fetch."""
        ids = [20 + i % 500 for i in range(POOL_TOKENS - 48)]
        prompt = request([1], [ids], [21, 22], 1, recipe="full_attention")
        for client in self._world.worker_clients:
            async for _ in client.generate(prompt, Deadline.after(_FILL_SECONDS)):
                pass


def _open_files(pid: int) -> dict[str, int]:
    """What they are, numbers left out."""
    found: Counter[str] = Counter()
    for file in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found[re.sub(r"[0-9a-f-]{4,}", "#", os.readlink(f"/proc/{pid}/fd/{file}"))] += 1
    return dict(found.most_common(10))


@contextlib.asynccontextmanager
async def _within(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Wrong(f"waited {seconds:g} s for {what}") from None
