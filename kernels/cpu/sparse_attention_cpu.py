"""`sparse_attention` on a CPU: many rows over keys gathered in prompt order, a few rows over keys in place.

Many rows: with a request's keys in prompt order, the causal mask is a prefix, and stale keys are omitted. Gathering
the keys costs less than rotating the rows once per chunk. torch's fused operator computes the rows in blocks.

A few rows of many requests (decoding): keys are not rotated; the rows are rotated back by each segment's shift
instead. Segments are cut into tiles of equal length, which one call of the operator computes together; each tile
yields a partial softmax and its log-sum-exp, with which the tiles are merged, as in flash-decoding. Requests that
share a chunk share one pass over its keys, each request's rows rotated by its own shift.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from fusionkv.kernels.cpu.compute_dtype import compute_dtype
from fusionkv.kernels.segments import AttentionSpec, KVSegment, QuerySpan, Rotation, Spans

# With more rows of a request, gathering its keys in prompt order is faster.
MOST_ROWS = 8
_OPERATOR_ROWS, _BLOCK_ROWS = 32, 128  # that the operator computes at a time, and that a block has at most
_KEPT = 1 << 23  # entries of a request's masks up to which they are made once, not for every layer
_WEIGHTS = 1 << 19  # of a KV head that are computed at a time: 2 MB, which fits the CPU's cache
# Tiles are copied to stand side by side. To read every segment in place, by a call of its own, costs 15 us a call:
# with SmolLM2, 2,560 tokens in 20 segments take 0.43 ms a layer, in tiles of 128 slots 0.17 ms, and in one segment
# that is read in place 0.15 ms (two cores).
# Lengths of tiles, and what a tile costs besides its slots, in slots: the last tile of a segment is padded.
_LENGTHS, _TILE_COST = range(96, 513, 32), 16

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    spec: AttentionSpec,
    scores: Mapping[QuerySpan, torch.Tensor],
) -> torch.Tensor:
    """The same as `attention.sparse_attention`."""
    out = torch.empty_like(q)
    few = spans.once(_few, frozenset(scores))
    if few:
        decode_attention(q, k_pool, v_pool, few, spec, out)
    for span in spans:
        if span not in few:
            rows = slice(span.start, span.stop)
            out[rows] = prefill_attention(q[rows], k_pool, v_pool, span, spec, scores.get(span))
    return out


def _few(spans: Spans, scored: frozenset[QuerySpan]) -> Spans:
    """The spans of a few rows, without those whose attention is summed."""
    return Spans([span for span in spans if span.rows <= MOST_ROWS and span not in scored])


class _Block(NamedTuple):
    """Consecutive rows, and the keys `[low, high)` that any of the rows sees.

    bias: 0 or -inf [rows, keys], of the keys from `start` on; all rows see those between `low` and `start`.
    """

    rows: slice
    low: int
    high: int
    start: int
    bias: torch.Tensor

    def mask(self) -> torch.Tensor:
        """0 or -inf [rows, high - low]."""
        return pad(self.bias, (self.start - self.low, 0)) if self.start > self.low else self.bias


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    span: QuerySpan,
    spec: AttentionSpec,
    scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sparse_attention` of one span: q and the result are [rows, q_heads, head_dim].

    scores: float32 [last position + 1]; the attention of all rows to each position is added to it.
    """
    order = span.in_order(spec.rotation, q.device)
    v = v_pool.index_select(0, order.slots)
    if scores is not None:
        return _explicit(q, order.keys(k_pool, torch.float32), v, span, spec, scores).to(q.dtype)
    k = order.keys(k_pool, compute_dtype(k_pool.dtype))
    # [1, heads, tokens, head_dim]
    rows, keys, values = (part.to(k.dtype).transpose(0, 1)[None] for part in (q, k, v))
    if span.rows == len(k) and spec.window is None:
        out = _fused(rows, keys, values, None, spec)
    else:
        out = torch.empty_like(rows)
        for block in span.once(_blocks, spec.window, k.dtype, _block_rows(k.dtype, q.shape[1])):
            visible = slice(block.low, block.high)
            seen = keys[:, :, visible], values[:, :, visible], block.mask()[None, None]
            out[:, :, block.rows] = _fused(rows[:, :, block.rows], *seen, spec)
    return out[0].transpose(0, 1).to(q.dtype)


def _fused(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    """torch's operator over [1, heads, tokens, head_dim]; causal without a mask."""
    causal = mask is None
    if spec.sinks is None:
        return scaled_dot_product_attention(rows, keys, values, mask, 0.0, causal, scale=spec.scale, enable_gqa=True)
    out, lse = _flash(rows, keys, values, 0.0, causal, attn_mask=mask, scale=spec.scale)
    return out * _kept(lse, spec.sinks[:, None])[..., None]


def _kept(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The share of a row's attention that its keys, of this log-sum-exp, keep beside a sink."""
    return (lse - sinks.float()).sigmoid()


def attention_scores(q: torch.Tensor, k_pool: torch.Tensor, span: QuerySpan, spec: AttentionSpec) -> torch.Tensor:
    """`attention.attention_scores` of one span; q holds only the span's rows."""
    k = span.in_order(spec.rotation, q.device).keys(k_pool, torch.float32)
    scores = torch.zeros(len(k))
    _explicit(q, k, None, span, spec, scores)
    return scores


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    span: QuerySpan,
    spec: AttentionSpec,
    scores: torch.Tensor,
) -> torch.Tensor:
    """Attention through its weights, whose sums over all rows and heads are added to `scores`, float32 [positions].

    Computed in float32: bfloat16 would round large logits to a few values. k: float32. Returns float32
    [rows, q_heads, head_dim]; zeros without values.
    """
    groups = q.shape[1] // k.shape[1]
    keys = k.permute(1, 2, 0).contiguous()
    values = None if v is None else v.float().transpose(0, 1)
    rows = q.float().unflatten(1, (-1, groups)).permute(1, 2, 0, 3)  # [kv_heads, groups, rows, head_dim]
    out = torch.zeros(rows.shape)
    size = max(1, min(_BLOCK_ROWS, _WEIGHTS // len(k) // groups))
    for block in span.once(_blocks, spec.window, torch.float32, size):
        visible = slice(block.low, block.high)
        logits = torch.bmm(rows[:, :, block.rows].flatten(1, 2), keys[..., visible]).mul_(spec.scale)
        logits.unflatten(1, (groups, -1)).add_(block.mask())
        weights = logits.softmax(-1)
        if spec.sinks is not None:
            by_row = spec.sinks.view(-1, groups, 1).expand(-1, -1, logits.shape[1] // groups).flatten(1)
            weights *= _kept(logits.logsumexp(-1), by_row)[..., None]
        scores[visible] += weights.sum((0, 1))
        if values is not None:
            out[:, :, block.rows] = torch.bmm(weights, values[:, visible]).unflatten(1, (groups, -1))
    return out.flatten(0, 1).transpose(0, 1)


def _block_rows(dtype: torch.dtype, heads: int) -> int:
    """Rows of a block: more compute more keys beyond those that they see; fewer leave cores idle.

    The operator computes 32 rows of a head at a time. With AMX it reorders all keys and values in each call, which
    only pays for many rows. The 288 rows of a prompt of 2,288 tokens take 13.1 ms in blocks of 32 and 15.4 ms in
    blocks of 128 (SmolLM2, two cores without AMX).
    """
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return _BLOCK_ROWS
    return min(_BLOCK_ROWS, _OPERATOR_ROWS * -(-2 * torch.get_num_threads() // heads))


def _blocks(span: QuerySpan, window: int | None, dtype: torch.dtype, size: int) -> list[_Block]:
    """The blocks of `size` rows of the span."""
    blocks, positions = list[_Block](), span.positions
    for begin in range(0, len(positions), size):
        rows = positions[begin : begin + size, None]
        first, last = int(rows[0]), int(rows[-1])
        low = 0 if window is None else max(0, first - window + 1)
        # Large masks are not kept whole: all rows see the keys up to the first row's position, and `mask` adds zeros
        # for those in every layer.
        short = len(positions) * int(positions[-1]) > _KEPT and (window is None or last - window < low)
        start = first + 1 if short else low
        keys = torch.arange(start, last + 1)
        unseen = keys > rows
        if window is not None:
            unseen |= keys <= rows - window
        bias = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
        blocks.append(_Block(slice(begin, begin + len(rows)), low, last + 1, start, bias))
    return blocks


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


def decode_attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, few: Spans, spec: AttentionSpec, out: torch.Tensor
) -> None:
    """`sparse_attention` for spans of a few rows; writes their rows of `out`."""
    kv_heads = k_pool.shape[1]
    groups = q.shape[1] // kv_heads
    plan = few.once(_plan, spec.rotation, groups, spec.window, q.dtype)
    turned = spec.rotation.apply(q.index_select(0, plan.row), plan.cos, plan.sin).unflatten(1, (kv_heads, groups))
    # [parts, kv_heads, groups, ...]; the first part is padding, of weight 0.
    means, sums = [turned.new_zeros(1, *turned.shape[1:])], [turned.new_zeros(1, kv_heads, groups).float()]
    for call in plan.calls:
        # [tiles, kv_heads, rows * groups, dim]: the heads of a group, and of all requests, share one pass over keys.
        rows = turned.index_select(0, call.turned).unflatten(0, (-1, call.rows)).transpose(1, 2).flatten(2, 3)
        keys, values = call.read(k_pool), call.read(v_pool)
        mean, lse = _flash(rows, keys, values, 0.0, False, attn_mask=call.bias, scale=spec.scale)
        means.append(mean.unflatten(2, (-1, groups)).transpose(1, 2).flatten(0, 1))
        sums.append(lse.unflatten(2, (-1, groups)).transpose(1, 2).flatten(0, 1))
    # For a row that sees no key, the operator returns a log-sum-exp of 0 instead of -inf.
    lse = torch.cat(sums).masked_fill_(plan.blind[:, None, None], float("-inf"))
    parts = lse[plan.merged]
    weights = parts.softmax(1)
    if spec.sinks is not None:
        weights *= _kept(parts.logsumexp(1), spec.sinks.view(kv_heads, groups))[:, None]
    merged = (torch.cat(means)[plan.merged] * weights[..., None]).sum(1)
    out[plan.rows] = merged.flatten(1, 2).to(q.dtype)


class _Source(NamedTuple):
    """Slots that the rotated rows `[first, first + rows)` read. unseen: bool [rows, slots]; None if all are seen."""

    first: int
    rows: int
    slots: Sequence[range]
    unseen: torch.Tensor | None

    def padded(self, count: int) -> torch.Tensor:
        """int64 [count]: the slots, and the last one again and again."""
        *others, last = self.slots
        rest = torch.arange(last.start, last.start + count - sum(map(len, others))).clamp_(max=last.stop - 1)
        return torch.cat([*(torch.arange(each.start, each.stop) for each in others), rest]) if others else rest


# A segment and those that continue it, cut into tiles as one: answers must not depend on where a pool has tokens.
_Run = Sequence[KVSegment]


def _plan(few: Spans, rotation: Rotation, groups: int, window: int | None, dtype: torch.dtype) -> _Plan:
    by_slots: dict[tuple[range, ...], list[tuple[QuerySpan, _Run]]] = defaultdict(list)
    for span in few:
        for run in _seen(span, window):
            by_slots[tuple(range(segment.start, segment.stop) for segment in run)].append((span, run))
    row: list[int] = []
    shifts: list[int] = []
    by_rows: dict[int, list[_Source]] = defaultdict(list)
    for slots, pairs in by_slots.items():
        first = len(row)
        for span, run in pairs:
            row += range(span.start, span.stop)
            shifts += [-run[0].shift] * span.rows
        source = _Source(first, len(row) - first, slots, _all_unseen(pairs, window))
        by_rows[source.rows].append(source)
    made = [_call(sources, groups, dtype) for sources in by_rows.values()]
    blind = torch.cat([torch.ones(1, dtype=torch.bool), *(blind for _, blind in made)])
    calls = [call for call, _ in made]
    rows = [number for span in few for number in range(span.start, span.stop)]
    parts: dict[int, list[int]] = {number: [] for number in rows}
    for part, turned in enumerate((number for call in calls for number in call.turned.tolist()), 1):
        parts[row[turned]].append(part)
    most = max(map(len, parts.values()))
    merged = [numbers + [0] * (most - len(numbers)) for numbers in parts.values()]
    cos, sin = (factor[:, None] for factor in rotation.factors(torch.tensor(shifts), torch.device("cpu")))
    return _Plan(calls, torch.tensor(row), cos, sin, blind, torch.tensor(rows), torch.tensor(merged))


def _call(sources: Sequence[_Source], groups: int, dtype: torch.dtype) -> tuple[_Call, torch.Tensor]:
    """A call for sources that are read by the same number of rows, cut into tiles.

    Returns the call, and bool [tiles * rows]: rows that see no key of their tile.
    """
    rows, sizes = sources[0].rows, [sum(map(len, source.slots)) for source in sources]
    length = min(_LENGTHS, key=lambda n: sum(-(-size // n) for size in sizes) * (n + _TILE_COST))
    counts = [-(-size // length) for size in sizes]
    cut = list(zip(sources, counts, strict=True))
    turned = torch.cat([torch.arange(s.first, s.first + rows).repeat(count) for s, count in cut])
    slots = torch.cat([s.padded(count * length) for s, count in cut])
    if all(s.unseen is None and not size % length for s, size in zip(sources, sizes, strict=True)):
        return _Call(rows, turned, slots, None), torch.zeros(len(turned), dtype=torch.bool)
    unseen = torch.cat([_tiled(s, size, count, length) for (s, count), size in zip(cut, sizes, strict=True)])
    bias = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
    return _Call(rows, turned, slots, bias.repeat_interleave(groups, 1)[:, None]), unseen.all(-1).flatten()


def _tiled(source: _Source, size: int, count: int, length: int) -> torch.Tensor:
    """bool [count, rows, length]: slots of each tile that a row does not see, or that are behind `size` slots."""
    unseen = torch.ones(source.rows, count * length, dtype=torch.bool)
    unseen[:, :size] = False if source.unseen is None else source.unseen
    return unseen.unflatten(1, (count, length)).transpose(0, 1)


def _seen(span: QuerySpan, window: int | None) -> Iterator[_Run]:
    """The runs with a key that any row may see."""
    first, last = int(span.positions[0]), int(span.positions[-1])
    runs = list[list[KVSegment]]()
    for segment in span.segments:
        if segment.continues:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    for run in runs:
        if run[0].first <= last and (window is None or run[-1].last > first - window):
            yield run


def _unseen(span: QuerySpan, run: _Run, window: int | None) -> torch.Tensor | None:
    """bool [rows, keys], True for keys that a row does not see; None if every row sees all keys."""
    first, last = int(span.positions[0]), int(span.positions[-1])
    hidden = [segment.hidden for segment in run if segment.hidden is not None]
    if run[-1].last <= first and (window is None or run[0].first > last - window):
        return torch.cat(hidden).expand(span.rows, -1) if hidden else None
    keys = torch.cat([segment.key_positions() for segment in run])
    unseen = keys > span.positions[:, None]
    if window is not None:
        unseen |= keys <= span.positions[:, None] - window
    return unseen | torch.cat(hidden) if hidden else unseen


def _all_unseen(pairs: Sequence[tuple[QuerySpan, _Run]], window: int | None) -> torch.Tensor | None:
    """bool [rows, slots] of slots that all pairs share, their rows concatenated; None if every row sees all slots."""
    hidden = [_unseen(span, run, window) for span, run in pairs]
    if all(unseen is None or not unseen.any() for unseen in hidden):
        return None
    parts = [
        torch.zeros(span.rows, sum(segment.length for segment in run), dtype=torch.bool) if unseen is None else unseen
        for (span, run), unseen in zip(pairs, hidden, strict=True)
    ]
    return torch.cat(parts)
