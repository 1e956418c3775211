"""`xxh3.accumulate` on a GPU: one program of one warp for each piece, which reads a block of 1 KiB at a time."""

import torch
import triton
import triton.language as tl

from fusionkv.kernels.xxh3 import BLOCK_BYTES, LANES, SCRAMBLE, STRIPES, keys, start

_LANES, _STRIPES, _SCRAMBLE = tl.constexpr(LANES), tl.constexpr(STRIPES), tl.constexpr(SCRAMBLE)


@triton.jit
def _sums(numbers_ptr, key):  # type: ignore[no-untyped-def]
    """What a block's stripes, int64 [16, 8], add to the accumulators [8] with a key."""
    stripe, lane = tl.arange(0, _STRIPES), tl.arange(0, _LANES)
    numbers = tl.load(numbers_ptr + stripe[:, None] * _LANES + lane[None, :])
    # Each number is added to its neighbour's accumulator. The second load hits the cache.
    neighbours = tl.load(numbers_ptr + stripe[:, None] * _LANES + (lane ^ 1)[None, :])
    keyed = numbers ^ key
    return tl.sum((keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF) + neighbours, 0)


@triton.jit
def _accumulate(  # type: ignore[no-untyped-def]
    numbers_ptr,  # int64 [pieces, blocks, 16, 8]
    keys_ptr,  # int64 [2, 16, 8]
    turn_ptr,  # int64 [8]
    start_ptr,  # int64 [8]
    out_ptr,  # int64 [pieces, 8]
    blocks,
):
    piece = tl.program_id(0).to(tl.int64)
    stripe, lane = tl.arange(0, _STRIPES), tl.arange(0, _LANES)
    key_at = keys_ptr + stripe[:, None] * _LANES + lane[None, :]
    key, turn = tl.load(key_at), tl.load(turn_ptr + lane)
    result = tl.load(start_ptr + lane)
    at = numbers_ptr + piece * blocks * (_STRIPES * _LANES)
    for _ in range(blocks - 1):
        result += _sums(at, key)
        result = (result ^ ((result >> 47) & 0x1FFFF) ^ turn) * _SCRAMBLE
        at += _STRIPES * _LANES
    result += _sums(at, tl.load(key_at + _STRIPES * _LANES))
    tl.store(out_ptr + piece * _LANES + lane, result)


def accumulate(data: torch.Tensor, piece: int) -> torch.Tensor:
    """The same as `xxh3.accumulate`."""
    out = torch.empty(data.numel() // piece, LANES, dtype=torch.int64, device=data.device)
    if len(out):
        secrets, turn = keys(data.device)
        _accumulate[(len(out),)](
            data.view(torch.int64), secrets, turn, start(data.device), out, piece // BLOCK_BYTES, num_warps=1
        )
    return out
