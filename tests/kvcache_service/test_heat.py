"""Heat orders entries as the decayed frequency does, at any time; the queue gives the coldest first."""

import math
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionkv.kvcache_service.index import heat
from fusionkv.kvcache_service.index.heat import ColdQueue

HALF_LIFE = 60.0
times = st.lists(st.floats(1.7e9, 1.7e9 + 3600), min_size=1, max_size=8).map(sorted)


def heat_of(accesses: list[float]) -> float:
    value = accesses[0] / HALF_LIFE
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


heats = st.one_of(st.floats(0, 9), st.sampled_from([0.0, 1.0, 2.0]))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "warm", "pass"]), st.integers(0, 9), heats), max_size=80))
def test_queue_gives_the_coldest_first(steps: list[tuple[str, int, float]]) -> None:
    heat_of_row, places = array("d", [0.0] * 10), array("q", [-1] * 10)
    queue = ColdQueue(heat_of_row, places)
    members: list[int] = []
    for step, which, amount in steps:
        if step == "add" and places[which] < 0:
            # A row's number is given out again, with any heat.
            heat_of_row[which], places[which] = amount, 4096 * which
            queue.add(which)
            members.append(which)
        elif members and step == "remove":
            row = members.pop(which % len(members))
            places[row] = -1
            queue.remove(row)
        elif members and step == "warm":
            heat_of_row[members[which % len(members)]] += amount
        given_out = list(queue.coldest(lambda row: row % 2 == 0))
        assert sorted(given_out) == sorted(row for row in members if row % 2 == 0)
        assert [heat_of_row[row] for row in given_out] == sorted(heat_of_row[row] for row in given_out)
        assert len(queue) == len(members)
        queue.check_integrity()


def test_a_queue_forgets_what_left() -> None:
    heats, places = array("d", map(float, range(1000))), array("q", range(1000))
    queue = ColdQueue(heats, places)
    for row in range(1000):
        queue.add(row)
    for row in range(10, 1000):
        places[row] = -1
        queue.remove(row)
    assert len(queue._heap) <= 2 * 10 + 64
    assert list(queue.coldest(lambda _: True)) == list(range(10))
    queue.check_integrity()


NO_HEATS = (None, b"", b"1234567", *(struct.pack("<d", number) for number in (-1.0, -0.0, math.nan, math.inf)))


@pytest.mark.parametrize("kept", NO_HEATS)
def test_what_is_no_heat_is_the_coldest(kept: bytes | None) -> None:
    assert math.copysign(1, heat.stored(kept)) == 1
    assert heat.stored(kept) == 0


def test_heat_is_kept() -> None:
    assert heat.stored(struct.pack("<d", 2.5)) == 2.5
