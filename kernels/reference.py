"""Dense reference implementations, for tests and for GPUs without Triton: gather all keys, mask, softmax."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from fusionkv.kernels.segments import AttentionSpec, QuerySpan


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Sequence[QuerySpan],
    spec: AttentionSpec,
    scores: Mapping[QuerySpan, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """The same as `attention.sparse_attention`, in O(rows x keys) memory, on any device and dtype."""
    out = torch.empty_like(q)
    for span, into in scores.items():
        into += attention_scores(q, k_pool, span, spec)
    for span in spans:
        weights, v = _weights(q[span.start : span.stop], k_pool, v_pool, span, spec)
        out[span.start : span.stop] = torch.einsum("hrn,nhd->rhd", weights, v.to(weights.dtype)).to(q.dtype)
    return out


def attention_scores(q: torch.Tensor, k_pool: torch.Tensor, span: QuerySpan, spec: AttentionSpec) -> torch.Tensor:
    """The same as `attention.attention_scores`."""
    weights, _ = _weights(q[span.start : span.stop], k_pool, k_pool, span, spec)
    positions, visible = _keys(span, q.device)
    scores = torch.zeros(int(span.positions[-1]) + 1, dtype=torch.float32, device=q.device)
    seen = visible & (positions < len(scores))
    return scores.index_put_((positions[seen],), weights.sum((0, 1))[seen].float())


def softmax(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax of logits [q_heads, rows, keys] over the keys, and over the head's sink if there are sinks."""
    if sinks is None:
        return logits.softmax(-1)
    sink = sinks.to(logits.dtype)[:, None, None].expand(-1, logits.shape[1], 1)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


def _weights(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, span: QuerySpan, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax weights [q_heads, rows, keys] in at least float32, and the values [keys, q_heads, head_dim]."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = q.shape[1] // k_pool.shape[1]
    keys = torch.cat([spec.rotation.turn(k_pool[s.start : s.stop].to(wide), s.shift) for s in span.segments])
    values = torch.cat([v_pool[s.start : s.stop] for s in span.segments])
    positions, visible = _keys(span, q.device)
    rows = span.positions_on(q.device)[:, None]
    mask = visible & (positions <= rows)
    if spec.window is not None:
        mask &= positions > rows - spec.window
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    logits = torch.einsum("rhd,nhd->hrn", q.to(wide), keys) * spec.scale
    return softmax(logits.masked_fill(~mask, float("-inf")), spec.sinks), values


def _keys(span: QuerySpan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all slots of a span: int64 positions, and bool, whether they are visible."""
    positions = torch.cat([s.key_positions() for s in span.segments])
    shown = [torch.ones(s.length, dtype=torch.bool) if s.hidden is None else ~s.hidden for s in span.segments]
    return positions.to(device), torch.cat(shown).to(device)
