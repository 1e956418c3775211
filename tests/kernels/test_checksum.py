"""Digests of pieces as the xxhash library gives them, by every implementation."""

import random

import pytest
import torch
import xxhash

from fusionkv.kernels import checksum, xxh3
from fusionkv.protos.runtime.checksum import PIECE_BYTES
from tests.kernels.inputs import DEVICE, HAS_KERNEL

ACCUMULATE = {"reference": xxh3.accumulate}
if HAS_KERNEL:
    from fusionkv.kernels.gpu import checksum_triton

    ACCUMULATE["triton"] = checksum_triton.accumulate


def filled(size: int, kind: str) -> torch.Tensor:
    """Bytes that bring out what a kernel may get wrong: signs of halves, carries, nothing at all."""
    made = {
        "random": random.Random(size).randbytes(size),
        "zeros": bytes(size),
        "ones": b"\xff" * size,
        "high": b"\x00\x00\x00\x80" * (size // 4),
    }[kind]
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


@pytest.mark.parametrize("implementation", ACCUMULATE)
@pytest.mark.parametrize(
    ("piece", "pieces"), [(1024, 1), (1024, 7), (2048, 3), (16384, 2), (PIECE_BYTES, 1)], ids=str
)
@pytest.mark.parametrize("kind", ["random", "zeros", "ones", "high"])
def test_digests_are_those_of_the_library(implementation: str, piece: int, pieces: int, kind: str) -> None:
    if implementation == "triton" and piece == PIECE_BYTES and kind != "random":
        pytest.skip("2.5 s each in the interpreter")
    data = filled(piece * pieces, kind)
    there = data.to(DEVICE) if implementation == "triton" else data
    found = [xxh3.merged(each, piece) for each in ACCUMULATE[implementation](there, piece).tolist()]
    assert found == [xxhash.xxh3_64_digest(part.numpy()) for part in data.split(piece)]


def test_on_whatever_device_there_is() -> None:
    data = filled(3 * PIECE_BYTES, "random")
    expected = [xxhash.xxh3_64_digest(part.numpy()) for part in data.split(PIECE_BYTES)]
    assert checksum.piece_digests(data.to(DEVICE), PIECE_BYTES) == expected
    assert checksum.piece_digests(data[:0].to(DEVICE), PIECE_BYTES) == []
    assert data.equal(filled(3 * PIECE_BYTES, "random")), "the bytes are left as they were"
