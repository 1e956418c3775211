"""Heat: how often an entry was asked for, older accesses counting less, and the queue of the coldest."""

import heapq
import itertools
import math
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar


class Heated(Protocol):
    heat: float


T = TypeVar("T", bound=Heated)


def first(now: float, half_life: float) -> float:
    """Heat after one access at `now`, seconds since any fixed time."""
    return now / half_life


def again(heat: float, now: float, half_life: float) -> float:
    """Heat after one more access.

    With accesses at times t, the decayed frequency at time s is the sum of 2^((t - s) / half_life). Its logarithm
    is log2(sum 2^(t / half_life)) - s / half_life, and the second part is the same for all entries. So the first
    part alone orders them at any time: nothing has to be decayed, and heat never falls.
    """
    t = now / half_life
    high, low = max(heat, t), min(heat, t)
    return high + math.log2(1.0 + 2.0 ** max(low - high, -1000.0))


class ColdQueue(Generic[T]):
    """The members of one tier, the coldest first.

    Heat never falls, so the heat noted at the last visit is a lower bound, and a member is only moved when it comes
    to the front with an old note: an access costs nothing here.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._members: dict[int, int] = {}  # id of the member -> ticket of its one valid note
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: T) -> None:
        ticket = next(self._tickets)
        self._members[id(member)] = ticket
        heapq.heappush(self._heap, (member.heat, ticket, member))

    def remove(self, member: T) -> None:
        del self._members[id(member)]
        # A removed member's note stays until it comes to the front; more than half being such, all are dropped.
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [note for note in self._heap if self._members.get(id(note[2])) == note[1]]
            heapq.heapify(self._heap)

    def coldest(self, may_go: Callable[[T], bool]) -> Generator[T]:
        """The members that `may_go`, the coldest first; all of them are members still afterwards."""
        seen: list[tuple[float, int, T]] = []
        try:
            while self._heap:
                heat, ticket, member = heapq.heappop(self._heap)
                if self._members.get(id(member)) != ticket:
                    continue
                if member.heat != heat:
                    heapq.heappush(self._heap, (member.heat, ticket, member))
                    continue
                seen.append((heat, ticket, member))
                if may_go(member):
                    yield member
        finally:
            for note in seen:
                heapq.heappush(self._heap, note)

    def check_integrity(self) -> None:
        valid = [note for note in self._heap if self._members.get(id(note[2])) == note[1]]
        assert len(valid) == len(self._members)
        assert all(heat <= member.heat for heat, _, member in valid)
