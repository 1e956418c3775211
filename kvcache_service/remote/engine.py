"""The interface of a distributed key-value store, as backend of the remote tier."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

# Size of a value: larger ones block other clients of a Redis, smaller ones need more calls.
BLOCK_BYTES = 1 << 20


class Engine(ABC):
    """Stores values of slightly more than BLOCK_BYTES by name. Values expire, or are evicted.

    Methods block and are thread-safe. They connect on first use, and reconnect after a loss. All of them raise

        Unreachable: The store does not respond in time.
        OSError: The store returns an error.
    """

    @abstractmethod
    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Values by name, None if missing, in one round trip."""

    @abstractmethod
    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Stores (name, value) pairs. Existing values are replaced, or kept if equal."""

    @abstractmethod
    def touch(self, names: Sequence[str]) -> list[bool]:
        """Renews the time to live of values; returns whether each exists."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes values; missing ones are ignored."""

    @abstractmethod
    def remove_all(self, prefix: str) -> None:
        """Removes all values whose names have a prefix. Takes time proportional to the size of the store."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections."""
