"""Faults of links that go on working, but badly: narrow ones, on which everything queues, and lossy ones."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tests.chaos.faults import Scene, add
from tests.chaos.network import Network, Place

# Kilobits a second: an entry of 200 kB takes from 25 s to half a second.
_NARROW = (64, 500, 4000)
_LOST = (0.01, 0.1, 0.3)


def _list(
    who: str, name: str, place: Callable[[Scene], Place], weight: float = 1.0, *, answers_fail: bool = False
) -> None:
    """Lists both faults of a process's link."""
    for kind, shape, values in (("narrow", Network.narrow, _NARROW), ("lossy", Network.lose, _LOST)):

        async def strike(scene: Scene, shape: Any = shape, values: Sequence[float] = values) -> AsyncIterator[None]:
            shape(scene.network, place(scene), scene.dice.choice(values))
            try:
                yield
            finally:
                scene.network.sound(place(scene))

        add(f"{name} on a {kind} link", strike, who, weight, answers_fail=answers_fail, needs="tc")


_list("cache", "cache", lambda scene: scene.cache.place, 2)
_list("remote", "remote tier", lambda scene: scene.world.remote_place)
_list("worker", "worker", lambda scene: scene.world.workers[scene.number].place, answers_fail=True)
