"""The interface of a storage tier: bounded space for entries' bytes, persistent or not."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.tiers.extents import Extents


@dataclass(frozen=True, slots=True)
class Place:
    """Location of an entry's bytes within a tier, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """An entry that a persistent tier contained when it was opened."""

    record: Record
    place: Place
    heat: float


class Unreachable(OSError):
    """A tier is temporarily unreachable. Its entries may still exist, so they must not be deleted."""


class Tier(ABC):
    """Allocates space and moves bytes; the store tracks entries, leases and pins.

    `reserve`, `claim`, `free` and the properties must be called on the event loop's thread and do not block. All
    other
    methods are thread-safe and block if `blocking` is set. A place is valid from its reservation until it is freed:
    the store keeps the reservation or a pin on the entry during every read and write.
    """

    name: str
    """Name of the tier in the API's enum `Tier`: "memory", "disk", "remote"."""
    blocking: bool
    """Whether reads and writes may block, so that they must run in a thread."""

    def __init__(self, extents: Extents) -> None:
        self._extents = extents

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity

    @property
    def used_bytes(self) -> int:
        """Allocated bytes; each entry is rounded up to a multiple of 4096."""
        return self._extents.used

    def reserve(self, size: int, victims: Iterable[Place] = ()) -> tuple[Place, list[int]]:
        """Allocates a place for `size` bytes, and frees victims if there is no hole of that size.

        Args:
            victims: Places that may be freed, in order of preference. Only those that overlap the new place are
            freed.

        Returns:
            The place, and the offsets of the freed victims.

        Raises:
            NoSpace: `size` exceeds the capacity, or freeing all victims is not enough. Nothing was changed.
        """
        start, freed = self._extents.allocate(size, ((victim.offset, victim.size) for victim in victims))
        return Place(start, size), freed

    def free(self, place: Place) -> None:
        """Frees a place."""
        self._extents.free(place.offset, place.size)

    @abstractmethod
    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        """Writes consecutive pieces, starting at byte `at` of the place.

        Raises:
            OSError: The bytes cannot be written.
        """

    @abstractmethod
    def read(self, place: Place, at: int, size: int) -> memoryview:
        """`size` bytes from byte `at` of the place; valid until the place is freed.

        Raises:
            OSError: The bytes cannot be read, or are gone.
        """

    @abstractmethod
    def commit(self, record: Record, place: Place, heat: float) -> None:
        """Makes an entry persistent, in a persistent tier. All its bytes must be written before.

        Raises:
            OSError: The change cannot be recorded.
        """

    @abstractmethod
    def forget(self, entries: Sequence[tuple[bytes, Place]]) -> None:
        """Makes entries, as (key, place), non-persistent: a restart does not recover them.

        A key that has since been committed at another place is kept.

        Raises:
            OSError: The change cannot be recorded.
        """

    @abstractmethod
    def save_heat(self, heats: Sequence[tuple[bytes, float]]) -> None:
        """Persists heat by key, for the next start.

        Raises:
            OSError: The change cannot be recorded.
        """

    @abstractmethod
    def recover(self) -> Iterator[Recovered]:
        """Yields all persisted entries, and reserves their places. Called once, before any change, and exhausted.

        Raises:
            OSError: The tier cannot be used.
        """

    def finder(self) -> Callable[[bytes], Recovered | None]:
        """Returns a lookup of persisted entries by key, until `recover` ends. It reserves no places."""
        return lambda key: None

    def claim(self, place: Place) -> bool:
        """Reserves a place that `finder` returned, after `recover`; False if it overlaps another entry's place."""
        return self._extents.claim(place.offset, place.size)

    @abstractmethod
    def close(self) -> None:
        """Closes the tier, with all committed entries flushed to its device."""

    def check_integrity(self, held: Mapping[Place, bytes | None]) -> None:
        """Asserts that the allocated places are those in `held`: key by place, None for a write in progress."""
        self._extents.check_integrity({place.offset: place.size for place in held})
