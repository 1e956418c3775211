"""What the Triton kernels share: loading a tile of query rows, turned back for a segment, and scoring keys."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segment_table import NEVER

_NEVER = tl.constexpr(NEVER)
LOG2E = 1.4426950408889634
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def load_turned(  # type: ignore[no-untyped-def]
    q_rows,  # pointers [ROWS] to the first channel of each row
    valid,  # [ROWS]
    turn_ptr,  # cosines, then sines, of the segment's turn
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Query rows [ROWS, DIM] turned back by a segment's shift, in their own dtype.

    Loaded anew for every segment, from the cache: keeping them in float32 would cost half of a program's registers.
    """
    d = tl.arange(0, DIM)
    rotary = d < ROTARY_DIM
    if INTERLEAVED:
        partner = d ^ 1
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
        frequency = d // 2
    else:
        partner = tl.where(d < ROTARY_DIM // 2, d + ROTARY_DIM // 2, d - ROTARY_DIM // 2)
        sign = tl.where(d < ROTARY_DIM // 2, -1.0, 1.0)
        frequency = d % (ROTARY_DIM // 2)
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    paired = valid[:, None] & rotary[None, :]
    cos = tl.load(turn_ptr + frequency, mask=rotary, other=1.0)
    sin = tl.load(turn_ptr + ROTARY_DIM // 2 + frequency, mask=rotary, other=0.0) * sign
    q = tl.load(q_rows[:, None] + d[None, :], mask=inside, other=0.0)
    other = tl.load(q_rows[:, None] + partner[None, :], mask=paired, other=0.0)
    return (q.to(tl.float32) * cos[None, :] + other.to(tl.float32) * sin[None, :]).to(q.dtype)


@triton.jit
def product(a, b, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b in float32. WIDEN: the interpreter's bfloat16 products are wrong, so it multiplies in float32."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def key_positions(positions_ptr, own, first, n, length):  # type: ignore[no-untyped-def]
    """Positions [keys] of slots n of a segment; "never" for hidden ones and those behind its end."""
    there = n < length
    position = tl.load(positions_ptr + own + n, mask=there & (own >= 0), other=_NEVER)
    return tl.where(there & (own < 0), first + n, position)


@triton.jit
def visible(position, q_position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """bool [rows, keys]: which keys a row sees. A stale slot's position is above every row's."""
    seen = position[None, :] <= q_position[:, None]
    if WINDOW > 0:
        seen = seen & (position[None, :] > q_position[:, None] - WINDOW)
    return seen


def constants(
    q: torch.Tensor, k_pool: torch.Tensor, rotation: Rotation, tile: int, keys: int, window: int | None
) -> dict[str, Any]:
    """What every kernel over a batch is compiled for. tile: query rows of a tile; keys: of a block."""
    groups, dim = q.shape[1] // k_pool.shape[1], q.shape[2]
    return {
        "SLOT_STRIDE": k_pool.stride(0),
        "KV_HEAD_STRIDE": k_pool.stride(1),
        "HEAD_DIM": dim,
        "DIM": triton.next_power_of_2(dim),
        "ROTARY_DIM": rotation.rotary_dim,
        "INTERLEAVED": rotation.interleaved,
        "GROUPS": groups,
        "TILE": tile,
        "ROWS": max(16, triton.next_power_of_2(tile * groups)),
        "BLOCK_KEYS": keys,
        "WINDOW": window or 0,
        "WIDEN": INTERPRETED,
    }


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; four in the interpreter, so that keys are cut into parts there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
