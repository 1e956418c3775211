"""The interface of a storage tier: bounded space for entries' bytes, persistent or not."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.tiers.extents import Extents, Place
from fusionkv.protos.runtime.checksum import Checksum
from fusionkv.protos.runtime.frames import FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Recovered:
    """An entry that a persistent tier contained when it was opened."""

    record: EntryRecord
    place: Place
    heat: float


class Unreachable(OSError):
    """A tier is temporarily unreachable. Its entries may still exist, so they must not be deleted."""


class Tier(Extents, ABC):
    """Allocates space and moves bytes; the store tracks entries, leases and pins.

    `reserve`, `free` and the sizes must be used on the event loop's thread and do not block. All
    other methods are thread-safe, block if `blocking` is set, and raise OSError if bytes cannot be read or written,
    or a change cannot be recorded. A place is valid from its reservation until it is freed: the store keeps the
    reservation or a pin on the entry during every read and write.
    """

    name: str
    """Name of the tier in the API's enum `Tier`: "memory" or "disk"."""
    blocking: bool
    """Whether reads and writes may block, so that they must run in a thread."""

    @abstractmethod
    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        """Writes consecutive pieces, starting at byte `at` of the place."""

    @abstractmethod
    def read(self, place: Place, at: int, size: int) -> memoryview:
        """`size` bytes from byte `at` of the place; valid until the place is freed."""

    def copy(self, place: Place, copies: "Mapping[Tier, Place]") -> bytes:
        """Copies a place to other tiers; returns the checksum of its bytes."""
        hasher = Checksum()
        for at in range(0, place.size, FRAME_BYTES):
            piece = self.read(place, at, min(FRAME_BYTES, place.size - at))
            hasher.update(piece)
            for tier, copy in copies.items():
                tier.write(copy, at, [piece])
        return hasher.digest()

    # A tier that is not persistent keeps the following methods.

    def commit(self, record: EntryRecord, place: Place, heat: float) -> None:
        """Makes an entry persistent. All its bytes must be written before."""

    def forget(self, entries: Sequence[tuple[bytes, Place]]) -> None:
        """Makes entries, as (key, place), non-persistent: a restart does not recover them.

        A key that has since been committed at another place is kept.
        """

    def save_heat(self, heats: Sequence[tuple[bytes, float]]) -> None:
        """Persists heat by key, for the next start."""

    def recover(self) -> Iterator[Recovered]:
        """Yields all persisted entries, and reserves their places. Called once, before any change, and exhausted."""
        return iter(())

    @abstractmethod
    def close(self) -> None:
        """Closes the tier, with all committed entries flushed to its device."""
