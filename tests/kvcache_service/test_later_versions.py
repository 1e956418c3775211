"""What a later version left on a disk: it is refused, named, and stays as it is."""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
import xxhash

from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.tiers.disk import DiskTier
from tests.kvcache_service.tools import MIB, serving

LATER = bytes([record.NEWEST + 1])


@contextmanager
def index_of(data: Path) -> Iterator[lmdb.Transaction]:
    env = lmdb.open(str(data / "index"), map_size=64 * MIB, max_dbs=2)
    records = env.open_db(b"records")
    with env.begin(write=True, db=records) as txn:
        yield txn
    env.close()


def later_record(data: Path) -> None:
    """One record of another version, with fields that are not known, and a right checksum."""
    with index_of(data) as txn:
        key, value = next(iter(txn.cursor()))
        body = LATER + value[1:-8] + b"more of it"
        txn.put(key, body + xxhash.xxh3_64_digest(key + body))


def later_lmdb(data: Path) -> None:
    """The format of the database's file itself: a number in both its first pages."""
    with (data / "index" / "data.mdb").open("r+b") as file:
        for page in (0, 4096):
            file.seek(page + 16 + 4)
            file.write(struct.pack("=I", 2))


def everything(data: Path) -> dict[str, str]:
    """All files of the disk tier but those that say who uses it, by their digests."""
    files = (path for path in data.rglob("*") if path.is_file() and path.name not in ("lock", "lock.mdb", "boot"))
    return {str(path.relative_to(data)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(("change", "started_on_another_boot"), [(later_record, True), (later_lmdb, False)])
async def test_it_is_refused_and_stays(tmp_path: Path, change: Any, started_on_another_boot: bool) -> None:
    async with serving(tmp_path) as service:
        await service.put("S", b"data")
    change(tmp_path)
    if started_on_another_boot:
        (tmp_path / "boot").write_text("another")
    before = everything(tmp_path)
    tier = DiskTier(tmp_path, 16 * MIB)
    with pytest.raises(OSError, match="later version of FusionKV"):
        list(tier.recover())
    tier.close()
    assert everything(tmp_path) == before


async def test_the_rest_of_a_later_index_that_is_damaged_is_no_reason(tmp_path: Path) -> None:
    """A record of another version number whose checksum is wrong is damage, and dropped as ever."""
    async with serving(tmp_path) as service:
        for name in "ab":
            await service.put(["S", name], name.encode() * 5000)
    with index_of(tmp_path) as txn:
        key, value = next(iter(txn.cursor()))
        txn.put(key, LATER + value[1:])
    async with serving(tmp_path) as service:
        assert len(service.store.entries) == 1
