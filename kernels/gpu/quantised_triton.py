"""`dequantise.restore_to` for four bits on a GPU: one program for a block of tokens of one head's keys or values."""

import torch
import triton
import triton.language as tl

from fusionkv.kernels.quantised import Quantised, sizes, value_width

_BLOCK_TOKENS = 32


# Numbers of each chunk's own: for 1 and for multiples of 16, Triton would compile the kernel again.
@triton.jit(do_not_specialize=["start", "count", "tokens", "groups"])
def _restore(  # type: ignore[no-untyped-def]
    numbers_ptr,  # uint8 [layers, tensors, tokens, heads, HEAD_DIM / 2]
    keys_ptr,  # bfloat16 [layers, groups, heads, 2, HEAD_DIM]
    values_ptr,  # bfloat16 [layers, tokens, heads, 2, HEAD_DIM / WIDTH]
    out_ptr,  # [layers, tensors, count, heads, HEAD_DIM]
    start,  # token of `numbers` that goes to token 0 of `out`
    count,
    tokens,
    groups,
    tensors,
    heads,
    layer_stride,
    kv_stride,
    token_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    plane = tl.program_id(0).to(tl.int64)
    head, plane = plane % heads, plane // heads
    layer, kv = plane // tensors, plane % tensors
    t, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    inside = (t < count)[:, None] & (d < HEAD_DIM)[None, :]
    token = start + t
    at = ((plane * tokens + token) * heads + head)[:, None] * (HEAD_DIM // 2) + (d % (HEAD_DIM // 2))[None, :]
    numbers = tl.load(numbers_ptr + at, mask=inside, other=0)
    number = ((numbers >> tl.where(d < HEAD_DIM // 2, 0, 4).to(tl.uint8)[None, :]) & 15).to(tl.float32)
    if kv == 0:
        block = ((layer * groups + token // GROUP) * heads + head)[:, None] * (2 * HEAD_DIM) + d[None, :]
        scale = tl.load(keys_ptr + block, mask=inside, other=0).to(tl.float32)
        minimum = tl.load(keys_ptr + block + HEAD_DIM, mask=inside, other=0).to(tl.float32)
    else:
        blocks = HEAD_DIM // WIDTH
        block = ((layer * tokens + token) * heads + head)[:, None] * (2 * blocks) + (d // WIDTH)[None, :]
        scale = tl.load(values_ptr + block, mask=inside, other=0).to(tl.float32)
        minimum = tl.load(values_ptr + block + blocks, mask=inside, other=0).to(tl.float32)
    to = (
        layer * layer_stride
        + kv * kv_stride
        + t.to(tl.int64)[:, None] * token_stride
        + head * head_stride
        + d[None, :]
    )
    tl.store(out_ptr + to, (number * scale + minimum).to(out_ptr.dtype.element_ty), mask=inside)


def restore_to(stored: Quantised, start: int, out: torch.Tensor) -> None:
    """Dequantises tokens from `start` on to `out`, a view [layers, tensors, count, kv_heads, head_dim] of a pool."""
    layers, tensors, count, heads, dim = out.shape
    assert out.stride(-1) == 1
    _restore[(layers * tensors * heads, triton.cdiv(count, _BLOCK_TOKENS))](
        stored.numbers.contiguous(),
        stored.key_scales.contiguous(),
        stored.value_scales.contiguous(),
        out,
        start,
        count,
        stored.numbers.shape[2],
        stored.key_scales.shape[1],
        tensors,
        heads,
        *out.stride()[:4],
        HEAD_DIM=dim,
        DIM=triton.next_power_of_2(dim),
        GROUP=sizes(torch.uint8, dim).group,
        WIDTH=value_width(dim),
        BLOCK=_BLOCK_TOKENS,
    )
