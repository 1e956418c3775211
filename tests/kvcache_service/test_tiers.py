"""One contract suite over every tier of a service's own; the disk tier after restarts and damage."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest

from fusionkv.kvcache_service.index.record import EntryRecord, encode
from fusionkv.kvcache_service.tiers import boot_mark
from fusionkv.kvcache_service.tiers.base import Place, Tier
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.extents import NoSpace
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.sealed_disk import SealedDiskTier
from fusionkv.kvcache_service.tiers.segments import SEGMENT_BYTES
from tests.kvcache_service import tools
from tests.kvcache_service.tools import payload, write

BLOCK = 4096
CAPACITY = 16 * BLOCK


@pytest.fixture(params=["memory", "disk", "disk with sync", "disk, encrypted"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Tier
    if request.param == "memory":
        made = MemoryTier(CAPACITY)
    elif "encrypted" in request.param:
        made = SealedDiskTier(tmp_path / "data", CAPACITY, tools.disk_keys(tmp_path / "keys", os.urandom(32)))
    else:
        made = DiskTier(tmp_path / "data", CAPACITY, sync="sync" in request.param)
    assert request.param.startswith(made.name)
    assert list(made.recover()) == []
    yield made
    made.close()


def content(tier: Tier, place: Place) -> bytes:
    return bytes(tier.read(place, 0, place.size))


def test_bytes_come_back_whatever_the_pieces(tier: Tier) -> None:
    data = payload("a", 3 * BLOCK + 17)
    place, _ = tier.reserve(len(data))
    view = memoryview(data)
    tier.write(place, 0, [view[:1], view[1:1], view[1:5000]])
    tier.write(place, 5000, [view[5000:]])
    assert content(tier, place) == data
    assert bytes(tier.read(place, 4000, 200)) == data[4000:4200]
    tier.check_integrity({place: None})


def test_neighbours_don_t_touch(tier: Tier) -> None:
    sizes = [1, BLOCK, BLOCK + 1, 2 * BLOCK - 1]
    places = {write(tier, payload(size, size)): size for size in sizes}
    for place, size in places.items():
        assert content(tier, place) == payload(size, size)
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
    old = [write(tier, payload(i, 4 * BLOCK)) for i in range(4)]
    place, freed = tier.reserve(8 * BLOCK, [old[3], old[1], old[2]])
    assert sorted(freed) == [old[1].offset, old[2].offset] or sorted(freed) == [old[2].offset, old[3].offset]
    data = payload("new", 8 * BLOCK)
    tier.write(place, 0, [memoryview(data)])
    kept = [p for p in old if p.offset not in freed]
    assert content(tier, place) == data
    assert [content(tier, p) for p in kept] == [payload(old.index(p), 4 * BLOCK) for p in kept]
    tier.check_integrity(dict.fromkeys([place, *kept]))


def test_refusal_frees_no_victim(tier: Tier) -> None:
    old = [write(tier, payload(i, 4 * BLOCK)) for i in range(4)]
    with pytest.raises(NoSpace):
        tier.reserve(9 * BLOCK, [old[0], old[2], old[3]])
    assert [content(tier, p) for p in old] == [payload(i, 4 * BLOCK) for i in range(4)]
    tier.check_integrity(dict.fromkeys(old))


def test_commit_and_forget_of_entries(tier: Tier) -> None:
    data = payload("a", 5000)
    record, place = tools.record("S", data), write(tier, data)
    tier.commit(record, place, 1.5)
    tier.save_heat([(record.key, 2.5), (b"u" * 32, 1.0)])
    tier.check_integrity({place: record.key})
    tier.forget([(record.key, place), (b"u" * 32, place)])
    tier.check_integrity({place: None})
    assert content(tier, place) == data, "forgotten, but the place is still the owner's"


def test_forget_leaves_a_key_that_is_at_another_place_now(tier: Tier) -> None:
    data = payload("a", 5000)
    record, first, second = tools.record("S", data), write(tier, data), write(tier, data)
    for place in (first, second):
        tier.commit(record, place, 0.0)
    tier.forget([(record.key, first)])
    tier.check_integrity({first: None, second: record.key})


LARGE = 64 * BLOCK


class Filled:
    """A closed disk tier with a few entries."""

    def __init__(self, directory: Path, count: int = 6) -> None:
        self.directory = directory
        self.entries: dict[bytes, tuple[EntryRecord, Place, bytes]] = {}
        tier = DiskTier(directory, LARGE)
        assert list(tier.recover()) == []
        for i in range(count):
            data = payload(i, 3 * BLOCK - 100 * i)
            record, place = tools.record(f"S{i}", data, variant=b"v" * 32 * (i % 2)), write(tier, data)
            tier.commit(record, place, float(i))
            self.entries[record.key] = (record, place, data)
        tier.close()
        self.keys = list(self.entries)

    @property
    def segment(self) -> Path:
        return self.directory / "segments" / "000000.kv"

    def reopened(self, survivors: list[bytes], **more: Any) -> DiskTier:
        """Opens the tier and asserts that exactly the `survivors` are there, with their bytes."""
        tier = DiskTier(self.directory, more.pop("capacity", LARGE), **more)
        found = list(tier.recover())
        assert {one.record.key for one in found} == set(survivors)
        for one in found:
            record, place, data = self.entries[one.record.key]
            assert (one.record, one.place) == (record, place)
            assert one.heat == self.keys.index(record.key)
            assert bytes(tier.read(place, 0, place.size)) == data
        tier.check_integrity({one.place: one.record.key for one in found})
        return tier

    def edit_index(self, key: bytes, value: bytes) -> None:
        with lmdb.open(str(self.directory / "index"), max_dbs=2) as env, env.begin(write=True) as txn:
            txn.put(key, value, db=env.open_db(b"records", txn))

    def record_bytes(self, key: bytes) -> bytes:
        record, place, _ = self.entries[key]
        return encode(record, place.offset)


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path / "data")


def test_bytes_behind_the_last_record_are_free_space(filled: Filled) -> None:
    with open(filled.segment, "ab") as file:
        file.write(payload("tail", 3 * BLOCK + 5))
    tier = filled.reopened(filled.keys)
    place, freed = tier.reserve(2 * BLOCK)
    assert freed == []
    assert place.offset < filled.segment.stat().st_size
    tier.close()


@pytest.mark.parametrize("left", [0, 3])
def test_entries_in_a_truncated_tail_or_a_missing_segment_are_dropped(filled: Filled, left: int) -> None:
    if left:
        os.truncate(filled.segment, filled.entries[filled.keys[left]][1].offset + 100)
    else:
        filled.segment.unlink()
    for _ in range(2):
        filled.reopened(filled.keys[:left]).close()


def flipped(value: bytes, seed: int) -> bytes:
    rng, damaged = random.Random(seed), bytearray(value)
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


@pytest.mark.parametrize(
    "damage",
    [*(partial(flipped, seed=seed) for seed in range(4)), *(lambda _, to=to: to for to in (b"", b"\0" * 500))],
)
def test_a_damaged_index_record_is_dropped_alone(filled: Filled, damage: Callable[[bytes], bytes]) -> None:
    key = filled.keys[2]
    filled.edit_index(key, damage(filled.record_bytes(key)))
    filled.edit_index(b"garbage key", damage(b"garbage"))
    # A record under another key is not believed either.
    filled.edit_index(b"k" * 32, filled.record_bytes(filled.keys[0]))
    filled.reopened([k for k in filled.keys if k != key]).close()


def test_of_two_records_for_the_same_bytes_one_stays(filled: Filled) -> None:
    one, other = filled.keys[:2]
    filled.edit_index(one, encode(filled.entries[one][0], filled.entries[other][1].offset))
    tier = DiskTier(filled.directory, LARGE)
    left = {found.record.key: found.place for found in tier.recover()}
    assert set(left) in ({*filled.keys} - {one}, {*filled.keys} - {other})
    tier.check_integrity({place: key for key, place in left.items()})
    tier.close()


def test_entries_beyond_a_smaller_capacity_are_dropped(filled: Filled) -> None:
    kept = [k for k in filled.keys if filled.entries[k][1].offset + 3 * BLOCK <= 8 * BLOCK]
    assert 0 < len(kept) < len(filled.keys)
    filled.reopened(kept, capacity=8 * BLOCK).close()
    assert filled.segment.stat().st_size == 8 * BLOCK, "what it took beyond is free"


def test_segment_files_beyond_a_smaller_capacity_are_removed(tmp_path: Path) -> None:
    keys, data = tools.disk_keys(tmp_path / "keys", bytes(32)), memoryview(payload("a", BLOCK))
    tier = SealedDiskTier(tmp_path / "data", 3 * SEGMENT_BYTES, keys)
    assert list(tier.recover()) == []
    for segment in range(3):
        place, stored = Place(tier.reserve(SEGMENT_BYTES)[0].offset, BLOCK), tools.record(f"S{segment}", bytes(data))
        tier.write(place, 0, [data])
        tier.commit(stored, place, 1.0)
    tier.close()
    (tmp_path / "data/segments/000002.seal").unlink()
    tier = SealedDiskTier(tmp_path / "data", SEGMENT_BYTES, keys)
    assert [found.place.offset for found in tier.recover()] == [0]
    tier.close()
    assert sorted(file.name for file in (tmp_path / "data/segments").iterdir()) == ["000000.kv", "000000.seal"]


def test_one_process_a_directory(filled: Filled) -> None:
    tier = filled.reopened(filled.keys)
    with pytest.raises(OSError, match=r"is in use by process \d+: give each cache service a data_dir of its own"):
        DiskTier(filled.directory, LARGE)
    tier.close()
    filled.reopened(filled.keys).close()


def test_stray_files_do_not_stop_a_start_and_data_is_private(filled: Filled) -> None:
    filled.directory.chmod(0o755)
    for name in ("x", "segments/x", "segments/x.kv", "segments/7.kv.old"):
        (filled.directory / name).write_text("x")
        os.mkfifo(filled.directory / f"{name}.fifo")
    os.mkfifo(filled.segment.with_name("000007.kv"))
    filled.reopened(filled.keys).close()
    assert filled.directory.stat().st_mode & 0o777 == 0o700
    (filled.directory / "boot").unlink()
    os.mkfifo(filled.directory / "boot")
    with pytest.raises(OSError, match="boot is not a file: remove it"):
        DiskTier(filled.directory, LARGE)


@pytest.mark.parametrize(("sync", "changed"), [(False, True), (True, True), (False, False)])
def test_a_crash_of_the_machine_empties_a_tier_that_was_changed_without_sync(
    filled: Filled, monkeypatch: Any, sync: bool, changed: bool
) -> None:
    """And not one of a service that was still loading its index, or was stopped then."""
    tier = filled.reopened(filled.keys, sync=sync)
    if changed:
        tier.save_heat([(filled.keys[0], 0.0)])
    # As a process that wrote through it leaves it when the machine stops.
    copy = filled.directory.with_name("copy")
    shutil.copytree(filled.directory, copy)
    tier.close()
    shutil.rmtree(filled.directory)
    copy.rename(filled.directory)
    monkeypatch.setattr(boot_mark, "_boot_id", lambda: "another boot")
    filled.reopened([] if changed and not sync else filled.keys).close()


@pytest.mark.parametrize("sync", [False, True])
def test_names_of_files_are_flushed_before_a_put_is(tmp_path: Path, monkeypatch: Any, sync: bool) -> None:
    """Otherwise a crash of the machine may leave a file without its name, or an index with that of its old file."""
    fsync, flushed, data = os.fsync, dict[str, dict[str, int]](), tmp_path / "data"

    def recorded(file: int) -> None:
        fsync(file)
        folder = os.readlink(f"/proc/self/fd/{file}")
        if os.path.isdir(folder):
            flushed[folder] = {entry.name: entry.inode() for entry in os.scandir(folder)}

    monkeypatch.setattr(os, "fsync", recorded)
    for start in range(2):
        flushed.clear()
        tier = DiskTier(data, LARGE, sync=sync)
        assert len(list(tier.recover())) == start
        for name in ("segments", "index", "index/data.mdb"):
            file = data / name
            assert flushed[str(file.parent)][file.name] == file.stat().st_ino
        place = write(tier, b"data")
        assert "000000.kv" in flushed[str(data / "segments")]
        tier.commit(tools.record("S"), place, 1.0)
        tier.close()


def test_an_index_stays_untrusted_where_the_start_that_discards_it_ends(filled: Filled, monkeypatch: Any) -> None:
    """Otherwise, entries that were deleted before the crash of the machine might come back."""

    class Killed(BaseException):
        pass

    def in_use(mark: boot_mark.BootMark) -> None:
        written(mark)
        raise Killed

    (filled.directory / "boot").write_text("another boot")
    written = boot_mark.BootMark.in_use
    tier = DiskTier(filled.directory, LARGE)
    with monkeypatch.context() as killing:
        killing.setattr(boot_mark.BootMark, "in_use", in_use)
        with pytest.raises(Killed):
            list(tier.recover())
    tier.close()
    filled.reopened([]).close()


def test_a_garbled_mark_empties_a_tier(filled: Filled) -> None:
    (filled.directory / "boot").write_bytes(b"\xff" * 64)
    filled.reopened([]).close()


def test_a_restart_of_the_machine_after_a_clean_stop_loses_nothing(filled: Filled, monkeypatch: Any) -> None:
    monkeypatch.setattr(boot_mark, "_boot_id", lambda: "another boot")
    filled.reopened(filled.keys).close()


def test_a_truncated_segment_is_named(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "data", 2 * SEGMENT_BYTES)
    with pytest.raises(OSError, match=r"segment 1 of .* is truncated"):
        tier.read(Place(SEGMENT_BYTES, BLOCK), 0, BLOCK)
    tier.close()
