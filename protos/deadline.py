"""A request's deadline: one moment that calls pass on, instead of seconds that go stale on the way.

A parameter `deadline` is that moment; `timeout` is a limit of one call in seconds.
"""

import math
import time
from dataclasses import dataclass

# gRPC and asyncio treat a timeout of 0 as an error; with 1 ms, a call that begins too late fails by its deadline.
_MIN_SECONDS = 0.001


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A moment of this process's monotonic clock; `min` of several is the earliest.

    at: seconds, as `time.monotonic` counts them; infinite without a deadline.
    """

    at: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The moment in so many seconds."""
        return cls(time.monotonic() + seconds)

    @property
    def exists(self) -> bool:
        return self.at < math.inf

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at

    def remaining(self) -> float:
        """Seconds left, at least 0.001; infinite without a deadline."""
        return max(_MIN_SECONDS, self.at - time.monotonic())

    def timeout(self) -> float | None:
        """`remaining` as gRPC takes it: None without a deadline."""
        return self.remaining() if self.exists else None

    def extended(self, seconds: float) -> "Deadline":
        """A deadline so many seconds later."""
        return Deadline(self.at + seconds)


NO_DEADLINE = Deadline()
