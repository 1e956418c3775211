"""Whatever bytes come from a disk, a socket or Redis: they are read, or refused as what they are."""

import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import strategies as st

from fusionkv.kvcache_service import answers, checks, record
from fusionkv.kvcache_service.shared_index import Member, SharedIndex
from fusionkv.kvcache_service.tiers.base import Place
from fusionkv.kvcache_service.tiers.disk_keys import DiskKeys
from fusionkv.kvcache_service.tiers.sealed_disk import SealedDiskTier
from fusionkv.protos import frames
from fusionkv.protos.errors import InvalidArgument
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from tests.fuzz.effort import fuzz
from tests.fuzz.wire import DIGESTS, messages

KEY = bytes(range(32))


def sealed_record(body: bytes) -> bytes:
    """With the right checksum, so that what stands within is looked at."""
    return body + xxhash.xxh3_64_digest(KEY + body)


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


def test_index_records() -> None:
    def index_record(body: bytes) -> None:
        value = sealed_record(body)
        try:
            found, offset = record.decode(KEY, value)
        except ValueError:
            assert record.place(KEY, value) is None
            return
        assert record.place(KEY, value) == (offset, found.size)
        assert record.decode(KEY, record.encode(found, offset)) == (found, offset)

    fuzz(index_record, bodies(), 300)


def test_index_records_without_their_checksum() -> None:
    def torn_record(value: bytes) -> None:
        assert record.place(KEY, value) is None
        with pytest.raises(ValueError, match="damaged"):
            record.decode(KEY, value)

    fuzz(torn_record, st.binary(max_size=200), 300)


def test_frames() -> None:
    def frame(message: bytes) -> None:
        try:
            data = bytes(frames.decode_frame(message))
        except ValueError:
            return
        assert frames.decode_frame(frames.encode_frame(data)) == data

    fuzz(frame, st.one_of(st.binary(max_size=40), st.binary(max_size=200).map(lambda b: b"\x0a" + b)), 300)


def test_what_a_cache_service_answers() -> None:
    """Also one of another version, or none at all: an entry, or a miss."""
    arena = memoryview(bytes(1000))

    def answered_hit(found: Any) -> None:
        hit = answers.hit(found, 7, arena)
        if hit.entry is not None and hit.entry.shared is not None:
            assert len(hit.entry.shared) == hit.entry.size
        assert hit.kind in answers.HitKind

    fuzz(answered_hit, messages(pb.Hit.DESCRIPTOR), 200)


def test_put_headers() -> None:
    def put_header(request: Any) -> None:
        try:
            made = checks.record(checks.header(request), 256)
        except InvalidArgument:
            return
        assert record.decode(made.key, record.encode(made, 0)) == (made, 0)

    fuzz(put_header, messages(pb.PutRequest.DESCRIPTOR), 200)


def test_what_redis_says() -> None:
    """A stranger may write to it."""
    index = SharedIndex("redis://127.0.0.1:1", cluster=False, password=None, timeout=1, expiry=1)
    index.members = {bytes([n]) * 8: Member(bytes([n]) * 8, "a:1", False) for n in range(3)}
    good = record.make(DIGESTS[0], [DIGESTS[1], DIGESTS[2]], b"", 5, 1, 0, bytes(16))
    value = b"\x01" + bytes(8) + record.encode(good, 0)
    fields = st.one_of(st.just(good.key + good.checksum), st.binary(max_size=60))

    def shared_entries(found: dict[bytes, bytes]) -> None:
        for entry, holders in index._living(found):
            assert holders
            assert len(entry.key) <= 32

    changed = st.tuples(st.integers(0, len(value) - 1), st.integers(0, 255)).map(
        lambda at: value[: at[0]] + bytes([at[1]]) + value[at[0] + 1 :]
    )
    fuzz(shared_entries, st.dictionaries(fields, st.one_of(st.just(value), changed, st.binary(max_size=80))), 200)


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
