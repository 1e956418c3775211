"""One contract suite over every tier of a service's own; that of the remote tier is test_remote_tier.py."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionkv.kvcache_service.tiers.base import Place, Tier
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.extents import NoSpace
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.sealed_disk import DiskKeys, SealedDiskTier
from tests.kvcache_service import tools

BLOCK = 4096
CAPACITY = 16 * BLOCK


@pytest.fixture(params=["memory", "disk", "disk with sync", "disk, encrypted"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Tier
    if request.param == "memory":
        made = MemoryTier(CAPACITY)
    elif "encrypted" in request.param:
        (tmp_path / "keys").write_text(os.urandom(32).hex())
        made = SealedDiskTier(tmp_path / "data", CAPACITY, DiskKeys(tmp_path / "keys"))
    else:
        made = DiskTier(tmp_path / "data", CAPACITY, sync="sync" in request.param)
    assert request.param.startswith(made.name)
    assert list(made.recover()) == []
    yield made
    made.close()


def store(tier: Tier, data: bytes) -> Place:
    place, freed = tier.reserve(len(data))
    assert freed == []
    tier.write(place, 0, [memoryview(data)])
    return place


def content(tier: Tier, place: Place) -> bytes:
    return bytes(tier.read(place, 0, place.size))


def test_bytes_come_back_whatever_the_pieces(tier: Tier) -> None:
    data = tools.payload("a", 3 * BLOCK + 17)
    place, _ = tier.reserve(len(data))
    view = memoryview(data)
    tier.write(place, 0, [view[:1], view[1:1], view[1:5000]])
    tier.write(place, 5000, [view[5000:]])
    assert content(tier, place) == data
    assert bytes(tier.read(place, 4000, 200)) == data[4000:4200]
    tier.check_integrity({place: None})


def test_neighbours_don_t_touch(tier: Tier) -> None:
    sizes = [1, BLOCK, BLOCK + 1, 2 * BLOCK - 1]
    places = {store(tier, tools.payload(size, size)): size for size in sizes}
    for place, size in places.items():
        assert content(tier, place) == tools.payload(size, size)
        assert place.offset % BLOCK == 0
    assert tier.used_bytes == (1 + 1 + 2 + 2) * BLOCK
    assert tier.capacity_bytes == CAPACITY
    tier.check_integrity(dict.fromkeys(places))


def test_what_is_over_the_capacity_is_refused(tier: Tier) -> None:
    with pytest.raises(NoSpace):
        tier.reserve(CAPACITY + 1)
    place, _ = tier.reserve(CAPACITY)
    with pytest.raises(NoSpace):
        tier.reserve(1)
    tier.free(place)
    assert tier.used_bytes == 0
    tier.check_integrity({})


def test_victims_make_room_and_their_space_is_used_again(tier: Tier) -> None:
    old = [store(tier, tools.payload(i, 4 * BLOCK)) for i in range(4)]
    place, freed = tier.reserve(8 * BLOCK, [old[3], old[1], old[2]])
    assert sorted(freed) == [old[1].offset, old[2].offset] or sorted(freed) == [old[2].offset, old[3].offset]
    data = tools.payload("new", 8 * BLOCK)
    tier.write(place, 0, [memoryview(data)])
    kept = [p for p in old if p.offset not in freed]
    assert content(tier, place) == data
    assert [content(tier, p) for p in kept] == [tools.payload(old.index(p), 4 * BLOCK) for p in kept]
    tier.check_integrity(dict.fromkeys([place, *kept]))


def test_refusal_frees_no_victim(tier: Tier) -> None:
    old = [store(tier, tools.payload(i, 4 * BLOCK)) for i in range(4)]
    with pytest.raises(NoSpace):
        tier.reserve(9 * BLOCK, [old[0], old[2], old[3]])
    assert [content(tier, p) for p in old] == [tools.payload(i, 4 * BLOCK) for i in range(4)]
    tier.check_integrity(dict.fromkeys(old))


def test_commit_and_forget_of_entries(tier: Tier) -> None:
    data = tools.payload("a", 5000)
    record = tools.record([tools.digest("S")], data)
    place = store(tier, data)
    tier.commit(record, place, 1.5)
    tier.save_heat([(record.key, 2.5), (b"u" * 32, 1.0)])
    tier.check_integrity({place: record.key})
    tier.forget([(record.key, place), (b"u" * 32, place)])
    tier.check_integrity({place: None})
    assert content(tier, place) == data, "forgotten, but the place is still the owner's"


def test_forget_leaves_a_key_that_is_at_another_place_now(tier: Tier) -> None:
    data = tools.payload("a", 5000)
    record = tools.record([tools.digest("S")], data)
    first, second = store(tier, data), store(tier, data)
    tier.commit(record, first, 0.0)
    tier.commit(record, second, 0.0)
    tier.forget([(record.key, first)])
    tier.check_integrity({first: None, second: record.key})
