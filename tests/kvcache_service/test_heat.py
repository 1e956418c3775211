"""Heat, extents, tables and leases, each against a model of itself."""

import hashlib
import math
import struct
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service.index import heat
from fusionkv.kvcache_service.index.heat import ColdQueue
from fusionkv.kvcache_service.index.rows import DigestTable
from fusionkv.kvcache_service.store.entries import Leases
from fusionkv.kvcache_service.tiers.extents import Extents, NoSpace, Place
from tests.examples import examples
from tests.kvcache_service import tools

HALF_LIFE = 60.0
times = st.lists(st.floats(1.7e9, 1.7e9 + 3600), min_size=1, max_size=8).map(sorted)


def heat_of(accesses: list[float]) -> float:
    value = accesses[0] / HALF_LIFE
    for time in accesses[1:]:
        value = heat.after_access(value, time / HALF_LIFE)
    return value


@given(times)
def test_heat_is_the_logarithm_of_the_decayed_frequency(accesses: list[float]) -> None:
    frequency = sum(2 ** ((time - accesses[-1]) / HALF_LIFE) for time in accesses)
    assert math.isclose(heat_of(accesses) - accesses[-1] / HALF_LIFE, math.log2(frequency), abs_tol=1e-6)


heats = st.one_of(st.floats(0, 9), st.sampled_from([0.0, 1.0, 2.0]))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "warm", "pass"]), st.integers(0, 9), heats), max_size=80))
def test_queue_gives_the_coldest_first(steps: list[tuple[str, int, float]]) -> None:
    heat_of_row, places = array("d", [0.0] * 10), array("q", [-1] * 10)
    queue = ColdQueue(heat_of_row, lambda row: places[row] >= 0)
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
    queue = ColdQueue(heats, lambda row: places[row] >= 0)
    for row in range(1000):
        queue.add(row)
    for row in range(10, 1000):
        places[row] = -1
        queue.remove(row)
    assert len(queue._heap) <= 2 * 10 + 64
    assert list(queue.coldest(lambda _: True)) == list(range(10))
    queue.check_integrity()


NO_HEATS = (None, b"", b"1234567", *(struct.pack("<d", number) for number in (-1.0, -0.0, math.nan, math.inf)))


@pytest.mark.parametrize(("kept", "expected"), [*((kept, 0.0) for kept in NO_HEATS), (struct.pack("<d", 2.5), 2.5)])
def test_heat_is_kept_and_what_is_none_is_the_coldest(kept: bytes | None, expected: float) -> None:
    assert heat.decode(kept) == expected
    assert math.copysign(1, heat.decode(kept)) == 1


BLOCK = 4096


def places(held: dict[int, int]) -> dict[Place, bytes | None]:
    """From sizes by start."""
    return {Place(start, size): None for start, size in held.items()}


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.integers(4, 40), st.sampled_from([None, 4 * BLOCK, 8 * BLOCK]))
def test_random_allocations_tile_the_range(data: st.DataObject, blocks: int, boundary: int | None) -> None:
    extents = Extents(blocks * BLOCK, boundary)
    held: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        if held and data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(held)))
            extents.free(Place(start, held.pop(start)))
        else:
            size = data.draw(st.integers(1, 6 * BLOCK))
            victims = data.draw(st.permutations(sorted(held)))[: data.draw(st.integers(0, 8))]
            before = dict(held)
            try:
                place, freed = extents.reserve(size, [Place(victim, held[victim]) for victim in victims])
            except NoSpace:
                assert held == before
            else:
                assert set(freed) <= set(victims)
                for victim in freed:
                    length = -(-held.pop(victim) // BLOCK) * BLOCK
                    assert victim < place.offset + size
                    assert place.offset < victim + length, "a victim that was not in the way"
                held[place.offset] = size
        extents.check_integrity(places(held))


@pytest.mark.parametrize("seed", range(20))
def test_the_coldest_range_is_that_of_a_search_of_all(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    boundary, pages = int(numbers.integers(16, 40)), int(numbers.integers(20, 90))
    places: list[Place] = []
    extents = Extents(pages * 4096, boundary * 4096)
    while len(places) < 30:
        try:
            places.append(extents.reserve(int(numbers.integers(1, 12_000)))[0])
        except NoSpace:
            break
    starts = np.array([place.offset for place in places], np.int64)
    sizes = np.array([place.size for place in places], np.int64)
    heats = numbers.permutation(len(places)).astype(np.float64)
    heats[numbers.random(len(places)) < 0.1] = np.inf

    def hottest(start: int, end: int) -> float:
        inside = (starts < end) & (starts + sizes > start)
        return float(heats[inside].max(initial=-np.inf))

    for length in (1, 8, 16):
        whole = [
            at * 4096
            for at in range(pages - length + 1)
            if at // boundary == (at + length - 1) // boundary and at % boundary % max(1, length // 8) == 0
        ]
        best = min((hottest(at, at + length * 4096) for at in whole), default=np.inf)
        start, end = extents.coldest_range(length * 4096, starts, sizes, heats)
        assert (end - start == length * 4096) == (best < np.inf)
        assert end == 0 or hottest(start, end) == best


def test_what_can_be_an_extent() -> None:
    extents = Extents(8 * BLOCK, 4 * BLOCK)
    fit = [(0, 2 * BLOCK), (3 * BLOCK, BLOCK), (7 * BLOCK, 1)]
    # Not aligned, across a boundary or the end, without bytes, and over one that begins before.
    unfit = [(BLOCK // 2, 1), (3 * BLOCK, BLOCK + 1), (8 * BLOCK, 1), (-BLOCK, 1), (0, 0), (BLOCK, 1), (0, 1)]
    starts, sizes = np.array([*fit, *unfit], np.int64).T
    assert extents.fit(starts, sizes).tolist() == [True] * len(fit) + [False] * len(unfit)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * BLOCK)), max_size=12), st.sampled_from([None, 8 * BLOCK]))
def test_restored_extents_leave_the_rest_free(pieces: list[tuple[bool, int]], boundary: int | None) -> None:
    whole = Extents(96 * BLOCK, boundary)
    taken: dict[int, int] = {}
    for keep, size in pieces:
        place, _ = whole.reserve(size)
        if keep:
            taken[place.offset] = size
    held = list(taken.items())[::-1]
    extents = Extents(96 * BLOCK, boundary)
    extents.restore(np.array([s for s, _ in held], np.int64), np.array([n for _, n in held], np.int64))
    extents.check_integrity(places(taken))
    for start, size in held:
        extents.free(Place(start, size))
    extents.check_integrity({})


# Few shards and few homes: long runs of taken slots that wrap around the end.
digests = st.tuples(st.sampled_from([0, 255]), st.sampled_from([0, 6, 7, 255, 2**32 - 1])).map(
    lambda parts: bytes([parts[0]]) + parts[1].to_bytes(4) + b"rest"
)


@given(st.lists(st.tuples(st.booleans(), digests, st.integers(0, 40)), max_size=150))
def test_table_agrees_with_a_dictionary(steps: list[tuple[bool, bytes, int]]) -> None:
    table, model = DigestTable(), dict[bytes, set[int]]()
    for add, digest, row in steps:
        rows = model.setdefault(digest, set())
        if add and row not in rows:
            table.add(digest, row)
            rows.add(row)
        elif not add and row in rows:
            table.remove(digest, row)
            rows.remove(row)
        elif not add:
            with pytest.raises(KeyError):
                table.remove(digest, row)
        table.check_integrity()
        found = list(table.rows(digest))
        assert sorted(found) == sorted(rows)
    assert len(table) == sum(map(len, model.values()))
    assert all(sorted(table.rows(digest)) == sorted(rows) for digest, rows in model.items())


def test_many_rows_are_found_and_no_others() -> None:
    digests = [hashlib.sha256(str(i).encode()).digest() for i in range(6000)]
    table = DigestTable()
    for row, digest in enumerate(digests[:4000]):
        table.add(digest, row)
    table.check_integrity()
    assert all(row in table.rows(digest) for row, digest in enumerate(digests[:4000]))
    assert sum(len(list(table.rows(digest))) for digest in digests[4000:]) <= 1
    for row, digest in enumerate(digests[:3000]):
        table.remove(digest, row)
    table.check_integrity()
    assert len(table) == 1000
    assert all(row in table.rows(digest) for row, digest in enumerate(digests[3000:4000], 3000))


@dataclass(eq=False)
class Thing:
    leases: int = 0


def test_the_last_lease_to_end_is_reported() -> None:
    clock, ended = tools.Clock(), []
    leases = Leases(10, clock, ended.append)
    thing, other = Thing(), Thing()
    first, second = leases.grant([thing, other], 5), leases.grant([thing], 9)
    assert first != second
    leases.release(first)
    assert ended == [other]
    leases.release(first)
    clock.now += 8.999
    leases.expire()
    assert (ended, len(leases)) == ([other], 1)
    clock.now += 0.002
    leases.expire()
    assert (ended, len(leases)) == ([other, thing], 0)


@given(st.lists(st.tuples(st.sampled_from(["grant", "release", "wait"]), st.integers(0, 300)), max_size=300))
def test_counts_agree_and_nothing_piles_up(steps: list[tuple[str, int]]) -> None:
    now, things = [0.0], [Thing() for _ in range(4)]
    leases = Leases(1000, lambda: now[0], lambda thing: None)
    granted: list[int] = []
    for step, n in steps:
        if step == "grant":
            granted.append(leases.grant(things[: n % 5], 1 + n))
        elif step == "release" and granted:
            leases.release(granted.pop(n % len(granted)))
        elif step == "wait":
            now[0] += n / 10
            leases.expire()
        leases.check_integrity(things)
        assert len(leases._expiry) <= 2 * len(leases) + 65
