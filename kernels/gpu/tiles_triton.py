"""Parts of the attention kernels: rotated rows, products, masks, and the constants that they are compiled with."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from fusionkv.kernels.segments import Rotation

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def load_turned(  # type: ignore[no-untyped-def]
    rows,  # pointers [ROWS] to the first channel of each row
    valid,  # [ROWS]
    cos_ptr,  # cosines of the rotation; or pointers [ROWS, 1] to those of each row
    sin_ptr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rows [ROWS, DIM] of queries or keys, rotated, in their own dtype.

    Queries are loaded again, from the cache, for every segment: in float32 they would take half of the registers.
    """
    d = tl.arange(0, DIM)
    turning = d < ROTARY_DIM
    # Of each channel: the one that it is rotated with, its frequency, and whether it is the first of the two.
    if INTERLEAVED:
        partner, frequency, leads = d ^ 1, d // 2, d % 2 == 0
    else:
        half: tl.constexpr = ROTARY_DIM // 2
        partner, frequency, leads = tl.where(d < half, d + half, d - half), d % half, d < half
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    paired = valid[:, None] & turning[None, :]
    cos = tl.load(cos_ptr + frequency[None, :], mask=turning[None, :], other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + frequency[None, :], mask=turning[None, :], other=0.0).to(tl.float32)
    sin = tl.where(leads[None, :], -sin, sin)
    q = tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0)
    other = tl.load(rows[:, None] + partner[None, :], mask=paired, other=0.0)
    return (q.to(tl.float32) * cos + other.to(tl.float32) * sin).to(q.dtype)


@triton.jit
def product(a, b, c, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b + c in float32. WIDEN multiplies in float32, for the interpreter, whose bfloat16 products are wrong."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def visible(position, q_position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """bool [rows, keys]: which keys, at position [1, keys], a row sees. A hidden slot's is above every row's."""
    seen = position <= q_position[:, None]
    if WINDOW > 0:
        seen = seen & (position > q_position[:, None] - WINDOW)
    return seen


@triton.jit
def sink(at, valid):  # type: ignore[no-untyped-def]
    """The logits of sinks at pointers, to base 2."""
    return tl.load(at, mask=valid, other=float("-inf")).to(tl.float32) * _LOG2E


def constants(
    q: torch.Tensor, keys: torch.Tensor, block: int, turns: Rotation | None, tile: int = 0, window: int | None = None
) -> dict[str, Any]:
    """The constants that kernels are compiled with.

    block: keys in a block. turns: None for a kernel that rotates nothing. tile: query rows in a tile; 0 for one
    without queries.
    """
    groups, dim = q.shape[1] // keys.shape[1], q.shape[2]
    made: dict[str, Any] = {
        "SLOT_STRIDE": keys.stride(0),
        "KV_HEAD_STRIDE": keys.stride(1),
        "HEAD_DIM": dim,
        "DIM": triton.next_power_of_2(dim),
        "BLOCK_KEYS": block,
    }
    if turns is not None:
        made |= {"ROTARY_DIM": turns.rotary_dim, "INTERLEAVED": turns.interleaved}
    if tile:
        more = {"GROUPS": groups, "TILE": tile, "ROWS": max(16, triton.next_power_of_2(tile * groups))}
        made |= more | {"WINDOW": window or 0, "WIDEN": INTERPRETED}
    return made


@functools.cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a device; 4 in the interpreter, so that keys are split into parts there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
