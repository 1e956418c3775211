"""Faults of links that go on working, but badly: narrow ones, on which everything queues, and lossy ones."""

import contextlib
from collections.abc import AsyncIterator, Iterator

from tests.chaos.faults import Scene, fault
from tests.chaos.network import Place

# Kilobits a second: an entry of 200 kB takes from 25 s to half a second.
_NARROW = (64, 500, 4000)
_LOST = (0.01, 0.1, 0.3)


@contextlib.contextmanager
def _bad(scene: Scene, place: Place, lossy: bool = False) -> Iterator[None]:
    if lossy:
        scene.network.lose(place, scene.dice.choice(_LOST))
    else:
        scene.network.narrow(place, scene.dice.choice(_NARROW))
    try:
        yield
    finally:
        scene.network.sound(place)


@fault("cache", 2, needs="tc")
async def cache_on_a_narrow_link(scene: Scene) -> AsyncIterator[None]:
    with _bad(scene, scene.cache.place):
        yield


@fault("cache", 2, needs="tc")
async def cache_on_a_lossy_link(scene: Scene) -> AsyncIterator[None]:
    with _bad(scene, scene.cache.place, lossy=True):
        yield


@fault("remote", needs="tc")
async def remote_tier_on_a_narrow_link(scene: Scene) -> AsyncIterator[None]:
    with _bad(scene, scene.world.remote_place):
        yield


@fault("remote", needs="tc")
async def remote_tier_on_a_lossy_link(scene: Scene) -> AsyncIterator[None]:
    with _bad(scene, scene.world.remote_place, lossy=True):
        yield


@fault("worker", answers_fail=True, needs="tc")
async def worker_on_a_narrow_link(scene: Scene) -> AsyncIterator[None]:
    with _bad(scene, scene.world.workers[scene.number].place):
        yield


@fault("worker", answers_fail=True, needs="tc")
async def worker_on_a_lossy_link(scene: Scene) -> AsyncIterator[None]:
    with _bad(scene, scene.world.workers[scene.number].place, lossy=True):
        yield
