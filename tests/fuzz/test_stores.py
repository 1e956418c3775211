"""What lies in the disk tier, written by whoever could: a service takes what it can use, and no other."""

import itertools
import math
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.store.entries import Residents
from fusionkv.kvcache_service.tiers.base import Recovered
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from tests.fuzz.effort import fuzz

pytestmark = pytest.mark.hypothesis

MIB = 1 << 20
NUMBERS = st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
PLACES = st.one_of(st.integers(0, 40).map(lambda n: 4096 * n), NUMBERS)
HEATS = st.one_of(st.floats().map(lambda heat: struct.pack("<d", heat)), st.binary(max_size=9))


@st.composite
def entries(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """Key, record and heat of an entry that nobody put; the record's checksum is right."""
    key = draw(st.one_of(st.binary(min_size=32, max_size=32), st.binary(min_size=1, max_size=40)))
    names = st.binary(min_size=32, max_size=32)
    trail, variant = b"".join(draw(st.lists(names, max_size=3))), draw(st.one_of(st.just(b""), names))
    size, offset = draw(st.one_of(st.integers(1, 9000), NUMBERS)), draw(PLACES)
    small = st.integers(0, 2**32 - 1)
    numbers, signature = (size, draw(small), draw(small)), draw(st.binary(max_size=70))
    made = Record(key, draw(names), trail, variant, *numbers, bytes(16), draw(st.booleans()), signature)
    return key, records.encode(made, offset), draw(HEATS)


INDEXES = st.lists(entries(), max_size=8, unique_by=lambda entry: entry[0])


def checked(found: Sequence[Recovered], capacity: int) -> None:
    """Places do not overlap and lie within the tier; heats can be ordered; a table takes all of it."""
    places = sorted((each.place.offset, each.place.size) for each in found)
    assert all(size > 0 and at + size <= capacity for at, size in places)
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(places))
    assert all(0 <= each.heat < math.inf for each in found)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that can be: thousands of small transactions."""
    made = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield made
    shutil.rmtree(made)


def test_the_index_of_a_disk(folder: Path) -> None:
    tier = DiskTier(folder, MIB)
    (folder / "segments/000000.kv").write_bytes(bytes(MIB // 2))
    ledger = tier._ledger

    def index_on_disk(found: list[tuple[bytes, bytes, bytes]]) -> None:
        with ledger._env.begin(write=True) as txn:
            txn.drop(ledger._records, delete=False)
            txn.drop(ledger._heats, delete=False)
            for key, value, heat in found:
                txn.put(key, value, db=ledger._records)
                txn.put(key, heat or b"-", db=ledger._heats)
        checked(list(tier.recover()), MIB)
        residents = Residents([MemoryTier(MIB), tier], Counters())
        residents.recover(tier.recover())
        residents.check_integrity()

    fuzz(index_on_disk, INDEXES, 60)
    tier.close()
