"""Decode attention on a CPU: few rows of many requests over keys in the pool, without rotating keys.

The query rows are rotated back by each segment's shift instead. Segments are cut into tiles of equal length, which
one call of the operator computes together; each tile yields a partial softmax and its log-sum-exp, with which the
tiles are merged, as in flash-decoding. Requests that share a chunk share one pass over its keys, each request's rows
rotated by its own shift. With more than MOST_ROWS rows, gathering the keys in prompt order is faster
(`bench/kernels/cpu.py`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fusionkv.kernels.gpu.segment_table import Spans
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import KVSegment, QuerySpan

MOST_ROWS = 8
# Tiles are copied to stand side by side. To read every segment in place, by a call of its own, costs 15 us a call:
# with SmolLM2, 2,560 tokens in 20 segments take 0.43 ms a layer, in tiles of 128 slots 0.17 ms, and in one segment
# that is read in place 0.15 ms (two cores).
# Lengths of tiles, and what a tile costs besides its slots, in slots: the last tile of a segment is padded.
_LENGTHS, _TILE_COST = range(96, 513, 32), 16

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _Call(NamedTuple):
    """Tiles that are computed together, each read by the same number of rotated rows.

    rows: the number of rotated rows of a tile.
    turned: int64 [tiles * rows]: indices of the rotated rows, by tile.
    slots: int64 [tiles * length].
    bias: 0 or -inf [tiles, 1, rows * groups, length]; None if every row sees all slots.
    """

    rows: int
    turned: torch.Tensor
    slots: torch.Tensor
    bias: torch.Tensor | None

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """The tiles' keys or values [tiles, kv_heads, length, head_dim] from a pool [slots, kv_heads, head_dim]."""
        tiles = len(self.turned) // self.rows
        return pool.index_select(0, self.slots).unflatten(0, (tiles, -1)).transpose(1, 2)


class _Plan(NamedTuple):
    """The slots that rows read, the same in all layers. A row is rotated once for each segment that it reads.

    row: int64 [turned]: index in the batch of each rotated row.
    cos, sin: float32 [turned, 1, rotary_dim / 2], for `Rotation.apply`.
    blind: bool [1 + parts]: rows of tiles, over all calls, that see no key of their tile; entry 0 is padding.
    rows: int64 [rows]: indices in the batch of the rows that are computed.
    merged: int64 [rows, most]: indices in `blind` of each row's parts, padded with 0.
    """

    calls: list[_Call]
    row: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    blind: torch.Tensor
    rows: torch.Tensor
    merged: torch.Tensor


def attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    few: Sequence[QuerySpan],
    rotation: Rotation,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """`sparse_attention` for the spans `few` of the batch `spans`; writes their rows of `out`."""
    kv_heads = k_pool.shape[1]
    groups = q.shape[1] // kv_heads
    key = ("decode", tuple(span.start for span in few), rotation, groups, window, q.dtype)
    if key not in spans.views:
        spans.views[key] = _plan(few, rotation, groups, window, q.dtype)
    plan: _Plan = spans.views[key]
    turned = rotation.apply(q.index_select(0, plan.row), plan.cos, plan.sin).unflatten(1, (kv_heads, groups))
    # [parts, kv_heads, groups, ...]; the first part is padding, of weight 0.
    means, sums = [turned.new_zeros(1, *turned.shape[1:])], [turned.new_zeros(1, kv_heads, groups).float()]
    for call in plan.calls:
        # [tiles, kv_heads, rows * groups, dim]: the heads of a group, and of all requests, share one pass over keys.
        rows = turned.index_select(0, call.turned).unflatten(0, (-1, call.rows)).transpose(1, 2).flatten(2, 3)
        keys, values = call.read(k_pool), call.read(v_pool)
        mean, lse = _flash(rows, keys, values, 0.0, False, attn_mask=call.bias, scale=scale)
        means.append(mean.unflatten(2, (-1, groups)).transpose(1, 2).flatten(0, 1))
        sums.append(lse.unflatten(2, (-1, groups)).transpose(1, 2).flatten(0, 1))
    # For a row that sees no key, the operator returns a log-sum-exp of 0 instead of -inf.
    lse = torch.cat(sums).masked_fill_(plan.blind[:, None, None], float("-inf"))
    weights = lse[plan.merged].softmax(1)
    found = (torch.cat(means)[plan.merged] * weights[..., None]).sum(1)
    out[plan.rows] = found.flatten(1, 2).to(q.dtype)


class _Source(NamedTuple):
    """Slots that the rotated rows `[first, first + rows)` read. unseen: bool [rows, slots]; None if all are seen."""

    first: int
    rows: int
    slots: range
    unseen: torch.Tensor | None


def _plan(few: Sequence[QuerySpan], rotation: Rotation, groups: int, window: int | None, dtype: torch.dtype) -> _Plan:
    by_slots: dict[tuple[int, int], list[tuple[QuerySpan, KVSegment]]] = defaultdict(list)
    for span in few:
        for segment in _seen(span, window):
            by_slots[segment.start, segment.stop].append((span, segment))
    row: list[int] = []
    shifts: list[int] = []
    by_rows: dict[int, list[_Source]] = defaultdict(list)
    for (start, stop), pairs in by_slots.items():
        first = len(row)
        for span, segment in pairs:
            row += range(span.start, span.stop)
            shifts += [-segment.shift] * span.rows
        source = _Source(first, len(row) - first, range(start, stop), _all_unseen(pairs, window))
        by_rows[source.rows].append(source)
    made = [_call(sources, groups, dtype) for sources in by_rows.values()]
    blind = torch.cat([torch.ones(1, dtype=torch.bool), *(blind for _, blind in made)])
    calls = [call for call, _ in made]
    rows = [number for span in few for number in range(span.start, span.stop)]
    parts: dict[int, list[int]] = {number: [] for number in rows}
    for part, turned in enumerate((number for call in calls for number in call.turned.tolist()), 1):
        parts[row[turned]].append(part)
    most = max(map(len, parts.values()))
    merged = [found + [0] * (most - len(found)) for found in parts.values()]
    cos, sin = (factor[:, None] for factor in rotation.factors(torch.tensor(shifts)))
    return _Plan(calls, torch.tensor(row), cos, sin, blind, torch.tensor(rows), torch.tensor(merged))


def _call(sources: Sequence[_Source], groups: int, dtype: torch.dtype) -> tuple[_Call, torch.Tensor]:
    """A call for sources that are read by the same number of rows, cut into tiles.

    Returns the call, and bool [tiles * rows]: rows that see no key of their tile.
    """
    rows = sources[0].rows
    length = min(_LENGTHS, key=lambda n: sum(-(-len(s.slots) // n) for s in sources) * (n + _TILE_COST))
    counts = [-(-len(source.slots) // length) for source in sources]
    cut = list(zip(sources, counts, strict=True))
    turned = torch.cat([torch.arange(s.first, s.first + rows).repeat(count) for s, count in cut])
    # Padding repeats the last slot.
    padded = [torch.arange(s.slots.start, s.slots.start + n * length).clamp_(max=s.slots.stop - 1) for s, n in cut]
    slots = torch.cat(padded)
    if all(s.unseen is None and not len(s.slots) % length for s in sources):
        return _Call(rows, turned, slots, None), torch.zeros(len(turned), dtype=torch.bool)
    unseen = torch.cat([_tiled(s, count, length) for s, count in cut])
    bias = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
    return _Call(rows, turned, slots, bias.repeat_interleave(groups, 1)[:, None]), unseen.all(-1).flatten()


def _tiled(source: _Source, count: int, length: int) -> torch.Tensor:
    """bool [count, rows, length]: slots of each tile that a row does not see, padding included."""
    unseen = torch.ones(source.rows, count * length, dtype=torch.bool)
    unseen[:, : len(source.slots)] = False if source.unseen is None else source.unseen
    return unseen.unflatten(1, (count, length)).transpose(0, 1)


def _seen(span: QuerySpan, window: int | None) -> Iterator[KVSegment]:
    """The segments with a key that any row may see."""
    first, last = int(span.positions[0]), int(span.positions[-1])
    for segment in span.segments:
        if segment.first <= last and (window is None or segment.last > first - window):
            yield segment


def _unseen(span: QuerySpan, segment: KVSegment, window: int | None) -> torch.Tensor | None:
    """bool [rows, keys], True for keys that a row does not see; None if every row sees all keys."""
    first, last = int(span.positions[0]), int(span.positions[-1])
    inside = segment.last <= first and (window is None or segment.first > last - window)
    if inside and segment.hidden is None:
        return None
    unseen = torch.zeros(span.rows, segment.length, dtype=torch.bool)
    if segment.hidden is not None:
        unseen |= segment.hidden
    if not inside:
        keys = segment.key_positions(unseen.device)
        unseen |= keys > span.positions[:, None]
        if window is not None:
            unseen |= keys <= span.positions[:, None] - window
    return unseen


def _all_unseen(pairs: Sequence[tuple[QuerySpan, KVSegment]], window: int | None) -> torch.Tensor | None:
    """bool [rows, slots] of slots that all pairs share, their rows concatenated; None if every row sees all slots."""
    hidden = [_unseen(span, segment, window) for span, segment in pairs]
    if all(unseen is None or not unseen.any() for unseen in hidden):
        return None
    parts = [
        torch.zeros(span.rows, segment.length, dtype=torch.bool) if unseen is None else unseen
        for (span, segment), unseen in zip(pairs, hidden, strict=True)
    ]
    return torch.cat(parts)
