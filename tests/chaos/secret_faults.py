"""Certificates and keys that are rotated while everything runs; in a secured run."""

from collections.abc import AsyncIterator

from tests.chaos.faults import Scene, Strike, add, fault
from tests.chaos.secured import Secured


def _certificate_renewed(who: str) -> Strike:
    async def strike(scene: Scene) -> AsyncIterator[None]:
        _secured(scene).renew_certificate(scene.process(who).name)
        yield

    return strike


for _who, _name in (("cache", "a cache"), ("worker", "a worker"), ("gateway", "the gateway")):
    add(f"certificate of {_name} renewed", _certificate_renewed(_who), _who, needs="secured")


@fault("cache", needs="secured")
async def key_of_the_disks_renewed(scene: Scene) -> AsyncIterator[None]:
    _secured(scene).renew_key()
    yield


def _secured(scene: Scene) -> Secured:
    assert scene.world.secured is not None
    return scene.world.secured
