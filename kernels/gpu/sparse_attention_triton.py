"""Attention on a GPU: one program for each tile of rows, KV head and part of the keys, as in flash attention.

Few rows, as in decoding, read the pool in place: they are rotated back once per segment. For more rows, and where the
attention to each key is wanted, a kernel first brings a request's keys to prompt order and rotates them there, as a
CPU does: it moves each key once, and then a key's index is its position, stale slots are left out, and every tile
walks one segment. A layer's keys in order are dropped after it, so that the pool's are shared by requests.

Where tiles are too few to fill the GPU, keys are split into parts, and a second kernel merges their results.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fusionkv.kernels.gpu.segment_table import Grid, OrderedTable, SegmentTable, TabledSpans, made_on
from fusionkv.kernels.gpu.tile_shapes import Tile, scored, tile_for
from fusionkv.kernels.gpu.tiles_triton import LOG2E, constants, load_turned, processors, product, sink, visible
from fusionkv.kernels.segments import NEVER, AttentionSpec, QuerySpan, Rotation, Spans

# With more rows, the keys of a request are brought to prompt order; fewer read them about as fast where they are.
_MOST_ROWS = 127
_GATHERED = 64
# Numbers of parts times channels that a program merges; more would spill kilobytes.
_MERGED = 1 << 15
_NEVER = tl.constexpr(NEVER)
# Numbers that vary from step to step are not specialised: for 1 and for multiples of 16, Triton would compile a
# kernel again, in 1 to 4 seconds of the engine's thread.


@triton.jit(do_not_specialize=["keys"])
def _gather(  # type: ignore[no-untyped-def]
    k_ptr,  # [slots, kv_heads, head_dim]
    v_ptr,
    k_out_ptr,  # [keys, kv_heads, head_dim]
    v_out_ptr,
    slots_ptr,  # [keys]
    turn_ptr,  # [keys]: row in turns
    turns_ptr,
    keys,
    SLOT_STRIDE: tl.constexpr,
    KV_HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Copies keys and values, and rotates the keys."""
    head = tl.program_id(1)
    n, d = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS), tl.arange(0, DIM)
    there = n < keys
    slot = tl.load(slots_ptr + n, mask=there, other=0).to(tl.int64)
    turn = tl.load(turn_ptr + n, mask=there, other=0)
    inside = there[:, None] & (d < HEAD_DIM)[None, :]
    at = slot * SLOT_STRIDE + head * KV_HEAD_STRIDE
    to = ((n.to(tl.int64) * tl.num_programs(1) + head) * HEAD_DIM)[:, None] + d[None, :]
    cos = (turns_ptr + turn * ROTARY_DIM)[:, None]
    k = load_turned(k_ptr + at, there, cos, cos + ROTARY_DIM // 2, HEAD_DIM, DIM, ROTARY_DIM, INTERLEAVED)
    tl.store(k_out_ptr + to, k, mask=inside)
    tl.store(v_out_ptr + to, tl.load(v_ptr + at[:, None] + d[None, :], mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["partial_rows"])
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, q_heads, head_dim]
    k_ptr,  # [slots, kv_heads, head_dim]
    v_ptr,  # [slots, kv_heads, head_dim]
    out_ptr,  # [rows, q_heads, head_dim], or PARTIAL float32 [parts, partial rows, q_heads, head_dim]
    lse_ptr,  # float32 [rows, q_heads], or [parts, partial rows, q_heads], to base 2
    sinks_ptr,  # [q_heads]
    items_ptr,
    segments_ptr,
    positions_ptr,
    row_positions_ptr,
    turns_ptr,
    scale,  # times log2(e)
    partial_rows,
    q_row_stride,
    q_head_stride,
    SLOT_STRIDE: tl.constexpr,  # constant, so that addresses need no additional registers
    KV_HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # TILE * GROUPS rounded up to a power of two, at least 16
    WINDOW: tl.constexpr,  # 0: none
    WIDEN: tl.constexpr,
    PARTIAL: tl.constexpr,
    SINKS: tl.constexpr,
    ORDERED: tl.constexpr,  # keys are at their positions: rotating a large tile would spill registers
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
    n, d = tl.arange(0, BLOCK_KEYS), tl.arange(0, DIM)
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]

    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for segment in range(first_segment, first_segment + segments):
        segment_ptr = segments_ptr + 5 * segment
        slot, length = tl.load(segment_ptr), tl.load(segment_ptr + 1)
        first, turn, own = tl.load(segment_ptr + 2), tl.load(segment_ptr + 3), tl.load(segment_ptr + 4)
        # Slot i is at first + i, or further: no row sees those behind the last one.
        length = tl.minimum(length, last - first + 1)
        if ORDERED:
            own = -1
            q = tl.load(q_rows[:, None] + d[None, :], mask=inside, other=0.0)
        else:
            cos = turns_ptr + turn * ROTARY_DIM
            q = load_turned(q_rows, valid, cos, cos + ROTARY_DIM // 2, HEAD_DIM, DIM, ROTARY_DIM, INTERLEAVED)
        # Whole blocks that all rows of the tile see need no mask.
        start, whole = length * 0, tl.maximum(tl.minimum(length, lowest - first + 1), 0) // BLOCK_KEYS * BLOCK_KEYS
        if WINDOW > 0:
            start = tl.maximum(lowest - WINDOW + 1 - first, 0) // BLOCK_KEYS * BLOCK_KEYS
            whole = start
        start, whole = tl.where(own < 0, start, 0), tl.where(own < 0, whole, 0)
        for masked in tl.static_range(2):
            stop = length if masked else whole
            at = (slot + start).to(tl.int64) * SLOT_STRIDE + head * KV_HEAD_STRIDE
            k_at = k_ptr + at + n[None, :] * SLOT_STRIDE + d[:, None]
            v_at = v_ptr + at + n[:, None] * SLOT_STRIDE + d[None, :]
            for begin in range(start, stop, BLOCK_KEYS):
                there = begin + n < length
                k_inside, v_inside = (d < HEAD_DIM)[:, None], (d < HEAD_DIM)[None, :]
                if masked:
                    k_inside, v_inside = k_inside & there[None, :], v_inside & there[:, None]
                scores = product(q, tl.load(k_at, mask=k_inside, other=0.0), None, WIDEN) * scale
                if masked:
                    position = tl.load(positions_ptr + own + begin + n, mask=there & (own >= 0), other=_NEVER)
                    position = tl.where(there & (own < 0), first + begin + n, position)
                    scores = tl.where(visible(position[None, :], q_position, WINDOW), scores, float("-inf"))
                v = tl.load(v_at, mask=v_inside, other=0.0)
                higher = tl.maximum(high, tl.max(scores, 1))
                # A row that has seen no key yet has no maximum to subtract.
                anchor = tl.where(higher == float("-inf"), 0.0, higher)
                weights = tl.exp2(scores - anchor[:, None])
                fade = tl.exp2(high - anchor)
                total, high = total * fade + tl.sum(weights, 1), higher
                acc = product(weights.to(v.dtype), v, acc * fade[:, None], WIDEN)
                k_at += BLOCK_KEYS * SLOT_STRIDE
                v_at += BLOCK_KEYS * SLOT_STRIDE
            start = whole

    if SINKS and not PARTIAL:
        total += tl.exp2(sink(sinks_ptr + q_head, valid) - high)
    to = row
    if PARTIAL:
        to = (tl.load(item_ptr + 4) * partial_rows + tl.load(item_ptr + 5) + m // GROUPS).to(tl.int64)
    to = to * (tl.num_programs(1) * GROUPS) + q_head
    tl.store(lse_ptr + to, high + tl.log2(total), mask=valid)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + (to * HEAD_DIM)[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["partial_rows", "parts"])
def _merge(  # type: ignore[no-untyped-def]
    partial_ptr,  # float32 [parts, partial rows, q_heads, head_dim]
    partial_lse_ptr,  # float32 [parts, partial rows, q_heads], to base 2
    rows_ptr,  # int64 [partial rows]
    sinks_ptr,  # [q_heads]
    out_ptr,
    lse_ptr,
    partial_rows,
    parts,
    PARTS_CEIL: tl.constexpr,  # parts rounded up to a power of two
    SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a program
):
    partial, head = tl.program_id(0), tl.program_id(1)
    p, d = tl.arange(0, PARTS_CEIL), tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    at = (p * partial_rows + partial).to(tl.int64) * tl.num_programs(1) + head
    lse = tl.load(partial_lse_ptr + at, mask=p < parts, other=float("-inf"))
    high = tl.max(lse, 0)
    weights = tl.exp2(lse - high)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink(sinks_ptr + head, True) - high)
    to = tl.load(rows_ptr + partial) * tl.num_programs(1) + head
    tl.store(lse_ptr + to, high + tl.log2(total))
    weights = weights / total
    # Parts without any key of the row were never written.
    inside = (weights > 0.0)[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(partial_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    out = tl.sum(values * weights[:, None], 0)
    tl.store(out_ptr + to * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=["first_row", "rows", "keys"])
def _columns(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, q_heads, head_dim]
    k_ptr,  # [keys, kv_heads, head_dim], in prompt order
    lse_ptr,  # float32 [rows, q_heads], to base 2
    out_ptr,  # float32 [kv_heads, keys]
    row_positions_ptr,
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
    BLOCK_KEYS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Sums the weights of each key of a block over all rows. The matrix is never stored."""
    head = tl.program_id(1)
    m, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    n = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    channel = d < HEAD_DIM
    k_at = k_ptr + head * KV_HEAD_STRIDE + n.to(tl.int64)[None, :] * SLOT_STRIDE + d[:, None]
    k = tl.load(k_at, mask=(n < keys)[None, :] & channel[:, None], other=0.0)
    column = tl.zeros([BLOCK_KEYS], tl.float32)
    for tile in range(0, rows, TILE):
        span_row = tile + m // GROUPS
        valid = (m < TILE * GROUPS) & (span_row < rows)
        row = (first_row + span_row).to(tl.int64)
        q_head = head * GROUPS + m % GROUPS
        q_position = tl.load(row_positions_ptr + row, mask=valid, other=-1)
        q_rows = q_ptr + row * q_row_stride + q_head * q_head_stride
        q = tl.load(q_rows[:, None] + d[None, :], mask=valid[:, None] & channel[None, :], other=0.0)
        lse = tl.load(lse_ptr + row * (tl.num_programs(1) * GROUPS) + q_head, mask=valid, other=0.0)
        scores = tl.where(visible(n[None, :], q_position, WINDOW), product(q, k, None, WIDEN) * scale, float("-inf"))
        column += tl.sum(tl.exp2(scores - lse[:, None]), 0)
    tl.store(out_ptr + head.to(tl.int64) * keys + n, column, mask=n < keys)


class _Layer(NamedTuple):
    """What a layer's kernels are given, besides tables.

    keys, values: a pool, or keys in prompt order. out: the results. lse: float32 [rows, q_heads], the log-sum-exp of
    each row's logits, to base 2.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    spec: AttentionSpec
    tile: Tile
    ordered: bool = False

    @classmethod
    def of(
        cls, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec, tile: Tile | None = None
    ) -> "_Layer":
        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(q.shape[:2], device=q.device)
        return cls(q, keys, values, out, lse, spec, tile or tile_for(q.device, q.shape[2], q.dtype))

    def grid(self) -> Grid:
        return Grid(self.q.shape[1], self.keys.shape[1], self.tile.rows, processors(self.q.device))


def _in_order(ordered: OrderedTable, pool: _Layer) -> _Layer:
    """The layer with its keys in prompt order."""
    shape = (len(ordered.slots), *pool.keys.shape[1:])
    keys, values = (torch.empty(shape, dtype=x.dtype, device=x.device) for x in (pool.keys, pool.values))
    consts = constants(pool.q, pool.keys, _GATHERED, pool.spec.rotation)
    _gather[triton.cdiv(shape[0], _GATHERED), shape[1]](
        *(pool.keys, pool.values, keys, values, ordered.slots, ordered.turn, ordered.turns, shape[0]), **consts
    )
    return pool._replace(keys=keys, values=values, ordered=True)


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    spec: AttentionSpec,
    scores: Mapping[QuerySpan, torch.Tensor] = MappingProxyType({}),
    tile: Tile | None = None,
) -> torch.Tensor:
    """The same as `attention.sparse_attention`. tile: None for that of this GPU.

    Extra memory: the tables, keys and values in prompt order, and parts x rows x q_heads x head_dim floats if keys
    are split into parts.
    """
    assert k_pool.stride() == v_pool.stride()
    assert q.stride(2) == k_pool.stride(2) == 1
    pool = _Layer.of(q, k_pool, v_pool, spec, tile)
    if isinstance(spans, TabledSpans):
        table = spans.tables[spec.rotation]
        if isinstance(table, OrderedTable):
            _attend_ordered(table, pool, scores)
        else:
            _attend_all(table, pool)
        return pool.out
    few, many = spans.once(_split, pool.grid(), frozenset(scores))
    for alike in few:
        _attend_all(alike.once(made_on, SegmentTable, spec.rotation, pool.grid(), q.device), pool)
    if many:
        _attend_ordered(many.once(made_on, OrderedTable, spec.rotation, pool.grid(), q.device), pool, scores)
    return pool.out


def attention_scores(q: torch.Tensor, k_pool: torch.Tensor, span: QuerySpan, spec: AttentionSpec) -> torch.Tensor:
    """The same as `attention.attention_scores`."""
    scores = torch.zeros(int(span.positions[-1]) + 1, device=q.device)
    pool = _Layer.of(q, k_pool, k_pool, spec)
    _attend_ordered(span.once(_alone, spec.rotation, pool.grid(), q.device), pool, {span: scores})
    return scores


def _alone(span: QuerySpan, rotation: Rotation, grid: Grid, device: torch.device) -> OrderedTable:
    return made_on([span], OrderedTable, rotation, grid, device)


def _split(spans: Spans, grid: Grid, scored: frozenset[QuerySpan]) -> tuple[list[Spans], Spans]:
    """Spans of few rows, by size of their tiles, and others: those of many rows or whose attention is summed."""
    few: dict[int, list[QuerySpan]] = {}
    many: list[QuerySpan] = []
    for span in spans:
        among = many if span in scored or span.rows > _MOST_ROWS else few.setdefault(grid.tile(span.rows), [])
        among.append(span)
    return [Spans(alike) for alike in few.values()], Spans(many)


def _attend_ordered(ordered: OrderedTable, pool: _Layer, scores: Mapping[QuerySpan, torch.Tensor]) -> None:
    """Computes rows over their keys in prompt order, and adds the attention to each position to `scores`."""
    layer = _in_order(ordered, pool)
    _attend_all(ordered.table, layer)
    for span, into in scores.items():
        keys, tile = layer.keys[ordered.begins[span.start] :], scored(into.device, pool.q.dtype)
        columns = torch.empty(keys.shape[1], len(into), device=into.device)
        rows = max(1, tile.rows // pool.grid().groups)
        _columns[triton.cdiv(len(into), tile.keys), keys.shape[1]](
            *(pool.q, keys, pool.lse, columns, ordered.scored, pool.spec.scale * LOG2E),
            *(span.start, span.rows, len(into), *pool.q.stride()[:2]),
            **constants(pool.q, keys, tile.keys, None, rows, pool.spec.window),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        into += columns.sum(0)


def _attend_all(table: SegmentTable, layer: _Layer) -> None:
    """Computes the rows of a table."""
    q, partial, lse = layer.q, layer.out, layer.lse
    if table.parts > 1:
        # -inf: parts that a short span does not have get no weight.
        lse = torch.full((table.parts, len(table.rows), q.shape[1]), float("-inf"), device=q.device)
        partial = torch.empty(*lse.shape, q.shape[2], device=q.device)
    consts = constants(q, layer.keys, layer.tile.keys, layer.spec.rotation, table.tile, layer.spec.window)
    # Without sinks, any pointer in their place.
    sinks = q if layer.spec.sinks is None else layer.spec.sinks
    _attend[len(table.items), layer.keys.shape[1]](
        *(q, layer.keys, layer.values, partial, lse, sinks, table.items),
        *(table.segments, table.positions, table.row_positions, table.turns),
        *(layer.spec.scale * LOG2E, len(table.rows), *q.stride()[:2]),
        **consts,
        PARTIAL=table.parts > 1,
        SINKS=layer.spec.sinks is not None,
        ORDERED=layer.ordered,
        num_warps=4 if consts["ROWS"] < layer.tile.rows else layer.tile.warps,
        num_stages=layer.tile.stages,
    )
    if table.parts > 1:
        parts = triton.next_power_of_2(table.parts)
        channels = max(1, min(consts["DIM"], _MERGED // parts))
        _merge[len(table.rows), q.shape[1], triton.cdiv(q.shape[2], channels)](
            *(partial, lse, table.rows, sinks, layer.out, layer.lse, len(table.rows), table.parts),
            PARTS_CEIL=parts,
            SINKS=layer.spec.sinks is not None,
            HEAD_DIM=q.shape[2],
            CHANNELS=channels,
        )
