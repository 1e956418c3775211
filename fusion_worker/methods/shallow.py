"""Scores from the states behind layer 0, which are computed for every stale token (CacheBlend, KVShare, A3).

Layer 0's keys and values depend on a token alone, so the cache's are right there; behind layer 0 a token has seen the
whole prompt, and at layer 1 its fresh query, key and value can be held against the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.methods.scoring import (
    AttendedDeviation,
    InterChunkAttention,
    ShallowAttention,
    ShallowScore,
    ValueDeviation,
)
from fusionkv.fusion_worker.tensor_parallel.ranks import ALONE, Ranks
from fusionkv.kernels.attention_scores import attention_scores
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segment_table import Spans
from fusionkv.kernels.segments import Segment, Span
from fusionkv.kernels.sparse_attention import sparse_attention


@dataclass(frozen=True, slots=True)
class States:
    """What one layer's attention was given: q [rows, q_heads, head_dim]; k, v [rows, kv_heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None


@torch.inference_mode()
def scores(
    wanted: Sequence[ShallowScore],
    states: States,
    kv: torch.Tensor,
    span: Span,
    rotation: Rotation,
    starts: torch.Tensor,
    ranks: Ranks = ALONE,
) -> torch.Tensor:
    """float32 [wanted, last position + 1]: each score of every row's token, 0 elsewhere.

    states: of layer 1. Rows: every stale token, then the question. kv: [2, slots, kv_heads, head_dim], that layer of
    the pool. span: the rows and all keys they see in layer 0. starts: int64, ascending: first position of the
    context, of every chunk after the first, and of the question. ranks: who has the other heads.
    """
    return torch.stack([_score(score, states, kv, span, rotation, starts, ranks) for score in wanted])


def _score(
    score: ShallowScore,
    states: States,
    kv: torch.Tensor,
    span: Span,
    rotation: Rotation,
    starts: torch.Tensor,
    ranks: Ranks,
) -> torch.Tensor:
    """float32 [last position + 1]."""
    rows = span.positions
    context = int((rows < starts[-1]).sum())
    out = torch.zeros(int(rows[-1]) + 1, device=rows.device)
    if isinstance(score, ValueDeviation | AttendedDeviation):
        stale = kv[1].index_select(0, span.in_order(rotation).slots[rows[:context]])
        away = states.v[:context].float() - stale.float()
        squared = isinstance(score, ValueDeviation)
        out[rows[:context]] = away.square().sum((1, 2)) if squared else away.abs().sum((1, 2))
    if isinstance(score, AttendedDeviation):
        return ranks.total(out) * ranks.total(_columns(states, kv, span, rotation, 0))
    if isinstance(score, ShallowAttention):
        return ranks.total(_columns(states, kv, span, rotation, context))
    if isinstance(score, InterChunkAttention):
        out[rows[:context]] = _to_other_chunks(states, kv, span, rotation, starts)[:context]
    return ranks.total(out)


def _keys(states: States, kv: torch.Tensor, span: Span, rotation: Rotation) -> torch.Tensor:
    """[positions, kv_heads, head_dim]: fresh keys where a row has one, the cache's elsewhere, all in their place."""
    slots, cos, sin = span.in_order(rotation)
    keys = rotation.apply(kv[0].index_select(0, slots).transpose(0, 1), cos, sin).transpose(0, 1).contiguous()
    return keys.index_copy_(0, span.positions, states.k.to(keys.dtype))


def _ordered(span: Span, first_row: int, length: int) -> Span:
    """The span's rows from `first_row` on, over keys that lie in prompt order."""
    return Span(0, span.rows - first_row, span.positions[first_row:], (Segment(0, length, 0),))


def _columns(states: States, kv: torch.Tensor, span: Span, rotation: Rotation, first_row: int) -> torch.Tensor:
    """Attention of the rows from `first_row` on into each position, summed over rows and heads."""
    keys = _keys(states, kv, span, rotation)
    over = _ordered(span, first_row, len(keys))
    return attention_scores(states.q[first_row:], keys, over, rotation, states.scale, states.window)


def _to_other_chunks(
    states: States, kv: torch.Tensor, span: Span, rotation: Rotation, starts: torch.Tensor
) -> torch.Tensor:
    """float32 [rows]: attention to chunks other than the row's own, summed over heads.

    The values of an attention pass are made to say which chunk a key is of, so the output is the mass by chunk.
    """
    keys = _keys(states, kv, span, rotation)
    over = Spans([_ordered(span, 0, len(keys))])
    # 0 is the system prompt, then one number a chunk.
    chunk = torch.bucketize(torch.arange(len(keys), device=keys.device), starts, right=True)
    own = chunk[span.positions]
    found = torch.zeros(span.rows, device=keys.device)
    channels = keys.shape[2]
    for first in range(1, len(starts), channels):
        member = chunk[:, None] == torch.arange(first, first + channels, device=keys.device)
        values = member.to(keys.dtype)[:, None].expand(-1, keys.shape[1], -1).contiguous()
        mass = sparse_attention(states.q, keys, values, over, rotation, states.scale, states.window).float().sum(1)
        inside = (own >= first) & (own < first + channels)
        mass[inside, own[inside] - first] = 0.0
        found += mass[:, : max(0, len(starts) - first)].sum(1)
    return found
