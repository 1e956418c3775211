"""Certificates and keys that are rotated while everything runs; in a secured run."""

from collections.abc import AsyncIterator

from tests.chaos.faults import Scene, fault
from tests.chaos.secured import Secured


@fault("cache", needs="secured")
async def certificate_of_a_cache_renewed(scene: Scene) -> AsyncIterator[None]:
    _secured(scene).renew_certificate(scene.cache.name)
    yield


@fault("worker", needs="secured")
async def certificate_of_a_worker_renewed(scene: Scene) -> AsyncIterator[None]:
    _secured(scene).renew_certificate(scene.world.workers[scene.number].name)
    yield


@fault("gateway", needs="secured")
async def certificate_of_the_gateway_renewed(scene: Scene) -> AsyncIterator[None]:
    _secured(scene).renew_certificate(scene.world.gateway.name)
    yield


@fault("cache", needs="secured")
async def key_of_the_disks_renewed(scene: Scene) -> AsyncIterator[None]:
    _secured(scene).renew_key()
    yield


def _secured(scene: Scene) -> Secured:
    assert scene.world.secured is not None
    return scene.world.secured
