"""How long a request may wait for the cache service in all: lookups and fetches, however often they are repeated."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# gRPC and asyncio take no time at all for an error; the lookup that comes too late fails by its deadline.
_LEAST = 0.001


class Deadline:
    """Seconds that are left of `seconds`; what the request waits for otherwise, room in the pool say, costs none."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    @property
    def left(self) -> float:
        return max(_LEAST, self._left)

    @contextmanager
    def spending(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._left -= time.monotonic() - began
