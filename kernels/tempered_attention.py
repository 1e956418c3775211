"""Attention that counts a stretch of keys at another temperature and weight (APE).

For the few rows of a question or an answer over a context that is reused whole: plain torch on every device, in
O(rows x keys) memory.
"""

from dataclasses import dataclass

import torch

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import QuerySpan


@dataclass(frozen=True, slots=True)
class Temper:
    """Keys at positions `[low, high)`: scores divided by `temperature`, their mass to the power of `scale`."""

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
    """Attention of one span's rows, [rows, q_heads, head_dim]; shapes and dtypes as for `sparse_attention`.

    With c the keys in the stretch and o all others, their attentions A_c (at the temperature) and A_o, and their sums
    of exponentials Z_c and Z_o: (Z_c^scale A_c + Z_o A_o) / (Z_c^scale + Z_o).
    """
    slots, cos, sin = span.in_order(rotation)
    heads, kv_heads = q.shape[1], k_pool.shape[1]
    keys = rotation.apply(k_pool.index_select(0, slots).transpose(0, 1), cos, sin).float()
    values = v_pool.index_select(0, slots).float().transpose(0, 1)
    folded = q.float().transpose(0, 1).reshape(kv_heads, -1, q.shape[2])
    scores = (folded @ keys.transpose(1, 2) * scale).unflatten(1, (heads // kv_heads, span.rows))
    position = torch.arange(len(slots), device=q.device)
    unseen = position > span.positions[:, None]
    if window is not None:
        unseen |= position <= span.positions[:, None] - window
    scores = scores.masked_fill(unseen, float("-inf"))
    inside = (position >= temper.low) & (position < temper.high)
    scores = torch.where(inside, scores / temper.temperature, scores)
    # A stretch no row sees has a mass of log 0, and counts nothing.
    mass = scores.masked_fill(~inside, float("-inf")).logsumexp(-1, keepdim=True)
    mass = torch.where(mass.isinf(), 0.0, mass)
    weights = torch.where(inside, scores + (temper.scale - 1) * mass, scores).softmax(-1)
    out = weights.flatten(1, 2) @ values
    return out.view(heads, span.rows, -1).transpose(0, 1).to(q.dtype)
