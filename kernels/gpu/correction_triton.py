"""`correction.correct` on a GPU: one program for each tile of tokens, layer and KV head.

Plain torch takes some 40 launches for each chunk, and the threads that load a prompt's chunks wait for one another.
"""

import torch
import triton
import triton.language as tl

from fusionkv.kernels.gpu.tile_shapes import Tile
from fusionkv.kernels.gpu.tiles_triton import INTERPRETED, product, rotary
from fusionkv.kernels.segments import Rotation


def tile_for(head_dim: int, dtype: torch.dtype) -> Tile:
    """The largest tile, of tokens and of inputs, that spills no registers, and takes less than `tile_shapes.ROOM`."""
    if head_dim > 128:
        return Tile(16, 16, 8, 1)
    return Tile(32, 32, 8, 2 if dtype.itemsize == 2 else 1)


@triton.jit
def _add_products(key, beside, value, x, w, d, partner, inside, HEAD_DIM: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds x @ w to the changes of keys, of each key channel's partner (`beside`), and of values.

    w: pointers [inputs, 1] to rows of the map. inside: bool [inputs, DIM].
    """
    key += product(x, tl.load(w + d[None, :], mask=inside, other=0.0), WIDEN)
    beside += product(x, tl.load(w + partner[None, :], mask=inside, other=0.0), WIDEN)
    value += product(x, tl.load(w + HEAD_DIM + d[None, :], mask=inside, other=0.0), WIDEN)
    return key, beside, value


@triton.jit
def _correct(  # type: ignore[no-untyped-def]
    k_ptr,  # [layers, tokens, kv_heads, head_dim]
    v_ptr,
    out_k_ptr,
    out_v_ptr,
    weights_ptr,  # [layers, kv_heads, 2 * head_dim + PLACES, 2 * head_dim]
    places_ptr,  # [tokens, PLACES]
    cos_ptr,  # float32 [tokens, rotary_dim / 2]
    sin_ptr,
    share,
    tokens,
    layer_stride,
    token_stride,
    head_stride,
    out_layer_stride,
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    layer, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    row, d, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, INPUTS)
    there, width = row < tokens, 2 * HEAD_DIM
    at = layer * layer_stride + head * head_stride + row.to(tl.int64) * token_stride
    weights = weights_ptr + (layer * HEADS + head) * ((width + PLACES) * width)
    partner, frequency, sign = rotary(d, ROTARY_DIM, INTERLEAVED)
    channel, turns = d < HEAD_DIM, row * (ROTARY_DIM // 2)
    key = tl.zeros([ROWS, DIM], tl.float32)
    beside = tl.zeros([ROWS, DIM], tl.float32)
    value = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, HEAD_DIM, INPUTS):
        c = start + n
        there_c = there[:, None] & (c < HEAD_DIM)[None, :]
        turning = there[:, None] & (c < ROTARY_DIM)[None, :]
        other_c, frequency_c, sign_c = rotary(c, ROTARY_DIM, INTERLEAVED)
        cos = tl.load(cos_ptr + turns[:, None] + frequency_c[None, :], mask=turning, other=1.0)
        sin = tl.load(sin_ptr + turns[:, None] + frequency_c[None, :], mask=turning, other=0.0) * sign_c[None, :]
        k = tl.load(k_ptr + at[:, None] + c[None, :], mask=there_c, other=0.0).to(tl.float32)
        other = tl.load(k_ptr + at[:, None] + other_c[None, :], mask=turning, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at[:, None] + c[None, :], mask=there_c, other=0.0)
        kind = weights_ptr.dtype.element_ty
        w, inside = weights + c[:, None] * width, (c < HEAD_DIM)[:, None] & channel[None, :]
        # Keys turned back to position 0.
        free = (k * cos - other * sin).to(kind)
        key, beside, value = _add_products(key, beside, value, free, w, d, partner, inside, HEAD_DIM, WIDEN)
        w += HEAD_DIM * width
        key, beside, value = _add_products(key, beside, value, v.to(kind), w, d, partner, inside, HEAD_DIM, WIDEN)
    place = tl.load(places_ptr + row[:, None] * PLACES + n[None, :], mask=there[:, None] & (n < PLACES), other=0.0)
    w, inside = weights + (width + n)[:, None] * width, (n < PLACES)[:, None] & channel[None, :]
    key, beside, value = _add_products(key, beside, value, place, w, d, partner, inside, HEAD_DIM, WIDEN)

    # All of the tile is read before any of it is written: `out` may be the KV itself.
    turning, whole = there[:, None] & (d < ROTARY_DIM)[None, :], there[:, None] & channel[None, :]
    cos = tl.load(cos_ptr + turns[:, None] + frequency[None, :], mask=turning, other=1.0)
    sin = tl.load(sin_ptr + turns[:, None] + frequency[None, :], mask=turning, other=0.0) * sign[None, :]
    k = tl.load(k_ptr + at[:, None] + d[None, :], mask=whole, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + at[:, None] + d[None, :], mask=whole, other=0.0).to(tl.float32)
    k += share * (key * cos + beside * sin)
    v += share * value
    to = layer * out_layer_stride + head * out_head_stride + row.to(tl.int64) * out_token_stride
    tl.debug_barrier()
    tl.store(out_k_ptr + to[:, None] + d[None, :], k.to(out_k_ptr.dtype.element_ty), mask=whole)
    tl.store(out_v_ptr + to[:, None] + d[None, :], v.to(out_v_ptr.dtype.element_ty), mask=whole)


def correct(
    kv: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor,
    places: torch.Tensor,
    rotation: Rotation,
    cos: torch.Tensor,
    sin: torch.Tensor,
    share: float,
) -> None:
    """The same as `correction.correct`, without extra memory."""
    layers, _, tokens, heads, dim = kv.shape
    tile = tile_for(dim, weights.dtype)
    (k, v), (out_k, out_v) = kv.unbind(1), out.unbind(1)
    assert kv.stride(4) == out.stride(4) == 1
    assert all(table.is_contiguous() for table in (weights, places, cos, sin))
    _correct[triton.cdiv(tokens, tile.rows), layers * heads](
        *(k, v, out_k, out_v, weights, places, cos, sin, share, tokens),
        *k.stride()[:3],
        *out_k.stride()[:3],
        HEADS=heads,
        HEAD_DIM=dim,
        DIM=triton.next_power_of_2(dim),
        ROTARY_DIM=rotation.rotary_dim,
        INTERLEAVED=rotation.interleaved,
        PLACES=places.shape[1],
        ROWS=tile.rows,
        INPUTS=tile.keys,
        WIDEN=INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
