"""Leases: which entries somebody is about to use, and until when."""

import heapq
import secrets
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from fusionkv.protos.runtime.errors import ResourceExhausted


class Leasable(Protocol):
    leases: int


T = TypeVar("T", bound=Leasable)


class Leases(Generic[T]):
    """Live leases by id. `clock` is monotonic seconds; `ended` is called with an entry that lost its last lease."""

    def __init__(self, limit: int, clock: Callable[[], float], ended: Callable[[T], None]) -> None:
        self._limit = limit
        self._clock = clock
        self._ended = ended
        self._held: dict[int, list[T]] = {}
        self._expiry: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, entries: Iterable[T], seconds: float) -> int:
        """Leases entries (each named once) under a new id.

        Raises:
            ResourceExhausted: there are as many leases as allowed.
        """
        self.expire()
        if len(self._held) >= self._limit:
            raise ResourceExhausted(
                f"{self._limit} leases are out: release leases when done, or raise max_leases in [kvcache]"
            )
        # Random, so that an id from before a restart is not somebody else's now; 0 says "no lease".
        lease = secrets.randbits(63) + 1
        self._held[lease] = list(entries)
        for entry in self._held[lease]:
            entry.leases += 1
        heapq.heappush(self._expiry, (self._clock() + seconds, lease))
        return lease

    def release(self, lease: int) -> None:
        """Ends a lease; an unknown id does nothing."""
        for entry in self._held.pop(lease, ()):
            entry.leases -= 1
            if entry.leases == 0:
                self._ended(entry)
        # Notes of released leases are dropped when they are the majority.
        if len(self._expiry) > 2 * len(self._held) + 64:
            self._expiry = [note for note in self._expiry if note[1] in self._held]
            heapq.heapify(self._expiry)

    def expire(self) -> None:
        """Ends the leases whose time is over."""
        now = self._clock()
        while self._expiry and self._expiry[0][0] <= now:
            self.release(heapq.heappop(self._expiry)[1])

    def check_integrity(self, entries: Iterable[T]) -> None:
        """Every entry counts as many leases as hold it, and every lease will expire."""
        counts: dict[int, int] = {}
        for held in self._held.values():
            for entry in held:
                counts[id(entry)] = counts.get(id(entry), 0) + 1
        assert {lease for _, lease in self._expiry} >= set(self._held)
        known = {id(entry): entry.leases for entry in entries}
        assert counts == {name: n for name, n in known.items() if n}, "leases and the entries' counts disagree"
