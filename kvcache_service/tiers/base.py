"""The contract of a tier: a bounded place for bytes, that may outlive the process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.tiers.extents import Extents


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry's bytes are within a tier."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """An entry that a durable tier had when it was opened."""

    record: Record
    place: Place
    heat: float


class Unreachable(OSError):
    """A tier does not answer now. What is in it may well be there still, so nothing is to be deleted for it."""


class Tier(ABC):
    """Space for entries, and their bytes. What is an entry, and who may use it, is the store's business.

    `reserve`, `free` and the properties are for the event loop's thread and don't block. All else may be called from
    any thread, and blocks when `blocking` is set. A place belongs to whoever reserved it until it is freed, and
    nobody reads or writes a freed one: the store holds a pin or the reservation meanwhile.
    """

    name: str
    """As the contract's Tier: "memory", "disk", "remote"."""
    blocking: bool
    """Whether bytes are moved by system calls that may wait, so that a thread has to do it."""

    def __init__(self, extents: Extents) -> None:
        self._extents = extents

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes taken, each entry rounded up to 4096."""
        return self._extents.used

    def reserve(self, size: int, victims: Iterable[Place] = ()) -> tuple[Place, list[int]]:
        """Takes a place for `size` bytes; also gives the offsets of the victims that were freed for it.

        `victims` may go, the first to go first; only as many are freed as lie in the way.

        Raises:
            NoSpace: `size` is over what the tier can ever hold, or not even all victims make room. Nothing changed.
        """
        start, freed = self._extents.allocate(size, ((victim.offset, victim.size) for victim in victims))
        return Place(start, size), freed

    def free(self, place: Place) -> None:
        """Gives a place back."""
        self._extents.free(place.offset, place.size)

    @abstractmethod
    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        """Writes pieces one after the other, the first at byte `at` of the place.

        Raises:
            OSError: the bytes can't be written.
        """

    @abstractmethod
    def read(self, place: Place, at: int, size: int) -> memoryview:
        """`size` bytes from byte `at` of the place; valid until the place is freed.

        Raises:
            OSError: the bytes can't be read, or are not there any more.
        """

    @abstractmethod
    def commit(self, record: Record, place: Place, heat: float) -> None:
        """After it the entry survives the process, if the tier does; all its bytes are written before.

        Raises:
            OSError: it can't be recorded.
        """

    @abstractmethod
    def forget(self, entries: Sequence[tuple[bytes, Place]]) -> None:
        """Ends what `commit` began, for (key, place): after it the entries don't come back at a restart.

        A key that was committed again at another place since is left alone.

        Raises:
            OSError: it can't be recorded.
        """

    @abstractmethod
    def save_heat(self, heats: Sequence[tuple[bytes, float]]) -> None:
        """Keeps the heat of entries, by key, for the next start.

        Raises:
            OSError: it can't be recorded.
        """

    @abstractmethod
    def recover(self) -> Iterator[Recovered]:
        """What is there at start, each at a place that is reserved now. Called once, before any change, to its end.

        Raises:
            OSError: it can't be used.
        """

    def finder(self) -> Callable[[bytes], Recovered | None]:
        """Finds single entries by key until `recover` ends, which it precedes. Their places are not reserved."""
        return lambda key: None

    def claim(self, place: Place) -> bool:
        """Reserves a place that the finder gave, after `recover`; False where another entry has some of its bytes."""
        return self._extents.claim(place.offset, place.size)

    @abstractmethod
    def close(self) -> None:
        """Ends the use of the tier; all that was committed is on its device."""

    def check_integrity(self, held: Mapping[Place, bytes | None]) -> None:
        """Asserts that the places taken are those `held`: the key by place, None where a write is under way."""
        self._extents.check_integrity({place.offset: place.size for place in held})
