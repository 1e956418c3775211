"""Faults that are none when all goes well: a service is replaced by one of another version, and that by this one."""

import random
import signal
from collections.abc import AsyncIterator

from tests.chaos.answers import ASK_SECONDS, SHORT_SECONDS, UPSET
from tests.chaos.faults import Scene, fault
from tests.chaos.process import Process
from tests.chaos.versions import Version
from tests.chaos.world import World
from tests.waiting import until


@fault("cache", 2, needs="history of caches")
async def cache_of_another_version(scene: Scene) -> AsyncIterator[None]:
    await _replaced(scene.cache, scene.dice, scene.world.other)
    yield
    await _replaced(scene.cache, scene.dice)


@fault("worker", 0.5, answers_fail=True, needs="history")
async def worker_of_another_version(scene: Scene) -> AsyncIterator[None]:
    worker = scene.world.workers[scene.number]
    await _replaced(worker, scene.dice, scene.world.other)
    client = scene.world.worker_clients[scene.number]
    await until(lambda: client.answers(SHORT_SECONDS), ASK_SECONDS)
    yield
    await _replaced(worker, scene.dice)


@fault("gateway", 0.5, needs="history of gateways")
async def gateway_of_another_version(scene: Scene) -> AsyncIterator[None]:
    for version in (scene.world.other, None):
        await _replaced(scene.world.gateway, scene.dice, version)
        await until(lambda: _reached(scene.world), ASK_SECONDS)
        if version:
            yield


async def _replaced(process: Process, dice: random.Random, version: Version | None = None) -> None:
    """By one of that version, or of this one, at the same address with the same data; sometimes after a kill -9."""
    if dice.random() < 0.5:
        process.kill9()
    else:
        process.signal(signal.SIGTERM)
        await process.ended()
    await process.start(version)


async def _reached(world: World) -> bool:
    """Whether the gateway answers the connection that was there before it."""
    try:
        await world.client.list(timeout=SHORT_SECONDS)
    except UPSET:
        return False
    return True
