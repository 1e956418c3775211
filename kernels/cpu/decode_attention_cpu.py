"""Decode attention on a CPU: few rows of many requests over keys in the pool, without copying or rotating keys.

The query rows are rotated back by each segment's shift instead. Each segment yields a partial softmax and its
log-sum-exp, with which the segments are merged, as in flash-decoding. Requests that share a chunk share one pass over
its keys, each request's rows rotated by its own shift. For one row over 8k keys in 18 segments this is 1.9 times
faster than gathering the keys in prompt order (`bench/kernels/cpu.py`); with more than MOST_ROWS rows, gathering is
faster.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fusionkv.kernels.gpu.segment_table import Spans
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import KVSegment, QuerySpan

MOST_ROWS = 8

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _Run(NamedTuple):
    """Slots `[start, start + length)`, read by the rotated rows `[first, first + rows)` of a KV head.

    bias: 0 or -inf [1, 1, rows, length]; None if every row sees all slots.
    """

    first: int
    rows: int
    start: int
    length: int
    bias: torch.Tensor | None


class _Plan(NamedTuple):
    """The slots that rows read, the same in all layers. A row is rotated once for each segment that it reads.

    row: int64 [turned]: index in the batch of each rotated row.
    cos, sin: float32 [turned, 1, rotary_dim / 2], for `Rotation.apply`.
    blind: bool [1 + turned]: rotated rows that see no key of their segment; entry 0 is padding.
    rows: int64 [rows]: indices in the batch of the rows that are computed.
    merged: int64 [rows, most]: indices in `blind` of each row's rotated rows, padded with 0.
    """

    runs: list[_Run]
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
    turned = rotation.apply(q.index_select(0, plan.row), plan.cos, plan.sin)
    # [1, kv_heads, turned * groups, dim]: the heads of a group, and of all requests, share one pass over the keys.
    turned = turned.unflatten(1, (kv_heads, groups)).transpose(0, 1).flatten(1, 2)[None]
    k, v = (pool.transpose(0, 1)[None] for pool in (k_pool, v_pool))
    # Row 0 is padding, of weight 0. The loop runs for every chunk, layer and token: with 8 chunks, each view in it
    # takes 1% of SmolLM2's time per token.
    means, sums = [turned.new_zeros(1, kv_heads, groups, q.shape[2])], [q.new_zeros(1, kv_heads, groups).float()]
    for first, count, start, length, bias in plan.runs:
        rows, keys, values = turned.narrow(2, first, count), k.narrow(2, start, length), v.narrow(2, start, length)
        mean, lse = _flash(rows, keys, values, 0.0, False, attn_mask=bias, scale=scale)
        means.append(mean)
        sums.append(lse)
    # For a row that sees no key, the operator returns a log-sum-exp of 0 instead of -inf.
    lse = torch.cat(sums, 2)[0].unflatten(1, (-1, groups)).masked_fill_(plan.blind[:, None], float("-inf"))
    weights = lse[:, plan.merged].softmax(2)
    found = (torch.cat(means, 2)[0].unflatten(1, (-1, groups))[:, plan.merged] * weights[..., None]).sum(2)
    out[plan.rows] = found.transpose(0, 1).flatten(1, 2).to(q.dtype)


def _plan(few: Sequence[QuerySpan], rotation: Rotation, groups: int, window: int | None, dtype: torch.dtype) -> _Plan:
    by_slots: dict[tuple[int, int], list[tuple[QuerySpan, KVSegment]]] = {}
    for span in few:
        for segment in _seen(span, window):
            by_slots.setdefault((segment.start, segment.stop), []).append((span, segment))
    runs: list[_Run] = []
    row: list[int] = []
    shifts: list[int] = []
    blind = [torch.ones(1, dtype=torch.bool)]
    for (start, stop), pairs in by_slots.items():
        first = len(row)
        hidden = [_unseen(span, segment, window) for span, segment in pairs]
        for (span, segment), unseen in zip(pairs, hidden, strict=True):
            row += range(span.start, span.stop)
            shifts += [-segment.shift] * span.rows
            blind.append(torch.zeros(span.rows, dtype=torch.bool) if unseen is None else unseen.all(-1))
        count, bias = (len(row) - first) * groups, _bias(pairs, hidden, groups, dtype)
        runs.append(_Run(first * groups, count, start, stop - start, bias))
    rows = [number for span in few for number in range(span.start, span.stop)]
    of: dict[int, list[int]] = {number: [] for number in rows}
    for turned, number in enumerate(row, 1):
        of[number].append(turned)
    most = max(map(len, of.values()))
    merged = [found + [0] * (most - len(found)) for found in of.values()]
    cos, sin = (factor[:, None] for factor in rotation.factors(torch.tensor(shifts)))
    return _Plan(runs, torch.tensor(row), cos, sin, torch.cat(blind), torch.tensor(rows), torch.tensor(merged))


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


def _bias(
    pairs: Sequence[tuple[QuerySpan, KVSegment]],
    hidden: Sequence[torch.Tensor | None],
    groups: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Attention bias over slots that all pairs share, their rows concatenated; None if every row sees all slots."""
    if all(unseen is None or not unseen.any() for unseen in hidden):
        return None
    parts = [
        torch.zeros(span.rows, segment.length, dtype=torch.bool) if unseen is None else unseen
        for (span, segment), unseen in zip(pairs, hidden, strict=True)
    ]
    unseen = torch.cat(parts)
    bias = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
    return bias.repeat_interleave(groups, 0)[None, None]
