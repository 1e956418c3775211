"""Attention with another temperature and weight for a range of keys (APE).

For the few rows of a question or an answer over a fully reused context: plain torch on every device, in
O(rows x keys) memory.
"""

from dataclasses import dataclass

import torch

from fusionkv.kernels.segments import QuerySpan, Rotation


@dataclass(frozen=True, slots=True)
class Temper:
    """Changes keys at positions `[low, high)`: logits are divided by `temperature`, their mass taken to `scale`."""

    low: int
    high: int
    temperature: float
    scale: float


def tempered_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    span: QuerySpan,
    temper: Temper,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of a span's rows, [rows, q_heads, head_dim]; shapes and dtypes are those of `sparse_attention`.

    For c the keys in the range and o all others, with attentions A_c (at the temperature) and A_o and sums of
    exponentials Z_c and Z_o, the result is (Z_c^scale A_c + Z_o A_o) / (Z_c^scale + Z_o).
    """
    order = span.in_order(rotation)
    heads, kv_heads = q.shape[1], k_pool.shape[1]
    keys = order.keys(k_pool).float().transpose(0, 1)
    values = v_pool.index_select(0, order.slots).float().transpose(0, 1)
    folded = q.float().transpose(0, 1).reshape(kv_heads, -1, q.shape[2])
    scores = (folded @ keys.transpose(1, 2) * scale).unflatten(1, (heads // kv_heads, span.rows))
    position = torch.arange(len(order.slots), device=q.device)
    unseen = position > span.positions[:, None]
    if window is not None:
        unseen |= position <= span.positions[:, None] - window
    scores = scores.masked_fill(unseen, float("-inf"))
    inside = (position >= temper.low) & (position < temper.high)
    scores = torch.where(inside, scores / temper.temperature, scores)
    # Where a row sees no key of the range, the logarithm of its mass is -inf, and it has no effect.
    mass = scores.masked_fill(~inside, float("-inf")).logsumexp(-1, keepdim=True)
    mass = torch.where(mass.isinf(), 0.0, mass)
    weights = torch.where(inside, scores + (temper.scale - 1) * mass, scores).softmax(-1)
    out = weights.flatten(1, 2) @ values
    return out.view(heads, span.rows, -1).transpose(0, 1).to(q.dtype)
