"""Decoding on a CPU: few rows over keys where they lie, no key copied or turned.

The rows are turned back by each segment's shift instead. Each segment gives a partial softmax and its log-sum-exp, by
which they merge (as flash-decoding does). At 8k keys in 17 segments, 14/2 heads, one row takes 1.7 ms a layer so, and
2.6 ms with the keys laid out in prompt order first; from 16 rows on the other way is faster.
"""

import torch

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import Segment, Span

MOST_ROWS = 8

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    span: Span,
    rotation: Rotation,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """As `sparse_attention`, of one span: q and the result are [rows, q_heads, head_dim]."""
    first, last = int(span.positions[0]), int(span.positions[-1])
    kv_heads = k_pool.shape[1]
    partial: list[tuple[torch.Tensor, torch.Tensor]] = []
    turned: dict[int, torch.Tensor] = {}
    for segment in span.segments:
        if segment.first > last or (window is not None and segment.last <= first - window):
            continue
        if segment.shift not in turned:
            turned[segment.shift] = _fold(rotation.turn(q, -segment.shift), kv_heads)
        k, v = _heads(k_pool[segment.start : segment.stop]), _heads(v_pool[segment.start : segment.stop])
        unseen = _unseen(segment, span.positions, window)
        if unseen is None:
            partial.append(_flash(turned[segment.shift], k, v, 0.0, False, scale=scale))
        else:
            partial.append(_masked(turned[segment.shift], k, v, unseen, scale))
    return _unfold(_merge(partial), q)


def _unseen(segment: Segment, positions: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """bool [rows, length], or None where every row sees the whole segment."""
    future = segment.last > int(positions[0])
    past = window is not None and segment.first <= int(positions[-1]) - window
    if segment.hidden is None and not future and not past:
        return None
    unseen = torch.zeros(len(positions), segment.length, dtype=torch.bool)
    if segment.hidden is not None:
        unseen |= segment.hidden
    if future or past:
        keys = segment.key_positions(positions.device)
        unseen |= keys > positions[:, None]
        if window is not None:
            unseen |= keys <= positions[:, None] - window
    return unseen


def _merge(partial: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Joins softmax results over disjoint keys. Pairs of out [1, heads, rows, dim] and lse [1, heads, rows]."""
    if len(partial) == 1:
        return partial[0][0]
    weights = torch.stack([lse.float() for _, lse in partial]).softmax(0)[..., None]
    total = torch.zeros_like(partial[0][0], dtype=torch.float32)
    for weight, (out, _) in zip(weights, partial, strict=True):
        total += out.float() * weight
    return total.to(partial[0][0].dtype)


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, unseen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and log-sum-exp where `unseen` [rows, keys] is not set; q's rows repeat it when they are folded."""
    bias = torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, float("-inf"))
    blind = unseen.all(-1)
    if q.shape[2] != len(unseen):
        groups = q.shape[2] // len(unseen)
        bias, blind = bias.repeat(groups, 1), blind.repeat(groups)
    out, lse = _flash(q, k, v, 0.0, False, attn_mask=bias[None, None], scale=scale)
    # For a row that sees nothing of these keys the operator answers lse 0 where it is -inf.
    return out, lse.masked_fill(blind, float("-inf"))


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] as [1, heads, tokens, dim], a view."""
    return x.transpose(0, 1)[None]


def _fold(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[rows, q_heads, dim] as [1, kv_heads, groups * rows, dim], so that a group's heads share one pass over keys."""
    rows, heads, dim = q.shape
    return q.transpose(0, 1).reshape(1, kv_heads, heads // kv_heads * rows, dim)


def _unfold(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    rows, heads, dim = q.shape
    return out.reshape(heads, rows, dim).transpose(0, 1)
