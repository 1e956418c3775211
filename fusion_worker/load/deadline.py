"""A request's total time budget for the cache service, over all its lookups and fetches."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# gRPC and asyncio treat a timeout of 0 as an error; with 1 ms, a late lookup fails by its deadline.
_MIN_SECONDS = 0.001


class Deadline:
    """A budget of seconds. Only time within `spending` counts, not waiting for room in the pool, for example."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    @property
    def left(self) -> float:
        """Seconds left, at least 0.001."""
        return max(_MIN_SECONDS, self._left)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Subtracts the seconds spent inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._left -= time.monotonic() - began
