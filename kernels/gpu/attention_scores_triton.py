"""`attention_scores` on a GPU in two passes over the keys: first softmax denominators of rows, then sums of columns.

The attention matrix is never stored: the second pass recomputes its blocks, with one program for each block of keys
and KV head, and sums their columns over all rows. Extra memory: a float for each row and head, and one for each key
and KV head.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from fusionkv.kernels.gpu.segment_table import Grid, SegmentTable
from fusionkv.kernels.gpu.tiles_triton import (
    INTERPRETED,
    LOG2E,
    constants,
    key_positions,
    load_turned,
    processors,
    product,
    visible,
)
from fusionkv.kernels.segments import QuerySpan, Rotation
from fusionkv.kernels.upload import upload

_ROWS, _KEYS = 64, 32 if INTERPRETED else 64


@triton.jit
def _denominators(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, q_heads, head_dim]
    k_ptr,  # [slots, kv_heads, head_dim]
    lse_ptr,  # float32 [parts, partial rows, q_heads], to base 2
    items_ptr,
    segments_ptr,
    positions_ptr,
    row_positions_ptr,
    turns_ptr,
    scale,  # times log2(e)
    partial_rows,
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
    head = tl.program_id(1)
    item_ptr = items_ptr + 6 * tl.program_id(0)
    first_row, rows = tl.load(item_ptr), tl.load(item_ptr + 1)
    first_segment, segments = tl.load(item_ptr + 2), tl.load(item_ptr + 3)
    m, n, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_KEYS), tl.arange(0, DIM)
    valid = (m < TILE * GROUPS) & (m // GROUPS < rows)
    row = (first_row + m // GROUPS).to(tl.int64)
    q_head = head * GROUPS + m % GROUPS
    q_position = tl.load(row_positions_ptr + row, mask=valid, other=-1)
    last = tl.max(q_position, 0)
    q_rows = q_ptr + row * q_row_stride + q_head * q_head_stride
    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for segment in range(first_segment, first_segment + segments):
        segment_ptr = segments_ptr + 6 * segment
        slot, length = tl.load(segment_ptr), tl.load(segment_ptr + 1)
        first, turn, own = tl.load(segment_ptr + 2), tl.load(segment_ptr + 3), tl.load(segment_ptr + 4)
        if first > last:
            length = length * 0
        q = load_turned(q_rows, valid, turns_ptr + turn * ROTARY_DIM, HEAD_DIM, DIM, ROTARY_DIM, INTERLEAVED)
        at = slot.to(tl.int64) * SLOT_STRIDE + head * KV_HEAD_STRIDE
        for start in range(0, length, BLOCK_KEYS):
            there = start + n < length
            position = key_positions(positions_ptr, own, first, start + n, length)
            k_at = k_ptr + at + (n[None, :] * SLOT_STRIDE + d[:, None])
            k = tl.load(k_at, mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            scores = product(q, k, WIDEN) * scale
            scores = tl.where(visible(position[None, :], q_position, WINDOW), scores, float("-inf"))
            higher = tl.maximum(high, tl.max(scores, 1))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(high - anchor) + tl.sum(tl.exp2(scores - anchor[:, None]), 1)
            high = higher
            at += BLOCK_KEYS * SLOT_STRIDE
    part, partial = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    to = (part * partial_rows + partial + m // GROUPS).to(tl.int64) * (tl.num_programs(1) * GROUPS) + q_head
    tl.store(lse_ptr + to, high + tl.log2(total), mask=valid)


@triton.jit
def _columns(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    lse_ptr,  # float32 [rows of the span, q_heads]
    out_ptr,  # float32 [kv_heads, listed keys]
    blocks_ptr,  # int32 [blocks, 3]: segment, first key of the block, and that key's index among all listed keys
    segments_ptr,
    positions_ptr,
    row_positions_ptr,
    turns_ptr,
    scale,
    first_row,
    rows,
    keys,
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
    head = tl.program_id(1)
    block_ptr = blocks_ptr + 3 * tl.program_id(0)
    segment_ptr = segments_ptr + 6 * tl.load(block_ptr)
    start, listed = tl.load(block_ptr + 1), tl.load(block_ptr + 2)
    slot, length = tl.load(segment_ptr), tl.load(segment_ptr + 1)
    first, turn, own = tl.load(segment_ptr + 2), tl.load(segment_ptr + 3), tl.load(segment_ptr + 4)
    m, n, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_KEYS), tl.arange(0, DIM)
    there = start + n < length
    position = key_positions(positions_ptr, own, first, start + n, length)
    k_at = k_ptr + (slot + start).to(tl.int64) * SLOT_STRIDE + head * KV_HEAD_STRIDE
    k_at += n[None, :] * SLOT_STRIDE + d[:, None]
    k = tl.load(k_at, mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
    column = tl.zeros([BLOCK_KEYS], tl.float32)
    for tile in range(0, rows, TILE):
        span_row = tile + m // GROUPS
        valid = (m < TILE * GROUPS) & (span_row < rows)
        row = (first_row + span_row).to(tl.int64)
        q_head = head * GROUPS + m % GROUPS
        q_position = tl.load(row_positions_ptr + row, mask=valid, other=-1)
        q_rows = q_ptr + row * q_row_stride + q_head * q_head_stride
        q = load_turned(q_rows, valid, turns_ptr + turn * ROTARY_DIM, HEAD_DIM, DIM, ROTARY_DIM, INTERLEAVED)
        lse = tl.load(lse_ptr + span_row * (tl.num_programs(1) * GROUPS) + q_head, mask=valid, other=0.0)
        scores = product(q, k, WIDEN) * scale
        scores = tl.where(visible(position[None, :], q_position, WINDOW), scores, float("-inf"))
        column += tl.sum(tl.exp2(scores - lse[:, None]), 0)
    tl.store(out_ptr + head.to(tl.int64) * keys + listed + n, column, mask=there)


class _Plan(NamedTuple):
    """Tables that all layers share.

    positions: int64 [listed keys]; `end`, the position after the last row's, for keys that no row sees.
    """

    table: SegmentTable
    blocks: torch.Tensor
    positions: torch.Tensor
    end: int


def _plan(span: QuerySpan, rotation: Rotation, grid: Grid, device: torch.device) -> _Plan:
    table = SegmentTable.of([span], rotation, grid)
    end = int(span.positions[-1]) + 1
    blocks: list[tuple[int, int, int]] = []
    places: list[np.ndarray] = []
    listed, given = 0, table.positions.numpy()
    for index, (_, length, first, _, own, _) in enumerate(table.segments.tolist()):
        blocks += ((index, start, listed + start) for start in range(0, length, _KEYS))
        places.append(np.arange(first, first + length) if own < 0 else given[own : own + length])
        listed += length
    positions = torch.from_numpy(np.minimum(np.concatenate(places), end).astype(np.int64))
    *tensors, block_table, positions = upload(
        [*table.tensors(), torch.tensor(blocks, dtype=torch.int32), positions], device
    )
    return _Plan(table.with_tensors(tensors), block_table, positions, end)


def attention_scores(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    span: QuerySpan,
    rotation: Rotation,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `attention.attention_scores`."""
    heads, kv_heads = q.shape[1], k_pool.shape[1]
    assert q.stride(2) == k_pool.stride(2) == 1
    grid = Grid.of(heads, kv_heads, _ROWS, processors(q.device))
    table, blocks, positions, end = span.once(_plan, rotation, grid, q.device)
    (launch,) = table.launches
    shape = constants(q, k_pool, rotation, launch.tile, _KEYS, window)
    tables = (table.segments, table.positions, table.row_positions, table.turns, scale * LOG2E)
    strides = q.stride()[:2]
    lse = torch.full((launch.parts, span.rows, heads), float("-inf"), device=q.device)
    _denominators[len(launch.items), kv_heads](*(q, k_pool, lse, launch.items), *tables, span.rows, *strides, **shape)
    lse = torch.logsumexp(lse / LOG2E, 0)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float())
    lse *= LOG2E
    columns = torch.empty(kv_heads, len(positions), device=q.device)
    _columns[len(blocks), kv_heads](
        *(q, k_pool, lse, columns, blocks), *tables, *(span.start, span.rows, len(positions)), *strides, **shape
    )
    scores = torch.zeros(end + 1, device=q.device)
    return scores.index_add_(0, positions, columns.sum(0))[:-1]
