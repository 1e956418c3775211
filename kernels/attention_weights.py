"""Attention weights themselves, row by row: for a question, and the few rows whose references are followed.

On a CPU `sparse_attention` finds them on its way.
"""

import torch

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import Span

# Rows at a time: 28 heads over 64k keys take 115 MB in float32.
_ROWS = 16


def attention_weights(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    span: Span,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of each of a span's rows into each position, summed over heads.

    q: [rows of the batch, q_heads, head_dim]; k_pool: [slots, kv_heads, head_dim].
    Returns float32 [span's rows, last position + 1]; every row sums to q_heads.
    """
    slots, cos, sin = span.in_order(rotation)
    kv_heads, groups = k_pool.shape[1], q.shape[1] // k_pool.shape[1]
    keys = rotation.apply(k_pool.index_select(0, slots).transpose(0, 1), cos, sin).float()
    at = torch.arange(len(slots), device=q.device)
    found = []
    for start in range(0, span.rows, _ROWS):
        positions = span.positions[start : start + _ROWS, None]
        rows = q[span.start + start : span.start + start + len(positions)].float()
        folded = rows.transpose(0, 1).reshape(kv_heads, groups * len(positions), -1)
        unseen = at > positions
        if window is not None:
            unseen |= at <= positions - window
        scores = (folded @ keys.transpose(1, 2)).mul_(scale).view(q.shape[1], len(positions), -1)
        found.append(scores.masked_fill_(unseen, float("-inf")).softmax(-1).sum(0))
    return torch.cat(found)
