"""Faults of the remote tier behind the cache services, and of the workers and the gateway before them."""

import asyncio
from collections.abc import AsyncIterator

from tests.chaos.faults import Scene, Strike, add, fault
from tests.system.redis_process import RedisServer


@fault("remote", 2)
async def remote_tier_killed(scene: Scene) -> AsyncIterator[None]:
    """It comes back empty."""
    scene.world.remote.kill9()
    yield
    await asyncio.to_thread(scene.world.remote.start)


@fault("remote", 2)
async def remote_tier_stands_still(scene: Scene) -> AsyncIterator[None]:
    with scene.world.remote.still():
        yield
        await asyncio.sleep(scene.dice.choice((0, 0, 3)))


@fault("remote", 2, needs="redis")
async def redis_slow(scene: Scene) -> AsyncIterator[None]:
    delay = scene.dice.choice((0.02, 0.1, 0.4, 2.0))
    for relay in scene.world.relays:
        relay.delay = delay
    yield
    for relay in scene.world.relays:
        relay.delay = 0.0


@fault("cache", 2, needs="redis")
async def redis_out_of_reach_of_a_cache(scene: Scene) -> AsyncIterator[None]:
    """The others go on with it."""
    relay = scene.world.relays[scene.number]
    relay.shut = True
    relay.part()
    try:
        yield
    finally:
        relay.shut = False


@fault("remote", needs="redis")
async def redis_flushed(scene: Scene) -> AsyncIterator[None]:
    with _redis(scene).client() as client:
        await asyncio.to_thread(client.flushall)
    yield


@fault("remote", 2, needs="redis")
async def redis_fails_over(scene: Scene) -> AsyncIterator[None]:
    """Its replica is promoted, and the address that all know leads there; sometimes without the last writes."""
    world, primary = scene.world, _redis(scene)
    replica = await asyncio.to_thread(primary.replica)
    try:
        if scene.dice.random() < 0.5:
            # What is written from now on, the replica never sees.
            await asyncio.to_thread(replica.promote)
            await asyncio.gather(*(scene.oracle.entries.put_one() for _ in range(3)))
    finally:
        primary.kill9()
        world.remote = replica
    yield
    await asyncio.to_thread(replica.promote)
    for relay in world.relays:
        relay.aim(replica.address)


@fault("remote", needs="redis")
async def redis_loses_writes(scene: Scene) -> AsyncIterator[None]:
    """Some of what was written is not there any more."""
    with _redis(scene).client() as client:
        names = sorted(await asyncio.to_thread(client.keys, "fusionkv:*"))
        lost = [name for name in names if scene.dice.random() < 0.5]
        if lost:
            await asyncio.to_thread(client.delete, *lost)
    yield


@fault("remote", needs="redis")
async def redis_full(scene: Scene) -> AsyncIterator[None]:
    with _redis(scene).client() as client:
        await asyncio.to_thread(client.config_set, "maxmemory", 1)
        yield
        await asyncio.to_thread(client.config_set, "maxmemory", 0)


@fault("remote", needs="network")
async def remote_tier_cut_off(scene: Scene) -> AsyncIterator[None]:
    scene.network.cut(scene.world.remote_place)
    yield
    await asyncio.sleep(scene.dice.choice((0, 3)))
    scene.network.mend(scene.world.remote_place)


@fault("remote", needs="clock of the remote tier")
async def clock_of_the_remote_tier_jumps(scene: Scene) -> AsyncIterator[None]:
    """Forwards by a day, and all that is there has expired."""
    scene.world.remote_clock.jump(scene.dice.choice((-30, 30, 86_400)))
    yield
    scene.world.remote_clock.jump(0)


def _clock_jumps(who: str) -> Strike:
    async def strike(scene: Scene) -> AsyncIterator[None]:
        clock = scene.world.clocks[scene.process(who).name]
        clock.jump(scene.dice.choice((-86_400, -30, 30, 86_400)))
        yield
        clock.jump(0)

    return strike


def _killed(who: str) -> Strike:
    """While it answers."""

    async def strike(scene: Scene) -> AsyncIterator[None]:
        asking = asyncio.create_task(scene.oracle.traffic())
        await asyncio.sleep(scene.dice.uniform(0, 0.5))
        scene.process(who).kill9()
        yield
        await asking
        await scene.process(who).start()

    return strike


def _stands_still(who: str) -> Strike:
    async def strike(scene: Scene) -> AsyncIterator[None]:
        with scene.process(who).still():
            yield

    return strike


for _who, _name, _weight in (("worker", "a worker", 1), ("gateway", "the gateway", 0.5)):
    add(f"clock of {_name} jumps", _clock_jumps(_who), _who, needs="clock")
    add(f"{_who} killed", _killed(_who), _who, 0.5, answers_fail=True)
    add(f"{_who} stands still", _stands_still(_who), _who, _weight, answers_fail=True)


@fault("worker", 1, answers_fail=True, needs="network")
async def worker_cut_off(scene: Scene) -> AsyncIterator[None]:
    place = scene.world.workers[scene.number].place
    scene.network.cut(place)
    yield
    scene.network.mend(place)


def _redis(scene: Scene) -> RedisServer:
    assert isinstance(scene.world.remote, RedisServer)
    return scene.world.remote
