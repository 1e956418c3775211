"""Frames are protobuf's own wire format, checksums what the contract says; nothing malformed gets through."""

import itertools
import random
from collections.abc import AsyncIterator

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from fusionkv.protos.kvcache.v1 import kvcache_pb2
from fusionkv.protos.runtime import frames
from fusionkv.protos.runtime.checksum import PIECE_BYTES, Checksum, checksum, of_pieces


@given(st.binary(max_size=300))
@example(bytes(127))
@example(bytes(128))
@example(bytes(1 << 14))
@example(bytes(frames.FRAME_BYTES))
def test_a_frame_is_what_protobuf_writes_and_reads(data: bytes) -> None:
    frame = frames.encode_frame(memoryview(data))
    assert frame == kvcache_pb2.FetchResponse(data=data).SerializeToString()
    assert kvcache_pb2.FetchResponse.FromString(frame).data == data
    assert bytes(frames.decode_frame(frame)) == data


@given(st.binary(max_size=64))
@example(b"\x0a")
@example(b"\x0a\x80")
@example(b"\x0a\x05abc")
@example(b"\x0a\x01ab")
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
def test_anything_else_raises_value_error_and_what_is_accepted_protobuf_reads_alike(message: bytes) -> None:
    try:
        data = frames.decode_frame(message)
    except ValueError:
        return
    assert kvcache_pb2.FetchResponse.FromString(message).data == bytes(data)


@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_frame_cut_short_or_grown_is_refused(data: bytes, draw: st.DataObject) -> None:
    frame = frames.encode_frame(data)
    short = frame[: draw.draw(st.integers(1, len(frame) - 1))]
    for changed in (short, frame + draw.draw(st.binary(min_size=1, max_size=4))):
        with pytest.raises(ValueError, match="data frame"):
            frames.decode_frame(changed)


def test_decoding_copies_nothing() -> None:
    frame = frames.encode_frame(bytes(1000))
    assert frames.decode_frame(frame).obj is frame


@given(st.binary(max_size=100), st.integers(1, 40))
def test_pieces_are_of_the_asked_size_and_join_to_the_whole(data: bytes, size: int) -> None:
    pieces = [bytes(p) for p in frames.split(memoryview(data), size)]
    assert b"".join(pieces) == data
    assert all(len(p) == size for p in pieces[:-1])
    assert all(0 < len(p) <= size for p in pieces)


def test_a_oneof_is_told_apart_by_its_first_byte() -> None:
    parse = frames.frame_or(kvcache_pb2.PutRequest.FromString)
    header = kvcache_pb2.PutRequest(header=kvcache_pb2.PutHeader(tokens=7))
    data = kvcache_pb2.PutRequest(data=b"kv")
    assert parse(header.SerializeToString()) == header
    assert bytes(parse(data.SerializeToString())) == b"kv"


SIZES = (0, 1, 240, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 77)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_digest_of_digests_of_pieces(size: int) -> None:
    data = random.Random(size).randbytes(size)
    pieces = [xxhash.xxh3_64_digest(data[at : at + PIECE_BYTES]) for at in range(0, size, PIECE_BYTES)]
    assert checksum(data) == of_pieces(pieces) == xxhash.xxh3_128_digest(b"".join(pieces))


@pytest.mark.parametrize("seed", range(5))
def test_cuts_do_not_count(seed: int) -> None:
    chance = random.Random(seed)
    data = chance.randbytes(chance.choice(SIZES))
    cuts = [0, *sorted(chance.choices(range(len(data) + 1), k=chance.randrange(9))), len(data)]
    running = Checksum()
    for start, end in itertools.pairwise(cuts):
        running.update(memoryview(data)[start:end])
        assert running.digest() == checksum(data[:end])


def test_every_bit_counts() -> None:
    data = bytearray(random.Random(1).randbytes(2 * PIECE_BYTES + 100))
    whole = checksum(data)
    for at in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES, len(data) - 1):
        for bit in range(8):
            data[at] ^= 1 << bit
            assert checksum(data) != whole
            data[at] ^= 1 << bit
    data[:PIECE_BYTES], data[PIECE_BYTES : 2 * PIECE_BYTES] = data[PIECE_BYTES : 2 * PIECE_BYTES], data[:PIECE_BYTES]
    assert checksum(data) != whole, "pieces that changed places"


@pytest.mark.parametrize(
    ("sizes", "room", "fits"), [((3, 0, 4), 7, True), ((), 0, True), ((3,), 4, False), ((3, 2), 4, False)]
)
async def test_a_buffer_is_filled_if_the_sizes_agree(sizes: tuple[int, ...], room: int, fits: bool) -> None:
    parts = [bytes([i + 1]) * size for i, size in enumerate(sizes)]

    async def messages() -> AsyncIterator[bytes]:
        for part in parts:
            yield frames.encode_frame(part)

    into = bytearray(room)
    digest = await frames.fill(memoryview(into), messages())
    assert digest == (checksum(b"".join(parts)) if fits else None)
    assert not fits or bytes(into) == b"".join(parts)
