"""`sparse_attention` on a GPU: one program a query tile and kv head, walking the span's segments where they lie."""

import torch
import triton
import triton.language as tl

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segment_table import Spans

# Query rows of a tile times heads of a group: 64 to 128 rows of a matrix product keep the tensor cores full.
_TILE_ROWS = 64
_BLOCK_KEYS = 64


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, q_heads, head_dim]
    k_ptr,  # [slots, kv_heads, head_dim]
    v_ptr,  # [slots, kv_heads, head_dim]
    out_ptr,  # [rows, q_heads, head_dim]
    tiles_ptr,
    segments_ptr,
    positions_ptr,
    row_positions_ptr,
    turns_ptr,
    scale,  # times log2(e)
    q_row_stride,
    q_head_stride,
    slot_stride,
    kv_head_stride,
    out_row_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # TILE * GROUPS rounded up to a power of two, at least 16
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    WIDEN: tl.constexpr,  # the interpreter's bf16 products are wrong: float32 instead
):
    head = tl.program_id(1)
    tile_ptr = tiles_ptr + 4 * tl.program_id(0)
    first_row, rows = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    first_segment, segments = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)

    # A group's heads share one pass over the keys: row m is query row m // GROUPS, head m % GROUPS of the group.
    m = tl.arange(0, ROWS)
    valid = (m < TILE * GROUPS) & (m // GROUPS < rows)
    row = (first_row + m // GROUPS).to(tl.int64)
    q_head = head * GROUPS + m % GROUPS
    q_position = tl.load(row_positions_ptr + row, mask=valid, other=-1)
    last = tl.max(q_position, 0)

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
    partner = tl.where(rotary, partner, d)
    q_rows = q_ptr + row[:, None] * q_row_stride + q_head[:, None] * q_head_stride
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_rows + d[None, :], mask=inside, other=0.0).to(tl.float32)
    q_partner = tl.load(q_rows + partner[None, :], mask=inside, other=0.0).to(tl.float32) * sign[None, :]

    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for segment in range(first_segment, first_segment + segments):
        segment_ptr = segments_ptr + 5 * segment
        slot, length = tl.load(segment_ptr), tl.load(segment_ptr + 1)
        first, turn, own = tl.load(segment_ptr + 2), tl.load(segment_ptr + 3), tl.load(segment_ptr + 4)
        if own < 0:
            length = tl.minimum(length, last - first + 1)
        if first > last:
            length = length * 0
        # The tile is turned back once a segment; the keys stay as they were written.
        turn_ptr = turns_ptr + turn * ROTARY_DIM + frequency
        cos = tl.load(turn_ptr, mask=rotary, other=1.0)
        sin = tl.load(turn_ptr + ROTARY_DIM // 2, mask=rotary, other=0.0)
        turned = (q * cos[None, :] + q_partner * sin[None, :]).to(q_ptr.dtype.element_ty)
        for start in range(0, length, BLOCK_KEYS):
            n = start + tl.arange(0, BLOCK_KEYS)
            there = n < length
            position = first + n
            if own >= 0:
                position = tl.load(positions_ptr + own + n, mask=there, other=2147483647)
            at = (slot + n).to(tl.int64) * slot_stride + head * kv_head_stride
            k = tl.load(k_ptr + at[None, :] + d[:, None], mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_ptr + at[:, None] + d[None, :], mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
            if WIDEN:
                scores = tl.dot(turned.to(tl.float32), k.to(tl.float32), input_precision="ieee") * scale
            else:
                scores = tl.dot(turned, k, input_precision="ieee") * scale
            seen = there[None, :] & (position[None, :] <= q_position[:, None])
            if WINDOW > 0:
                seen = seen & (position[None, :] > q_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(high, tl.max(scores, 1))
            # A row that has seen nothing yet has no maximum to subtract.
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - anchor[:, None])
            fade = tl.exp2(high - anchor)
            total = total * fade + tl.sum(weights, 1)
            if WIDEN:
                acc = acc * fade[:, None] + tl.dot(weights, v.to(tl.float32), input_precision="ieee")
            else:
                acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            high = higher

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_rows = out_ptr + row[:, None] * out_row_stride + q_head[:, None] * out_head_stride
    tl.store(out_rows + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """As `sparse_attention.sparse_attention`. Extra memory: the batch's tables, 20 bytes a segment and 4 a row."""
    heads, kv_heads, dim = q.shape[1], k_pool.shape[1], q.shape[2]
    assert k_pool.stride() == v_pool.stride()
    assert q.stride(2) == k_pool.stride(2) == 1
    groups = heads // kv_heads
    tile = max(1, _TILE_ROWS // groups)
    table = spans.table(rotation, tile, q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _attend[len(table.tiles), kv_heads](
        q,
        k_pool,
        v_pool,
        out,
        table.tiles,
        table.segments,
        table.positions,
        table.row_positions,
        table.turns,
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        out.stride(0),
        out.stride(1),
        HEAD_DIM=dim,
        DIM=triton.next_power_of_2(dim),
        ROTARY_DIM=rotation.rotary_dim,
        INTERLEAVED=rotation.interleaved,
        GROUPS=groups,
        TILE=tile,
        ROWS=max(16, triton.next_power_of_2(tile * groups)),
        BLOCK_KEYS=_BLOCK_KEYS,
        WINDOW=window or 0,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=2,
    )
    return out
