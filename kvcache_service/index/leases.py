"""Leases, which protect entries from eviction until they expire or are released."""

import heapq
import secrets
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from fusionkv.protos.runtime.errors import ResourceExhausted


class Leasable(Protocol):
    leases: int


T = TypeVar("T", bound=Leasable)


class Leases(Generic[T]):
    """Active leases by id. `clock` is monotonic, in seconds; `ended` is called when an entry loses its last lease."""

    def __init__(self, limit: int, clock: Callable[[], float], ended: Callable[[T], None]) -> None:
        self._limit = limit
        self._clock = clock
        self._ended = ended
        self._held: dict[int, list[T]] = {}
        self._expiry: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, entries: Iterable[T], seconds: float) -> int:
        """Leases distinct entries and returns the id of the lease.

        Raises:
            ResourceExhausted: The limit of active leases is reached.
        """
        self.expire()
        if len(self._held) >= self._limit:
            raise ResourceExhausted(
                f"{self._limit} leases are active: release leases when done, or raise max_leases in [kvcache]"
            )
        # Random, so that ids from before a restart are not reused; 0 means "no lease".
        lease = secrets.randbits(63) + 1
        self._held[lease] = list(entries)
        for entry in self._held[lease]:
            entry.leases += 1
        heapq.heappush(self._expiry, (self._clock() + seconds, lease))
        return lease

    def release(self, lease: int) -> None:
        """Ends a lease; an unknown id is ignored."""
        for entry in self._held.pop(lease, ()):
            entry.leases -= 1
            if entry.leases == 0:
                self._ended(entry)
        # The heap is rebuilt when most of its leases are released.
        if len(self._expiry) > 2 * len(self._held) + 64:
            self._expiry = [item for item in self._expiry if item[1] in self._held]
            heapq.heapify(self._expiry)

    def expire(self) -> None:
        """Ends expired leases."""
        now = self._clock()
        while self._expiry and self._expiry[0][0] <= now:
            self.release(heapq.heappop(self._expiry)[1])

    def check_integrity(self, entries: Iterable[T]) -> None:
        """Asserts that entries' lease counts match the leases, and that every lease will expire."""
        counts: dict[int, int] = {}
        for held in self._held.values():
            for entry in held:
                counts[id(entry)] = counts.get(id(entry), 0) + 1
        assert {lease for _, lease in self._expiry} >= set(self._held)
        known = {id(entry): entry.leases for entry in entries}
        assert counts == {name: n for name, n in known.items() if n}, "leases and the entries' counts disagree"
