"""Extents: no overlap, nothing lost, and no more victims than lie in the way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service.tiers.extents import Extents, NoSpace

BLOCK = 4096


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(4, 40), st.sampled_from([None, 8 * BLOCK]))
def test_random_allocations_tile_the_range(data: st.DataObject, blocks: int, boundary: int | None) -> None:
    extents = Extents(blocks * BLOCK, boundary)
    held: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        if held and data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(held)))
            extents.free(start)
            del held[start]
        else:
            size = data.draw(st.integers(1, 6 * BLOCK))
            victims = data.draw(st.permutations(sorted(held)))[: data.draw(st.integers(0, 8))]
            before = dict(held)
            try:
                start, freed = extents.allocate(size, victims)
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
    start, freed = extents.allocate(2 * BLOCK, [a, d, c])
    assert start == c
    assert sorted(freed) == [c, d], "a was looked at first, but freeing it makes no hole of two blocks"
    extents.check_integrity([a, b, c])


def test_refusal_changes_nothing() -> None:
    extents = Extents(4 * BLOCK)
    held = [extents.allocate(BLOCK)[0] for _ in range(4)]
    with pytest.raises(NoSpace):
        extents.allocate(3 * BLOCK, [held[0], held[2], held[3]])
    with pytest.raises(NoSpace):
        extents.allocate(5 * BLOCK, held)
    extents.check_integrity(held)
    assert extents.used == 4 * BLOCK


def test_no_extent_crosses_a_boundary() -> None:
    extents = Extents(8 * BLOCK, 4 * BLOCK)
    first = extents.allocate(3 * BLOCK)[0]
    second = extents.allocate(2 * BLOCK)[0]
    assert (first, second) == (0, 4 * BLOCK)
    with pytest.raises(NoSpace):
        extents.allocate(5 * BLOCK, [first, second])


def test_occupy_refuses_what_is_taken_unaligned_or_outside() -> None:
    extents = Extents(8 * BLOCK, 4 * BLOCK)
    extents.occupy(BLOCK, 2 * BLOCK)
    for start, size in [(0, 2 * BLOCK), (2 * BLOCK, 1), (BLOCK // 2, 1), (3 * BLOCK, 2 * BLOCK), (8 * BLOCK, 1)]:
        with pytest.raises(NoSpace):
            extents.occupy(start, size)
    extents.occupy(0, BLOCK)
    extents.check_integrity([0, BLOCK])
