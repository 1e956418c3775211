"""Heat orders entries as the decayed frequency does, at any time; the queue gives the coldest first."""

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from fusionkv.kvcache_service import heat
from fusionkv.kvcache_service.heat import ColdQueue

HALF_LIFE = 60.0
times = st.lists(st.floats(1.7e9, 1.7e9 + 3600), min_size=1, max_size=8).map(sorted)


def heat_of(accesses: list[float]) -> float:
    value = heat.first(accesses[0], HALF_LIFE)
    for time in accesses[1:]:
        value = heat.again(value, time, HALF_LIFE)
    return value


@given(times, times, st.floats(0, 36000))
def test_order_is_that_of_the_decayed_frequency(a: list[float], b: list[float], later: float) -> None:
    now = 1.7e9 + 3600 + later
    frequency_a, frequency_b = (sum(2 ** ((t - now) / HALF_LIFE) for t in accesses) for accesses in (a, b))
    if math.isclose(frequency_a, frequency_b, rel_tol=1e-6):
        return
    assert (heat_of(a) > heat_of(b)) == (frequency_a > frequency_b)


def test_an_access_a_half_life_ago_weighs_half() -> None:
    recent = heat_of([1000.0])
    two_old = heat_of([1000.0 - HALF_LIFE] * 2)
    assert math.isclose(recent, two_old, abs_tol=1e-9)


@dataclass(eq=False)
class Member:
    heat: float


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "warm", "pass"]), st.integers(0, 9), st.floats(0, 9))))
def test_queue_gives_the_coldest_first(steps: list[tuple[str, int, float]]) -> None:
    queue: ColdQueue[Member] = ColdQueue()
    members: list[Member] = []
    for step, which, amount in steps:
        if step == "add":
            members.append(Member(amount))
            queue.add(members[-1])
        elif members and step == "remove":
            queue.remove(members.pop(which % len(members)))
        elif members and step == "warm":
            members[which % len(members)].heat += amount
        even = [m for m in members if int(m.heat) % 2 == 0]
        given_out = list(queue.coldest(lambda m: int(m.heat) % 2 == 0))
        assert [m.heat for m in given_out] == sorted(m.heat for m in even)
        assert len(queue) == len(members)
        queue.check_integrity()
