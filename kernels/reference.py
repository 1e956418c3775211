"""Dense reference implementations, for tests and for GPUs without Triton: gather all keys, mask, softmax."""

from collections.abc import Sequence

import torch

from fusionkv.kernels.segments import QuerySpan, Rotation


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Sequence[QuerySpan],
    rotation: Rotation,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """The same as `attention.sparse_attention`, in O(rows x keys) memory, on any device and dtype."""
    out = torch.empty_like(q)
    for span in spans:
        weights, v = _weights(q[span.start : span.stop], k_pool, v_pool, span, rotation, scale, window)
        out[span.start : span.stop] = torch.einsum("hrn,nhd->rhd", weights, v.to(weights.dtype)).to(q.dtype)
    return out


def attention_scores(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    span: QuerySpan,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """The same as `attention.attention_scores`."""
    weights, _ = _weights(q[span.start : span.stop], k_pool, k_pool, span, rotation, scale, window)
    positions = torch.cat([s.key_positions(q.device) for s in span.segments])
    visible = torch.cat([_visible(s, q.device) for s in span.segments])
    scores = torch.zeros(int(span.positions[-1]) + 1, dtype=torch.float32, device=q.device)
    seen = visible & (positions < len(scores))
    return scores.index_put_((positions[seen],), weights.sum((0, 1))[seen].float())


def _weights(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    span: QuerySpan,
    rotation: Rotation,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax weights [q_heads, rows, keys] in at least float32, and the values [keys, q_heads, head_dim]."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = q.shape[1] // k_pool.shape[1]
    keys = torch.cat([rotation.turn(k_pool[s.start : s.stop].to(wide), s.shift) for s in span.segments])
    values = torch.cat([v_pool[s.start : s.stop] for s in span.segments])
    positions = torch.cat([s.key_positions(q.device) for s in span.segments])
    mask = torch.cat([_visible(s, q.device) for s in span.segments])[None] & (positions <= span.positions[:, None])
    if window is not None:
        mask &= positions > span.positions[:, None] - window
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    logits = torch.einsum("rhd,nhd->hrn", q.to(wide), keys) * scale
    return logits.masked_fill(~mask, float("-inf")).softmax(-1), values


def _visible(segment, device: torch.device) -> torch.Tensor:  # type: ignore[no-untyped-def]
    if segment.hidden is None:
        return torch.ones(segment.length, dtype=torch.bool, device=device)
    return ~segment.hidden
