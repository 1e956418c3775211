"""RoPE of queries and keys in one launch, in place of ten of transformers: a program for a row of some heads."""

import torch
import triton
import triton.language as tl

from fusionkv.kernels.gpu.tiles_triton import load_turned
from fusionkv.kernels.segments import Rotation

_HEADS = 8


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, q_heads, head_dim]
    k_ptr,  # [rows, k_heads, head_dim]
    q_out_ptr,
    k_out_ptr,
    cos_ptr,  # [rows, rotary_dim / 2 or more]
    sin_ptr,
    q_heads,
    k_heads,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    turn_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    before = tl.cdiv(q_heads, HEADS) * HEADS
    if first < before:
        x_ptr, out_ptr = q_ptr + row * q_row_stride, q_out_ptr
    else:
        x_ptr, out_ptr = k_ptr + row * k_row_stride, k_out_ptr
    heads = tl.where(first < before, q_heads, k_heads)
    stride = tl.where(first < before, q_head_stride, k_head_stride)
    h, d = first - tl.where(first < before, 0, before) + tl.arange(0, HEADS), tl.arange(0, DIM)
    valid, cos, sin = h < heads, cos_ptr + row * turn_stride, sin_ptr + row * turn_stride
    x = load_turned(x_ptr + h * stride, valid, cos, sin, HEAD_DIM, DIM, ROTARY_DIM, INTERLEAVED)
    to = out_ptr + ((row * heads + h) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(to, x, mask=valid[:, None] & (d < HEAD_DIM)[None, :])


def rotate(
    rotation: Rotation, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `rotary.Rotate`. Computes in float32, and so rounds once."""
    queries, keys = q[0].transpose(0, 1), k[0].transpose(0, 1)
    (rows, q_heads, dim), k_heads = queries.shape, keys.shape[1]
    assert queries.stride(2) == keys.stride(2) == cos.stride(2) == sin.stride(2) == 1
    assert cos.stride(1) == sin.stride(1)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, keys))
    _rotate[rows, triton.cdiv(q_heads, _HEADS) + triton.cdiv(k_heads, _HEADS)](
        *(queries, keys, q_out, k_out, cos, sin, q_heads, k_heads),
        *(*queries.stride()[:2], *keys.stride()[:2], cos.stride(1)),
        HEAD_DIM=dim,
        DIM=triton.next_power_of_2(dim),
        ROTARY_DIM=rotation.rotary_dim,
        INTERLEAVED=rotation.interleaved,
        HEADS=_HEADS,
    )
    return q_out.transpose(0, 1)[None], k_out.transpose(0, 1)[None]
