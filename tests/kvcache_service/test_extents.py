"""Extents: no overlap, nothing lost, and no more victims than lie in the way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service.tiers.extents import Extents, NoSpace, Place
from tests.examples import examples

BLOCK = 4096


def places(held: dict[int, int]) -> dict[Place, bytes | None]:
    """From sizes by start."""
    return {Place(start, size): None for start, size in held.items()}


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.integers(4, 40), st.sampled_from([None, 8 * BLOCK]))
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


def test_eviction_takes_only_what_lies_in_the_way() -> None:
    extents = Extents(4 * BLOCK)
    a, b, c, d = (extents.reserve(BLOCK)[0] for _ in range(4))
    place, freed = extents.reserve(2 * BLOCK, [a, d, c])
    assert place == Place(c.offset, 2 * BLOCK)
    assert sorted(freed) == [c.offset, d.offset], "a was looked at first, but freeing it makes no hole of two blocks"
    extents.check_integrity(dict.fromkeys([a, b, place]))


def test_refusal_changes_nothing() -> None:
    extents = Extents(4 * BLOCK)
    held = [extents.reserve(BLOCK)[0] for _ in range(4)]
    with pytest.raises(NoSpace):
        extents.reserve(3 * BLOCK, [held[i] for i in (0, 2, 3)])
    with pytest.raises(NoSpace):
        extents.reserve(5 * BLOCK, held)
    extents.check_integrity(dict.fromkeys(held))
    assert extents.used_bytes == 4 * BLOCK


def test_no_extent_crosses_a_boundary() -> None:
    extents = Extents(8 * BLOCK, 4 * BLOCK)
    first = extents.reserve(3 * BLOCK)[0]
    second = extents.reserve(2 * BLOCK)[0]
    assert (first.offset, second.offset) == (0, 4 * BLOCK)
    with pytest.raises(NoSpace):
        extents.reserve(5 * BLOCK, [first, second])


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


def test_overlapping_extents_are_not_restored() -> None:
    with pytest.raises(AssertionError, match="overlap"):
        Extents(8 * BLOCK).restore(np.array([0, BLOCK]), np.array([BLOCK + 1, 1]))
