"""Encryption at rest: nothing readable on the disk, and whatever does not open is a miss and no error."""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.kvcache_service.__main__ import make_store
from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.sealed_disk import BLOCK_BYTES, DiskKeys, SealedDiskTier
from fusionkv.protos.runtime.watched import ID_BYTES, BadFile
from tests.kvcache_service import tools
from tests.system.cache_process import MIB, payload
from tests.waiting import wait_until

SIZES = [1, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5000]
FIRST, SECOND, THIRD = (bytes([n]) * 32 for n in (1, 2, 3))
SECOND_ID = hashlib.sha256(SECOND).digest()[:ID_BYTES]


def opened(tmp_path: Path, *raw: bytes) -> "contextlib.closing[SealedDiskTier]":
    return contextlib.closing(SealedDiskTier(tmp_path / "data", 64 * MIB, tools.disk_keys(tmp_path / "keys", *raw)))


def fill(tier: DiskTier) -> dict[int, bytes]:
    """Entries of all sizes; their bytes by offset."""
    stored = {}
    for size in SIZES:
        data = payload(size, size)
        place, _ = tier.reserve(size)
        for at in range(0, size, 300_000):
            tier.write(place, at, [memoryview(data)[at : at + 300_000]])
        tier.commit(tools.record([tools.digest(str(size))], data), place, 1.0)
        stored[place.offset] = data
    return stored


def unreadable(tier: SealedDiskTier) -> int:
    """How many of the entries that the tier has can't be read."""
    failed = 0
    for found in tier.recover():
        try:
            tier.read(found.place, 0, found.place.size)
        except OSError:
            failed += 1
    return failed


@settings(deadline=None)
@given(st.lists(st.integers(1, 700_000), min_size=1, max_size=6), st.data())
def test_any_pieces_come_back_at_any_range(tmp_path_factory: Any, pieces: list[int], draw: st.DataObject) -> None:
    data, at = os.urandom(sum(pieces)), 0
    start = draw.draw(st.integers(0, len(data) - 1))
    length = draw.draw(st.integers(1, len(data) - start))
    with opened(tmp_path_factory.mktemp("any"), FIRST) as tier:
        place, _ = tier.reserve(len(data))
        for size in pieces:
            tier.write(place, at, [memoryview(data)[at : at + size]])
            at += size
        assert bytes(tier.read(place, start, length)) == data[start : start + length]


def test_entries_outlive_a_restart_and_are_nowhere_in_the_clear(tmp_path: Path) -> None:
    with opened(tmp_path, FIRST) as tier:
        stored = fill(tier)
    on_disk = b"".join(file.read_bytes() for file in (tmp_path / "data").rglob("*") if file.is_file())
    for data in stored.values():
        if len(data) > 16:
            assert data[:16] not in on_disk
            assert data[-16:] not in on_disk
    with opened(tmp_path, FIRST) as again:
        assert {f.place.offset: bytes(again.read(f.place, 0, f.place.size)) for f in again.recover()} == stored


def test_no_nonce_comes_twice_even_for_the_same_bytes_at_the_same_place(tmp_path: Path) -> None:
    seals, texts = set(), set()
    with opened(tmp_path, FIRST) as tier:
        for _ in range(50):
            place = tools.write(tier, bytes(5000))
            seals.add((tmp_path / "data/segments/000000.seal").read_bytes()[4:16])
            texts.add((tmp_path / "data/segments/000000.kv").read_bytes()[:5000])
            tier.free(place)
    assert len(seals) == len(texts) == 50


def test_keys_rotate(tmp_path: Path) -> None:
    with opened(tmp_path, FIRST) as tier:
        fill(tier)
    with opened(tmp_path, SECOND, FIRST) as tier:
        assert unreadable(tier) == 0
        place = tools.write(tier, bytes(5000))
        # While it runs: the file is looked at once a second.
        tools.disk_keys(tmp_path / "keys", THIRD)
        wait_until(lambda: tier._keys.find(SECOND_ID) is None)
        with pytest.raises(OSError, match="its key is unknown"):
            tier.read(place, 0, 5000)
    with opened(tmp_path, THIRD) as tier:
        assert unreadable(tier) == len(SIZES)


@pytest.mark.parametrize("ending", ["kv", "seal"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "zero", "swap"])
def test_damage_is_met_when_it_is_read(tmp_path: Path, ending: str, damage: str) -> None:
    with opened(tmp_path, FIRST) as tier:
        data = payload("x", 2 * BLOCK_BYTES)
        place = tools.write(tier, data)
        file = tmp_path / f"data/segments/000000.{ending}"
        raw, unit = bytearray(file.read_bytes()), (BLOCK_BYTES if ending == "kv" else 32)
        second = unit if ending == "kv" else BLOCK_BYTES // 4096 * 32
        if damage == "flip":
            raw[second + unit // 2] ^= 1
        elif damage == "truncate":
            del raw[second + unit // 2 :]
        elif damage == "zero":
            raw[second : second + unit] = bytes(unit)
        else:
            raw[:unit], raw[second : second + unit] = raw[second : second + unit], raw[:unit]
        file.write_bytes(raw)
        with pytest.raises(OSError, match=r"damaged|truncated|not encrypted"):
            tier.read(place, 0, len(data))
        if damage != "swap":
            assert bytes(tier.read(place, 0, BLOCK_BYTES)) == data[:BLOCK_BYTES]


@pytest.mark.parametrize("text", ["", "\n\n", "00", "zz" * 32, FIRST.hex() + "\n" + FIRST.hex(), "01" * 31])
def test_a_bad_file_of_keys_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(BadFile, match="the disk keys") as raised:
        DiskKeys(tmp_path / "keys")
    assert "zz" not in str(raised.value)
    assert "0101" not in str(raised.value)


def test_what_was_stored_before_encryption_is_unreadable(tmp_path: Path) -> None:
    with contextlib.closing(DiskTier(tmp_path / "data", 64 * MIB)) as plain:
        fill(plain)
    with opened(tmp_path, FIRST) as tier:
        assert unreadable(tier) == len(SIZES)


def test_a_start_without_the_key_that_encrypted_last_is_refused(tmp_path: Path) -> None:
    """Every read would delete an entry. Older keys may go, and their entries with them."""
    keys = tmp_path / "keys"

    def start(*raw: bytes) -> None:
        if raw:
            tools.disk_keys(keys, *raw)
        make_store(Config(data_dir=tmp_path / "data", disk_keys=keys if raw else None)).residents.home.close()

    start(FIRST)
    start(SECOND)  # nothing was stored yet
    with opened(tmp_path, FIRST) as tier:
        fill(tier)
    for without in ((), (SECOND,)):
        with pytest.raises(OSError, match=r"is encrypted with a key that disk_keys lacks: add it, or remove the dir"):
            start(*without)
    start(SECOND, FIRST)
    with opened(tmp_path, SECOND, FIRST) as tier:
        tools.write(tier, b"data")
    with pytest.raises(OSError, match="lacks"):
        start(FIRST)
    start(SECOND)
