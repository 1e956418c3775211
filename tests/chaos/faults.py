"""What goes wrong in a chaos run, and with cache services: a fault strikes on entry, and is over on exit."""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.network import Network
from tests.chaos.oracle import Oracle
from tests.chaos.process import Process
from tests.chaos.world import CACHES, WORKERS, World


@dataclass
class Scene:
    """Where a fault strikes: `number` is the cache service or worker that it is for."""

    world: World
    oracle: Oracle
    dice: random.Random
    number: int
    gone: set[int] = field(default_factory=set)
    """Entries that need not be there any more, unless they are shared: their service's bytes were damaged."""

    @property
    def cache(self) -> Process:
        return self.world.caches[self.number]

    def process(self, who: str) -> Process:
        """The one that a fault of `who` is for."""
        several = {"cache": self.world.caches, "worker": self.world.workers}.get(who)
        return several[self.number] if several else self.world.gateway

    @property
    def data(self) -> Path:
        return self.world.data(self.number)

    @property
    def network(self) -> Network:
        assert self.world.network is not None
        return self.world.network

    def let_go(self, end: bool = True) -> None:
        """From now on this cache service may lose what it was given. It is killed before this returns, or, if it is
        not to `end`, stands still until the caller has done the damage.
        """
        if end:
            self.cache.kill9()
        else:
            self.cache.signal(signal.SIGSTOP)
        # Also what is on its way to it just now.
        self.gone |= {name for name, number in self.oracle.entries.put_at.items() if number == self.number}


Strike = Callable[[Scene], AsyncIterator[None]]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `answers_fail`: whether a question may be answered by an error meanwhile."""

    name: str
    who: str
    context: Callable[[Scene], AbstractAsyncContextManager[None]]
    weight: float
    answers_fail: bool
    needs: str

    def possible(self, world: World) -> str:
        """Empty, or what is lacking for it here."""
        return world.lacks.get(self.needs, "")


FAULTS: list[Fault] = []


def add(
    name: str, strike: Strike, who: str, weight: float = 1.0, *, answers_fail: bool = False, needs: str = ""
) -> None:
    """Lists a generator as a fault of `who`: cache, remote (the tier that they share), worker or gateway."""
    FAULTS.append(Fault(name, who, contextlib.asynccontextmanager(strike), weight, answers_fail, needs))


def fault(who: str, weight: float = 1.0, **more: Any) -> Callable[[Strike], Strike]:
    """`add` under the function's name."""

    def listed(strike: Strike) -> Strike:
        add(strike.__name__.replace("_", " "), strike, who, weight, **more)  # type: ignore[attr-defined]
        return strike

    return listed


@fault("cache", 3)
async def cache_killed(scene: Scene) -> AsyncIterator[None]:
    scene.cache.kill9()
    yield
    await scene.cache.start()


@fault("cache")
async def cache_killed_while_it_starts(scene: Scene) -> AsyncIterator[None]:
    scene.cache.kill9()
    yield
    for _ in range(2):
        scene.cache.begin()
        await asyncio.sleep(scene.dice.uniform(0, 1.5))
        scene.cache.kill9()
    await scene.cache.start()


@fault("cache", 2)
async def cache_stands_still(scene: Scene) -> AsyncIterator[None]:
    with scene.cache.still():
        yield
        # Sometimes until it counts as dead.
        await asyncio.sleep(scene.dice.choice((0, 0, 3)))


@fault("cache")
async def cache_stutters(scene: Scene) -> AsyncIterator[None]:
    async def stutter() -> None:
        while True:
            with scene.cache.still():
                await asyncio.sleep(0.3)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(stutter())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@fault("cache", 2)
async def cache_leaves_and_comes_back(scene: Scene) -> AsyncIterator[None]:
    scene.cache.signal(signal.SIGTERM)
    yield
    await scene.cache.ended()
    await scene.cache.start()


@fault("cache", 2, needs="network")
async def cache_cut_off(scene: Scene) -> AsyncIterator[None]:
    scene.network.cut(scene.cache.place)
    yield
    await asyncio.sleep(scene.dice.choice((0, 0, 3)))
    scene.network.mend(scene.cache.place)


@fault("cache", needs="network")
async def link_flaps(scene: Scene) -> AsyncIterator[None]:
    async def flap() -> None:
        try:
            while True:
                scene.network.cut(scene.cache.place)
                await asyncio.sleep(0.2)
                scene.network.mend(scene.cache.place)
                await asyncio.sleep(0.3)
        finally:
            scene.network.mend(scene.cache.place)

    task = asyncio.create_task(flap())
    yield
    task.cancel()
    await asyncio.wait([task])


@fault("cache", 2, needs="network")
async def partition(scene: Scene) -> AsyncIterator[None]:
    """Two of caches and workers do not reach each other; both reach everybody else."""
    others = [p for p in (*scene.world.caches, *scene.world.workers) if p is not scene.cache]
    parted = [scene.cache.place, *(p.place for p in scene.dice.sample(others, scene.dice.choice((1, 2))))]
    scene.network.part(parted, True)
    yield
    scene.network.part(parted, False)


@fault("cache", needs="clock")
async def clock_jumps(scene: Scene) -> AsyncIterator[None]:
    clock = scene.world.clocks[scene.cache.name]
    clock.jump(scene.dice.choice((-86_400, -3600, -5, 5, 3600, 86_400, 400 * 86_400)))
    yield
    if scene.dice.random() < 0.7:  # else it stays wrong
        clock.jump(0)


def targets(who: str) -> int:
    """How many of them there are."""
    return {"cache": CACHES, "worker": WORKERS}.get(who, 1)
