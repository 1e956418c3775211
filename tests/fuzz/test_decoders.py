"""Whatever bytes come from a disk, a socket or Redis: they are read, or refused as what they are."""

import itertools
import math
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.metrics import Counters
from fusionkv.kvcache_service.store.residents import Residents
from fusionkv.kvcache_service.tiers.base import Place, Recovered
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.sealed_disk import DiskKeys, SealedDiskTier
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from tests.fuzz import decoders
from tests.fuzz.effort import fuzz
from tests.fuzz.wire import messages

pytestmark = pytest.mark.hypothesis


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Of index records: any bytes, or a head of any numbers before any names."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=300))
    number = st.integers(0, 255)
    head = struct.pack(
        "<BHBQII16sQ", draw(st.sampled_from([0, 1, 1, 1, 2])), draw(st.integers(0, 4)), draw(number),
        draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**32 - 1)),
        draw(st.binary(min_size=16, max_size=16)), draw(st.integers(0, 2**64 - 1)),
    )  # fmt: skip
    return head + draw(st.binary(max_size=8)) + bytes(32 * draw(st.integers(0, 6)))


ANY_FRAME = st.one_of(st.binary(max_size=40), st.binary(max_size=200).map(lambda data: b"\x0a" + data))
VALUE = decoders.GOOD.key + record.encode(decoders.GOOD, 0)
CHANGED = st.tuples(st.integers(0, len(VALUE) - 1), st.integers(0, 255)).map(
    lambda at: VALUE[: at[0]] + bytes([at[1]]) + VALUE[at[0] + 1 :]
)
REMOTE = st.lists(st.one_of(st.just(VALUE), CHANGED, st.binary(max_size=80)), max_size=5)

PRIMERS = st.builds(
    lambda count, held, ids: struct.pack("<I", count) + bytes(32 * held) + struct.pack(f"<{len(ids)}I", *ids),
    st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1)),
    st.integers(0, 3),
    st.lists(st.integers(0, 1100), min_size=120, max_size=200),
)


_NUMBER = st.one_of(st.integers(0, 12), st.integers(0, 100), st.integers(0, 2**64 - 1))
_PIECE = st.one_of(
    _NUMBER.map(lambda number: struct.pack("<Q", number)),
    _NUMBER.map(lambda number: struct.pack("<I", number % 2**32)),
    st.text(max_size=3).map(lambda text: struct.pack("<Q", len(text.encode())) + text.encode()),
    st.binary(max_size=40),
)
GGUF_FILES = st.lists(_PIECE, max_size=20).map(lambda pieces: struct.pack("<4sI", b"GGUF", 3) + b"".join(pieces))


def serialised(kind: Any) -> st.SearchStrategy[bytes]:
    return messages(kind.DESCRIPTOR).map(lambda made: made.SerializeToString())


@pytest.mark.parametrize(
    ("target", "inputs", "few"),
    [
        (decoders.index_record, bodies(), 300),
        (decoders.torn_record, st.binary(max_size=200), 300),
        (decoders.frame, ANY_FRAME, 300),
        (decoders.answered_hit, serialised(pb.Hit), 200),
        (decoders.put_message, serialised(pb.PutRequest), 200),
        (decoders.data_request, serialised(pb.DataRequest), 200),
        (decoders.remote_records, REMOTE, 200),
        (decoders.stored_primer, PRIMERS, 200),
        (decoders.gguf, GGUF_FILES, 300),
    ],
)
def test_bytes(target: Callable[[Any], None], inputs: st.SearchStrategy[Any], few: int) -> None:
    fuzz(target, inputs, few)


def test_segments_that_are_encrypted(tmp_path: Path) -> None:
    """Any byte of a block or its seal changed, and it does not open."""
    (tmp_path / "keys").write_text(bytes(range(32)).hex() + "\n")
    tier = SealedDiskTier(tmp_path / "data", 1 << 20, DiskKeys(tmp_path / "keys"))
    data = bytes(range(256)) * 20
    place, _ = tier.reserve(len(data))
    tier.write(place, 0, [memoryview(data)])
    segment, seal = (tmp_path / "data/segments" / f"000000.{end}" for end in ("kv", "seal"))

    def damaged_block(damage: tuple[bool, int, int]) -> None:
        of_seal, at, bit = damage
        with (seal if of_seal else segment).open("r+b") as file:
            size = 32 if of_seal else len(data)
            file.seek(at % size)
            byte = file.read(1)[0]
            file.seek(at % size)
            file.write(bytes([byte ^ 1 << bit]))
            file.flush()
            with pytest.raises(OSError, match=r"a block at \d+ is"):
                tier.read(Place(place.offset, len(data)), 0, len(data))
            file.seek(at % size)
            file.write(bytes([byte]))
        assert bytes(tier.read(Place(place.offset, len(data)), 0, len(data))) == data

    fuzz(damaged_block, st.tuples(st.booleans(), st.integers(0, 10_000), st.integers(0, 7)), 60)
    tier.close()


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
    made = EntryRecord(key, draw(names), trail, variant, *numbers, bytes(16), draw(st.booleans()), signature)
    return key, record.encode(made, offset), draw(HEATS)


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
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as made:
        yield Path(made)


def test_the_index_of_a_disk(folder: Path) -> None:
    tier = DiskTier(folder, 1 << 20)
    (folder / "segments/000000.kv").write_bytes(bytes(1 << 19))
    index = tier._index

    def index_on_disk(found: list[tuple[bytes, bytes, bytes]]) -> None:
        with index._env.begin(write=True) as txn:
            txn.drop(index._records, delete=False)
            txn.drop(index._heats, delete=False)
            for key, value, heat in found:
                txn.put(key, value, db=index._records)
                txn.put(key, heat or b"-", db=index._heats)
        checked(list(tier.recover()), 1 << 20)
        residents = Residents([MemoryTier(1 << 20), tier], Counters())
        residents.recover(tier.recover())
        residents.check_integrity()

    fuzz(index_on_disk, INDEXES, 60)
    tier.close()
