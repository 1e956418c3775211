"""Functions that the Triton kernels share: loading rotated query rows, scoring keys, and online softmax."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from fusionkv.kernels.segments import NEVER, Rotation

_NEVER = tl.constexpr(NEVER)
LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def rotary(d, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of channels d: the channel that each is rotated with, its frequency, and the sign of its partner's share."""
    if INTERLEAVED:
        partner = d ^ 1
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
        frequency = d // 2
    else:
        partner = tl.where(d < ROTARY_DIM // 2, d + ROTARY_DIM // 2, d - ROTARY_DIM // 2)
        sign = tl.where(d < ROTARY_DIM // 2, -1.0, 1.0)
        frequency = d % (ROTARY_DIM // 2)
    return partner, frequency, sign


@triton.jit
def load_turned(  # type: ignore[no-untyped-def]
    q_rows,  # pointers [ROWS] to the first channel of each row
    valid,  # [ROWS]
    turn_ptr,  # cosines, then sines, of the segment's rotation; or pointers [ROWS, 1] to those of each row
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Query rows [ROWS, DIM] rotated back by a segment's shift, in their own dtype.

    They are loaded again, from the cache, for every segment: keeping them in float32 would take half of a program's
    registers.
    """
    d = tl.arange(0, DIM)
    turning = d < ROTARY_DIM
    partner, frequency, sign = rotary(d, ROTARY_DIM, INTERLEAVED)
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    paired = valid[:, None] & turning[None, :]
    at = turn_ptr + frequency[None, :]
    cos = tl.load(at, mask=turning[None, :], other=1.0)
    sin = tl.load(at + ROTARY_DIM // 2, mask=turning[None, :], other=0.0) * sign[None, :]
    q = tl.load(q_rows[:, None] + d[None, :], mask=inside, other=0.0)
    other = tl.load(q_rows[:, None] + partner[None, :], mask=paired, other=0.0)
    return (q.to(tl.float32) * cos + other.to(tl.float32) * sin).to(q.dtype)


@triton.jit
def product(a, b, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b in float32. WIDEN multiplies in float32, for the interpreter, whose bfloat16 products are wrong."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def update(scores, v, high, total, acc, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A step of online softmax with a block of scores, to base 2, and values."""
    higher = tl.maximum(high, tl.max(scores, 1))
    # A row that has seen no key yet has no maximum to subtract.
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - anchor[:, None])
    fade = tl.exp2(high - anchor)
    return higher, total * fade + tl.sum(weights, 1), acc * fade[:, None] + product(weights.to(v.dtype), v, WIDEN)


@triton.jit
def sink(at, valid):  # type: ignore[no-untyped-def]
    """The logits of sinks at pointers, to base 2."""
    return tl.load(at, mask=valid, other=float("-inf")).to(tl.float32) * _LOG2E


@triton.jit
def key_positions(positions_ptr, own, first, n, length):  # type: ignore[no-untyped-def]
    """Positions of slots n of a segment; NEVER for hidden slots and those past its end.

    [keys] for n [keys]. [rows, keys] for n [1, keys], where every row has its own segment over the same slots: own
    and first [rows, 1].
    """
    there = n < length
    position = tl.load(positions_ptr + own + n, mask=there & (own >= 0), other=_NEVER)
    return tl.where(there & (own < 0), first + n, position)


@triton.jit
def visible(position, q_position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """bool [rows, keys]: which keys a row sees. A hidden slot's position is above every row's.

    position: [1, keys], or [rows, keys].
    """
    seen = position <= q_position[:, None]
    if WINDOW > 0:
        seen = seen & (position > q_position[:, None] - WINDOW)
    return seen


def constants(
    q: torch.Tensor, k_pool: torch.Tensor, rotation: Rotation, tile: int, keys: int, window: int | None
) -> dict[str, Any]:
    """The constants that kernels are compiled with. tile: query rows in a tile. keys: keys in a block."""
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
    """Number of multiprocessors of a device; 4 in the interpreter, so that keys are split into parts there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
