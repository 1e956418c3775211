"""XXH3-64 of many pieces of bytes at once, in plain torch.

XXH3 (seed 0) processes a piece in blocks of 16 stripes of 8 64-bit numbers. The stripes of a block are added to eight
accumulators in any order; between blocks the accumulators are scrambled. This runs on the device. The final step, on
64 bytes per piece, runs on the host.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md (XXH3 algorithm, inputs over 240 bytes)
"""

import functools
import struct

import torch

_MASK = (1 << 64) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = (_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1)
SCRAMBLE = _P32_1
STRIPES, LANES = 16, 8
BLOCK_BYTES = STRIPES * LANES * 8
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def accumulate(data: torch.Tensor, piece: int) -> torch.Tensor:
    """int64 [pieces, 8]: each piece's accumulators after its last stripe."""
    numbers = data.view(torch.int64).view(-1, piece // BLOCK_BYTES, STRIPES, LANES)
    secrets, turn = keys(data.device)
    keyed = numbers ^ secrets[0]
    keyed[:, -1] = numbers[:, -1] ^ secrets[1]
    # The halves are unsigned 32-bit numbers; products and sums wrap to 64 bits.
    sums = ((keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF)).sum(2)
    sums += numbers.view(*numbers.shape[:3], LANES // 2, 2).flip(-1).flatten(-2).sum(2)
    result = start(data.device).expand(len(sums), LANES).clone()
    for block in range(sums.shape[1]):
        if block:
            result = (result ^ ((result >> 47) & 0x1FFFF) ^ turn) * SCRAMBLE
        result += sums[:, block]
    return result


@functools.cache
def keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The secret: int64 [2, 16, 8] for the stripes of a block and of a last block, and [8] for the scrambling."""

    def numbers(at: int) -> list[int]:
        return list(struct.unpack_from("<8q", _SECRET, at))

    stripes = [numbers(8 * stripe) for stripe in range(STRIPES)]
    # A piece's last stripe has a different key.
    last = [*stripes[:-1], numbers(len(_SECRET) - 64 - 7)]
    return torch.tensor([stripes, last], device=device), torch.tensor(numbers(len(_SECRET) - 64), device=device)


@functools.cache
def start(device: torch.device) -> torch.Tensor:
    """int64 [8]: the accumulators before the first block."""
    return torch.tensor([value - (value >> 63 << 64) for value in _START], device=device)


def merged(accumulators: list[int], size: int) -> bytes:
    """A piece's digest, from its accumulators. size: bytes of the piece."""
    secret = struct.unpack_from("<8Q", _SECRET, 11)
    folded = [(value & _MASK) ^ key for value, key in zip(accumulators, secret, strict=True)]
    result = size * _P64_1
    for a, b in zip(folded[::2], folded[1::2], strict=True):
        product = a * b
        result += (product & _MASK) ^ (product >> 64)
    result &= _MASK
    result = ((result ^ (result >> 37)) * 0x165667919E3779F9) & _MASK
    return (result ^ (result >> 32)).to_bytes(8)
