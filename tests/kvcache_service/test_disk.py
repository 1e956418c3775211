"""The disk tier after restarts, and after damage of every file that it has."""

import random
import shutil
from pathlib import Path
from typing import Any

import lmdb
import pytest

from fusionkv.kvcache_service.index.record import Record, encode
from fusionkv.kvcache_service.tiers import disk
from fusionkv.kvcache_service.tiers.base import Place
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.disk_index import DiskIndex
from tests.kvcache_service import tools

BLOCK = 4096
CAPACITY = 64 * BLOCK


class Filled:
    """A closed disk tier with a few entries."""

    def __init__(self, directory: Path, count: int = 6) -> None:
        self.directory = directory
        self.entries: dict[bytes, tuple[Record, Place, bytes]] = {}
        tier = DiskTier(directory, CAPACITY)
        assert list(tier.recover()) == []
        for i in range(count):
            data = tools.payload(i, 3 * BLOCK - 100 * i)
            record = tools.record(
                [tools.digest("S"), tools.digest(str(i))], data, variant=tools.digest("v") * (i % 2)
            )
            place, _ = tier.reserve(len(data))
            tier.write(place, 0, [memoryview(data)])
            tier.commit(record, place, float(i))
            self.entries[record.key] = (record, place, data)
        tier.close()
        self.keys = list(self.entries)

    @property
    def segment(self) -> Path:
        return self.directory / "segments" / "000000.kv"

    def reopened(self, survivors: list[bytes], **more: Any) -> DiskTier:
        """Opens the tier and asserts that exactly the `survivors` are there, with their bytes."""
        tier = DiskTier(self.directory, more.pop("capacity", CAPACITY), **more)
        found = list(tier.recover())
        assert {one.record.key for one in found} == set(survivors)
        for one in found:
            record, place, data = self.entries[one.record.key]
            assert (one.record, one.place) == (record, place)
            assert one.heat == self.keys.index(record.key)
            assert bytes(tier.read(place, 0, place.size)) == data
        tier.check_integrity({one.place: one.record.key for one in found})
        return tier

    def edit_index(self, key: bytes, value: bytes | None) -> None:
        with lmdb.open(str(self.directory / "index"), max_dbs=2) as env:
            records = env.open_db(b"records")
            with env.begin(write=True, db=records) as txn:
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(key, value)

    def record_bytes(self, key: bytes) -> bytes:
        record, place, _ = self.entries[key]
        return encode(record, place.offset)


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path / "data")


def test_a_restart_keeps_everything(filled: Filled) -> None:
    filled.reopened(filled.keys).close()
    filled.reopened(filled.keys).close()


def test_bytes_behind_the_last_record_are_free_space(filled: Filled) -> None:
    with open(filled.segment, "ab") as file:
        file.write(tools.payload("tail", 3 * BLOCK + 5))
    tier = filled.reopened(filled.keys)
    place, freed = tier.reserve(2 * BLOCK)
    assert freed == []
    assert place.offset < filled.segment.stat().st_size
    tier.close()


def test_entries_in_a_truncated_tail_are_dropped(filled: Filled) -> None:
    cut = filled.entries[filled.keys[3]][1].offset + 100
    with open(filled.segment, "r+b") as file:
        file.truncate(cut)
    filled.reopened(filled.keys[:3]).close()
    filled.reopened(filled.keys[:3]).close()


def test_a_missing_segment_drops_its_entries(filled: Filled) -> None:
    filled.segment.unlink()
    filled.reopened([]).close()


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_index_record_is_dropped_alone(filled: Filled, seed: int) -> None:
    rng = random.Random(seed)
    key = rng.choice(filled.keys)
    value = bytearray(filled.record_bytes(key))
    value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
    filled.edit_index(key, bytes(value))
    filled.reopened([k for k in filled.keys if k != key]).close()


@pytest.mark.parametrize("garbage", [b"", b"x", b"\0" * 500])
def test_garbage_for_an_index_record_is_dropped(filled: Filled, garbage: bytes) -> None:
    filled.edit_index(filled.keys[2], garbage)
    filled.edit_index(b"garbage key", garbage)
    filled.reopened([k for k in filled.keys if k != filled.keys[2]]).close()


def test_a_record_under_another_key_is_not_believed(filled: Filled) -> None:
    filled.edit_index(b"k" * 32, filled.record_bytes(filled.keys[0]))
    filled.reopened(filled.keys).close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_records_for_the_same_bytes_the_true_one_stays(filled: Filled, order: tuple[int, int]) -> None:
    liar, owner = (filled.keys[i] for i in order)
    filled.edit_index(liar, encode(filled.entries[liar][0], filled.entries[owner][1].offset))
    filled.reopened([k for k in filled.keys if k != liar]).close()


def test_entries_beyond_a_smaller_capacity_are_dropped(filled: Filled) -> None:
    kept = [k for k in filled.keys if filled.entries[k][1].offset + 3 * BLOCK <= 8 * BLOCK]
    assert 0 < len(kept) < len(filled.keys)
    filled.reopened(kept, capacity=8 * BLOCK).close()


@pytest.mark.parametrize("damage", [b"", b"not a database" * 1000])
def test_an_index_that_is_no_database_starts_empty(filled: Filled, damage: bytes, caplog: Any) -> None:
    path = filled.directory / "index" / "data.mdb"
    path.write_bytes(damage)
    filled.reopened([]).close()
    assert "starts empty" in caplog.text or not damage


def test_a_lost_page_of_the_index_does_not_keep_it_from_opening(tmp_path: Path, caplog: Any) -> None:
    """Zeros where a page of LMDB was: some of them would end this very process with SIGABRT."""
    whole = DiskIndex(tmp_path / "index", 1 << 26, False)
    for i in range(300):
        whole.put([(tools.record([tools.digest("S"), tools.digest(str(i))], b"data"), i * BLOCK, 1.0)])
    whole.close()
    path = tmp_path / "index" / "data.mdb"
    data = path.read_bytes()
    for page in range(2, len(data) // 4096, 5):
        path.write_bytes(data[: 4096 * page] + bytes(4096) + data[4096 * (page + 1) :])
        opened = DiskIndex(tmp_path / "index", 1 << 26, False)
        assert len(list(opened.load())) in (0, 300)
        opened.put([(tools.record([tools.digest("S"), tools.digest("new")], b"data"), 0, 1.0)])
        opened.close()
    assert "reading it ends a process with SIGABRT" in caplog.text
    path.write_bytes(data)
    opened = DiskIndex(tmp_path / "index", 1 << 26, False)
    assert len(list(opened.load())) == 300
    opened.close()


def test_one_process_a_directory(filled: Filled) -> None:
    tier = filled.reopened(filled.keys)
    with pytest.raises(OSError, match=r"is in use by process \d+: give each cache service a data_dir of its own"):
        DiskTier(filled.directory, CAPACITY)
    tier.close()
    filled.reopened(filled.keys).close()


@pytest.mark.parametrize("sync", [False, True])
def test_a_crash_of_the_machine_empties_the_tier_but_for_one_that_syncs(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    tier = filled.reopened(filled.keys, sync=sync)
    # As a process that wrote through it leaves it when the machine stops.
    copy = filled.directory.with_name("copy")
    shutil.copytree(filled.directory, copy)
    tier.close()
    shutil.rmtree(filled.directory)
    copy.rename(filled.directory)
    monkeypatch.setattr(disk, "_boot_id", lambda: "another boot")
    filled.reopened(filled.keys if sync else []).close()


def test_a_restart_of_the_machine_after_a_clean_stop_loses_nothing(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_boot_id", lambda: "another boot")
    filled.reopened(filled.keys).close()


def test_a_read_behind_the_end_is_an_error(filled: Filled) -> None:
    tier = filled.reopened(filled.keys)
    with open(filled.segment, "r+b") as file:
        file.truncate(10)
    with pytest.raises(OSError, match="truncated"):
        tier.read(filled.entries[filled.keys[0]][1], 0, 100)
    tier.close()
