"""`sparse_attention` on a GPU: one program for each tile of rows, KV head and part of the keys.

The rows of a tile are rotated back once per segment; keys are not rotated, copied or masked ahead of time. Where
tiles are too few to fill the GPU (decoding, short questions), keys are split into parts, and a second kernel merges
their results, as in flash-decoding. Slots that several decoding requests share are read once for all of them, by a
kernel of their own, before the merge.
"""

import torch
import triton
import triton.language as tl

from fusionkv.kernels.gpu.segment_table import Grid, Launch, SegmentTable, TabledSpans
from fusionkv.kernels.gpu.tile_shapes import Tile, shared_tile, tile_for
from fusionkv.kernels.gpu.tiles_triton import (
    LOG2E,
    constants,
    key_positions,
    load_turned,
    processors,
    product,
    sink,
    update,
    visible,
)
from fusionkv.kernels.segments import Rotation, Spans


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, q_heads, head_dim]
    k_ptr,  # [slots, kv_heads, head_dim]
    v_ptr,  # [slots, kv_heads, head_dim]
    out_ptr,  # [rows, q_heads, head_dim], or float32 [parts, partial rows, q_heads, head_dim]
    lse_ptr,  # float32 [parts, partial rows, q_heads], to base 2
    sinks_ptr,  # [q_heads]
    items_ptr,
    segments_ptr,
    positions_ptr,
    bias_ptr,
    row_positions_ptr,
    turns_ptr,
    scale,  # times log2(e)
    partial_rows,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    SLOT_STRIDE: tl.constexpr,  # constant, so that addresses need no additional registers
    KV_HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # TILE * GROUPS rounded up to a power of two, at least 16
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    PARTIAL: tl.constexpr,
    SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    head = tl.program_id(1)
    item_ptr = items_ptr + 6 * tl.program_id(0)
    first_row, rows = tl.load(item_ptr), tl.load(item_ptr + 1)
    first_segment, segments = tl.load(item_ptr + 2), tl.load(item_ptr + 3)

    # The heads of a group share one pass over the keys: row m is query row m // GROUPS, head m % GROUPS of the group.
    m = tl.arange(0, ROWS)
    valid = (m < TILE * GROUPS) & (m // GROUPS < rows)
    row = (first_row + m // GROUPS).to(tl.int64)
    q_head = head * GROUPS + m % GROUPS
    q_position = tl.load(row_positions_ptr + row, mask=valid, other=-1)
    last = tl.max(q_position, 0)
    lowest = tl.load(row_positions_ptr + first_row)
    q_rows = q_ptr + row * q_row_stride + q_head * q_head_stride
    d = tl.arange(0, DIM)
    n = tl.arange(0, BLOCK_KEYS)
    channel = (d < HEAD_DIM)[None, :]

    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for segment in range(first_segment, first_segment + segments):
        segment_ptr = segments_ptr + 6 * segment
        slot, length = tl.load(segment_ptr), tl.load(segment_ptr + 1)
        first, turn, own = tl.load(segment_ptr + 2), tl.load(segment_ptr + 3), tl.load(segment_ptr + 4)
        end = first + length - 1
        if tl.load(segment_ptr + 5) == 1:
            first = tl.load(positions_ptr + own)
            end = tl.load(positions_ptr + own + length - 1)
        if first > last:
            length = length * 0
        q = load_turned(q_rows, valid, turns_ptr + turn * ROTARY_DIM, HEAD_DIM, DIM, ROTARY_DIM, INTERLEAVED)
        at = slot.to(tl.int64) * SLOT_STRIDE + head * KV_HEAD_STRIDE
        # Whole blocks below all rows of the tile: there, only hidden slots need a mask, which is an added bias.
        below = tl.where(own < 0, tl.minimum(length, lowest - first + 1), tl.where(end <= lowest, length, 0))
        whole = tl.where(WINDOW > 0, 0, tl.maximum(below, 0) // BLOCK_KEYS * BLOCK_KEYS)
        bias = tl.load(bias_ptr + own + n, mask=(own >= 0) & (n < whole), other=0.0)
        for start in range(0, whole, BLOCK_KEYS):
            k = tl.load(k_ptr + at + (n[None, :] * SLOT_STRIDE + d[:, None]), mask=(d < HEAD_DIM)[:, None], other=0.0)
            scores = product(q, k, WIDEN) * scale + bias[None, :]
            # The bias is loaded a block ahead, so that no product waits for it.
            stop = start + BLOCK_KEYS
            bias = tl.load(bias_ptr + own + stop + n, mask=(own >= 0) & (stop + n < whole), other=0.0)
            v = tl.load(v_ptr + at + (n[:, None] * SLOT_STRIDE + d[None, :]), mask=channel, other=0.0)
            high, total, acc = update(scores, v, high, total, acc, WIDEN)
            at += BLOCK_KEYS * SLOT_STRIDE
        for start in range(whole, length, BLOCK_KEYS):
            there = start + n < length
            position = key_positions(positions_ptr, own, first, start + n, length)
            k_at = k_ptr + at + (n[None, :] * SLOT_STRIDE + d[:, None])
            k = tl.load(k_at, mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            scores = product(q, k, WIDEN) * scale
            scores = tl.where(visible(position[None, :], q_position, WINDOW), scores, float("-inf"))
            v_at = v_ptr + at + (n[:, None] * SLOT_STRIDE + d[None, :])
            v = tl.load(v_at, mask=there[:, None] & channel, other=0.0)
            high, total, acc = update(scores, v, high, total, acc, WIDEN)
            at += BLOCK_KEYS * SLOT_STRIDE

    inside = valid[:, None] & channel
    if SINKS and not PARTIAL:
        total += tl.exp2(sink(sinks_ptr + q_head, valid) - high)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if PARTIAL:
        part, partial = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
        to = (part * partial_rows + partial + m // GROUPS).to(tl.int64)
        heads = tl.num_programs(1) * GROUPS
        tl.store(lse_ptr + to * heads + q_head, high + tl.log2(total), mask=valid)
        tl.store(out_ptr + ((to * heads + q_head) * HEAD_DIM)[:, None] + d[None, :], acc, mask=inside)
    else:
        out_rows = out_ptr + row * out_row_stride + q_head * out_head_stride
        tl.store(out_rows[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _attend_shared(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, q_heads, head_dim]
    k_ptr,  # [slots, kv_heads, head_dim]
    v_ptr,  # [slots, kv_heads, head_dim]
    partial_ptr,  # float32 [partial results, q_heads, head_dim]
    lse_ptr,  # float32 [partial results, q_heads], to base 2
    items_ptr,
    members_ptr,
    segments_ptr,
    positions_ptr,
    row_positions_ptr,
    turns_ptr,
    scale,  # times log2(e)
    q_row_stride,
    q_head_stride,
    SLOT_STRIDE: tl.constexpr,
    KV_HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Tiles of rows of *several* requests, over keys that all of them see.

    Each row has its own rotation, positions and hidden slots. The smallest matrix product has 16 rows, of which one
    request fills as many as a KV head has query heads, so rows of other requests cost little more than their
    rotations.
    """
    head = tl.program_id(1)
    item_ptr = items_ptr + 4 * tl.program_id(0)
    first_member, members = tl.load(item_ptr), tl.load(item_ptr + 1)
    first_segment, pieces = tl.load(item_ptr + 2), tl.load(item_ptr + 3)

    # Row m is member m // GROUPS, head m % GROUPS of the group.
    m = tl.arange(0, ROWS)
    valid = (m < TILE * GROUPS) & (m // GROUPS < members)
    member_ptr = members_ptr + 2 * (first_member + m // GROUPS)
    row = tl.load(member_ptr, mask=valid, other=0).to(tl.int64)
    q_head = head * GROUPS + m % GROUPS
    q_position = tl.load(row_positions_ptr + row, mask=valid, other=-1)
    q_rows = q_ptr + row * q_row_stride + q_head * q_head_stride
    d = tl.arange(0, DIM)
    n = tl.arange(0, BLOCK_KEYS)
    channel = (d < HEAD_DIM)[None, :]

    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for piece in range(pieces):
        # The segments of a piece are listed by member, all with the same slots.
        segment = first_segment + piece * members
        slot, length = tl.load(segments_ptr + 6 * segment), tl.load(segments_ptr + 6 * segment + 1)
        segment_ptr = segments_ptr + 6 * (segment + m // GROUPS)
        first = tl.load(segment_ptr + 2, mask=valid, other=0)
        turn = tl.load(segment_ptr + 3, mask=valid, other=0)
        own = tl.load(segment_ptr + 4, mask=valid, other=-1)
        turn_rows = (turns_ptr + turn * ROTARY_DIM)[:, None]
        q = load_turned(q_rows, valid, turn_rows, HEAD_DIM, DIM, ROTARY_DIM, INTERLEAVED)
        at = slot.to(tl.int64) * SLOT_STRIDE + head * KV_HEAD_STRIDE
        for start in range(0, length, BLOCK_KEYS):
            there = start + n < length
            slots = (start + n)[None, :]
            position = key_positions(positions_ptr, own[:, None], first[:, None], slots, length)
            k_at = k_ptr + at + (n[None, :] * SLOT_STRIDE + d[:, None])
            k = tl.load(k_at, mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            scores = product(q, k, WIDEN) * scale
            scores = tl.where(visible(position, q_position, WINDOW), scores, float("-inf"))
            v_at = v_ptr + at + (n[:, None] * SLOT_STRIDE + d[None, :])
            v = tl.load(v_at, mask=there[:, None] & channel, other=0.0)
            high, total, acc = update(scores, v, high, total, acc, WIDEN)
            at += BLOCK_KEYS * SLOT_STRIDE

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    to = tl.load(member_ptr + 1, mask=valid, other=0).to(tl.int64) * (tl.num_programs(1) * GROUPS) + q_head
    tl.store(lse_ptr + to, high + tl.log2(total), mask=valid)
    tl.store(partial_ptr + (to * HEAD_DIM)[:, None] + d[None, :], acc, mask=valid[:, None] & channel)


# `parts` is not specialised: it varies with sharing, and each new value would compile the kernel again.
@triton.jit(do_not_specialize=["parts"])
def _merge(  # type: ignore[no-untyped-def]
    partial_ptr,  # float32 [parts, partial rows, q_heads, head_dim]
    lse_ptr,  # float32 [parts, partial rows, q_heads]
    rows_ptr,  # int64 [partial rows]
    sinks_ptr,  # [q_heads]
    out_ptr,
    partial_rows,
    out_row_stride,
    out_head_stride,
    parts,
    PARTS_CEIL: tl.constexpr,  # parts rounded up to a power of two
    SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    partial, head = tl.program_id(0), tl.program_id(1)
    p, d = tl.arange(0, PARTS_CEIL), tl.arange(0, DIM)
    at = (p * partial_rows + partial).to(tl.int64) * tl.num_programs(1) + head
    lse = tl.load(lse_ptr + at, mask=p < parts, other=float("-inf"))
    high = tl.max(lse, 0)
    weights = tl.exp2(lse - high)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink(sinks_ptr + head, True) - high)
    weights = weights / total
    # Parts without any key of the row were never written.
    inside = (weights > 0.0)[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(partial_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    out = tl.sum(values * weights[:, None], 0)
    row = tl.load(rows_ptr + partial)
    to = out_ptr + row * out_row_stride + head * out_head_stride + d
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `attention.sparse_attention`.

    Extra memory: the tables, and parts x rows x q_heads x head_dim floats if keys are split into parts.
    """
    tile = tile_for(q.device, q.shape[2], q.dtype)
    return attend(q, k_pool, v_pool, spans, rotation, scale, window, tile, shared_tile(q.shape[2], q.dtype), sinks)


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    rotation: Rotation,
    scale: float,
    window: int | None,
    tile: Tile,
    shared: Tile | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sparse_attention` with a given tile shape. shared: that of tiles shared by decoding requests, or None."""
    heads, kv_heads = q.shape[1], k_pool.shape[1]
    assert k_pool.stride() == v_pool.stride()
    assert q.stride(2) == k_pool.stride(2) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not spans:  # all rows are tempered
        return out
    if isinstance(spans, TabledSpans):
        table = spans.tables[rotation]
    else:
        grid = Grid.of(heads, kv_heads, tile.rows, processors(q.device), shared.rows if shared else 0)
        table = spans.once(SegmentTable.on, rotation, grid, q.device)
    for launch in table.launches:
        _launch(launch, table, tile, shared, q, k_pool, v_pool, out, rotation, scale, window, sinks)
    return out


def _launch(
    launch: Launch,
    table: SegmentTable,
    tile: Tile,
    shared: Tile | None,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    rotation: Rotation,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    heads, kv_heads, dim = q.shape[1], k_pool.shape[1], q.shape[2]
    partial_rows = len(launch.rows)
    lse = partial = out
    if launch.parts > 1:
        # -inf: parts that a short span does not have get no weight.
        lse = torch.full((launch.parts, partial_rows, heads), float("-inf"), device=q.device)
        partial = torch.empty((launch.parts, partial_rows, heads, dim), device=q.device)
    out_strides, q_strides = out.stride()[:2], q.stride()[:2]
    pointers = (q, k_pool, v_pool, partial, lse)
    shape = constants(q, k_pool, rotation, launch.tile, tile.keys, window)
    few = shape["ROWS"] < tile.rows
    # Without sinks, any pointer in their place.
    sinks_at = q if sinks is None else sinks
    _attend[len(launch.items), kv_heads](
        *pointers,
        sinks_at,
        launch.items,
        *(table.segments, table.positions, table.bias, table.row_positions, table.turns),
        scale * LOG2E,
        partial_rows,
        *q_strides,
        *out_strides,
        **shape,
        PARTIAL=launch.parts > 1,
        SINKS=sinks is not None,
        num_warps=4 if few else tile.warps,
        num_stages=tile.stages,
    )
    if launch.shared is not None:
        assert shared is not None
        _attend_shared[len(launch.shared.items), kv_heads](
            *pointers,
            *(launch.shared.items, launch.shared.members),
            *(table.segments, table.positions, table.row_positions, table.turns),
            scale * LOG2E,
            *q_strides,
            **constants(q, k_pool, rotation, launch.shared.tile, shared.keys, window),
            num_warps=shared.warps,
            num_stages=shared.stages,
        )
    if launch.parts > 1:
        _merge[partial_rows, heads](
            *(partial, lse, launch.rows, sinks_at, out, partial_rows, *out_strides, launch.parts),
            PARTS_CEIL=triton.next_power_of_2(launch.parts),
            SINKS=sinks is not None,
            HEAD_DIM=dim,
            DIM=triton.next_power_of_2(dim),
        )
