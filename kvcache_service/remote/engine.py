"""The contract of a distributed key-value store that a remote tier stands on."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

# Of one value: a larger one holds up a Redis's other callers, a smaller one costs more calls.
BLOCK_BYTES = 1 << 20


class Engine(ABC):
    """Values of up to BLOCK_BYTES and a little more, by name. It forgets what was not touched for long, or for room.

    Methods block, and any thread may call them. No connection is made before the first call, and a lost one is made
    anew. All of them raise

        Unreachable: the store does not answer in time.
        OSError: it refuses.
    """

    @abstractmethod
    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """The value of each name, None without one; in one round trip."""

    @abstractmethod
    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Stores values under their names; a value that is there is replaced, or stays where it is the same."""

    @abstractmethod
    def touch(self, names: Sequence[str]) -> list[bool]:
        """Whether there is a value for each name; its time begins anew."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes values; names without one are no error."""

    @abstractmethod
    def remove_all(self, prefix: str) -> None:
        """Removes all values whose names begin so. It takes as long as the store is large."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connections."""
