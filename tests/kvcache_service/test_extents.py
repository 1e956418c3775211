"""Extents: no overlap, nothing lost, and no more victims than lie in the way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service.tiers.extents import Extents, NoSpace
from tests.examples import examples

BLOCK = 4096


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.integers(4, 40), st.sampled_from([None, 8 * BLOCK]))
def test_random_allocations_tile_the_range(data: st.DataObject, blocks: int, boundary: int | None) -> None:
    extents = Extents(blocks * BLOCK, boundary)
    held: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        if held and data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(held)))
            extents.free(start, held.pop(start))
        else:
            size = data.draw(st.integers(1, 6 * BLOCK))
            victims = data.draw(st.permutations(sorted(held)))[: data.draw(st.integers(0, 8))]
            before = dict(held)
            try:
                start, freed = extents.allocate(size, [(victim, held[victim]) for victim in victims])
            except NoSpace:
                assert held == before
            else:
                assert set(freed) <= set(victims)
                for victim in freed:
                    length = -(-held.pop(victim) // BLOCK) * BLOCK
                    assert victim < start + size
                    assert start < victim + length, "a victim that was not in the way"
                held[start] = size
        extents.check_integrity(held)


def test_eviction_takes_only_what_lies_in_the_way() -> None:
    extents = Extents(4 * BLOCK)
    a, b, c, d = (extents.allocate(BLOCK)[0] for _ in range(4))
    start, freed = extents.allocate(2 * BLOCK, [(v, BLOCK) for v in (a, d, c)])
    assert start == c
    assert sorted(freed) == [c, d], "a was looked at first, but freeing it makes no hole of two blocks"
    extents.check_integrity({a: BLOCK, b: BLOCK, c: 2 * BLOCK})


def test_refusal_changes_nothing() -> None:
    extents = Extents(4 * BLOCK)
    held = [extents.allocate(BLOCK)[0] for _ in range(4)]
    with pytest.raises(NoSpace):
        extents.allocate(3 * BLOCK, [(held[i], BLOCK) for i in (0, 2, 3)])
    with pytest.raises(NoSpace):
        extents.allocate(5 * BLOCK, [(v, BLOCK) for v in held])
    extents.check_integrity(dict.fromkeys(held, BLOCK))
    assert extents.used == 4 * BLOCK


def test_no_extent_crosses_a_boundary() -> None:
    extents = Extents(8 * BLOCK, 4 * BLOCK)
    first = extents.allocate(3 * BLOCK)[0]
    second = extents.allocate(2 * BLOCK)[0]
    assert (first, second) == (0, 4 * BLOCK)
    with pytest.raises(NoSpace):
        extents.allocate(5 * BLOCK, [(first, 3 * BLOCK), (second, 2 * BLOCK)])


def test_what_can_be_an_extent() -> None:
    extents = Extents(8 * BLOCK, 4 * BLOCK)
    cases = {
        (0, 2 * BLOCK): True,
        (3 * BLOCK, BLOCK): True,
        (7 * BLOCK, 1): True,
        (BLOCK // 2, 1): False,
        (3 * BLOCK, BLOCK + 1): False,
        (8 * BLOCK, 1): False,
        (-BLOCK, 1): False,
        (0, 0): False,
    }
    starts, sizes = np.array(list(cases), np.int64).T
    assert extents.fit(starts, sizes).tolist() == list(cases.values())


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * BLOCK)), max_size=12), st.sampled_from([None, 8 * BLOCK]))
def test_restored_extents_leave_the_rest_free(pieces: list[tuple[bool, int]], boundary: int | None) -> None:
    whole = Extents(96 * BLOCK, boundary)
    taken: dict[int, int] = {}
    for keep, size in pieces:
        start, _ = whole.allocate(size)
        if keep:
            taken[start] = size
    held = list(taken.items())[::-1]
    extents = Extents(96 * BLOCK, boundary)
    extents.restore(np.array([s for s, _ in held], np.int64), np.array([n for _, n in held], np.int64))
    extents.check_integrity(taken)
    for start, size in held:
        extents.free(start, size)
    extents.check_integrity({})


def test_overlapping_extents_are_not_restored() -> None:
    with pytest.raises(AssertionError, match="overlap"):
        Extents(8 * BLOCK).restore(np.array([0, BLOCK]), np.array([BLOCK + 1, 1]))
