"""How much a few rows attend to every key: the column sums of softmax(QK^T), without the values."""

import torch

from fusionkv.kernels import reference
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import Span


def attention_scores(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    span: Span,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of a span's rows into each position, summed over rows and heads (FusionRAG 3.2, ProphetKV 4.2).

    q: [rows of the batch, q_heads, head_dim]; k_pool: [slots, kv_heads, head_dim].
    Returns float32 [last position + 1]. Sums to rows x q_heads. Memory: rows x groups x keys x 4 bytes, one
    kv head at a time.
    """
    if q.device.type != "cpu":
        return reference.attention_scores(q, k_pool, span, rotation, scale, window)
    rows = q[span.start : span.stop]
    count, heads, dim = rows.shape
    groups = heads // k_pool.shape[1]
    segments = [s for s in span.segments if s.first <= int(span.positions[-1])]
    positions = torch.cat([s.key_positions(q.device) for s in segments])
    mask = positions <= span.positions[:, None]
    if any(s.hidden is not None for s in segments):
        hidden = [s.hidden if s.hidden is not None else torch.zeros(s.length, dtype=torch.bool) for s in segments]
        mask &= ~torch.cat(hidden)
    if window is not None:
        mask &= positions > span.positions[:, None] - window
    bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    turned = {s.shift: rotation.turn(rows.float(), -s.shift) for s in segments}
    columns = torch.zeros(len(positions))
    logits = torch.empty(groups, count, len(positions))
    for head in range(k_pool.shape[1]):
        at = 0
        group = slice(head * groups, (head + 1) * groups)
        for segment in segments:
            keys = k_pool[segment.start : segment.stop, head].float()
            query = turned[segment.shift][:, group].transpose(0, 1).reshape(-1, dim)
            logits[:, :, at : at + segment.length] = (query @ keys.T).view(groups, count, -1)
            at += segment.length
        columns += logits.mul_(scale).add_(bias).softmax(-1).sum((0, 1))
    scores = torch.zeros(int(span.positions[-1]) + 1)
    seen = positions < len(scores)
    # A recomputed token's position has two slots: its hidden, stale one scored 0 and its fresh one all of it.
    return scores.index_add_(0, positions[seen], columns[seen])
