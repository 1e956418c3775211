"""The checksum of an entry: what the contract says, however the bytes are cut."""

import itertools
import random

import pytest
import xxhash

from fusionkv.protos.runtime.checksum import PIECE_BYTES, Checksum, checksum, of_pieces

SIZES = (0, 1, 240, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 77)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_digest_of_digests_of_pieces(size: int) -> None:
    data = random.Random(size).randbytes(size)
    pieces = [xxhash.xxh3_64_digest(data[at : at + PIECE_BYTES]) for at in range(0, size, PIECE_BYTES)]
    assert checksum(data) == of_pieces(pieces) == xxhash.xxh3_128_digest(b"".join(pieces))


@pytest.mark.parametrize("seed", range(20))
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
