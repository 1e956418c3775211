"""Attention over a paged KV pool, for CPU and GPU: few rows at any positions, most keys reused (FusionRAG 4.3).

*Rotate the query, not the cache.* A cached chunk's keys stay as prefill wrote them; the rows are rotated back by the
chunk's shift instead, once per segment. For more than a few rows, a layer's keys are brought to prompt order, and
rotated on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fusionkv.kernels import reference
from fusionkv.kernels.cpu import sparse_attention_cpu
from fusionkv.kernels.gpu import causal_attention, has_triton
from fusionkv.kernels.segments import AttentionSpec, QuerySpan, Spans


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    spec: AttentionSpec,
    scores: Mapping[QuerySpan, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """Attention of a ragged batch of rows over one layer of the pool.

    q: [rows, q_heads, head_dim], carrying RoPE for the rows' positions.
    k_pool, v_pool: [slots, kv_heads, head_dim]; they hold the rows' own keys already.
    scores: for some of the spans, float32 [last position + 1], to which their `attention_scores` are added.
    Returns [rows, q_heads, head_dim], in q's dtype. Rows of no span are undefined.
    """
    if q.device.type != "cpu":
        attend: causal_attention.Attend = reference.sparse_attention
        if has_triton():
            from fusionkv.kernels.gpu import sparse_attention_triton

            attend = sparse_attention_triton.sparse_attention
        return causal_attention.sparse_attention(q, k_pool, v_pool, spans, spec, scores, attend)
    return sparse_attention_cpu.sparse_attention(q, k_pool, v_pool, spans, spec, scores)


def attention_scores(q: torch.Tensor, k_pool: torch.Tensor, span: QuerySpan, spec: AttentionSpec) -> torch.Tensor:
    """Attention of a span's rows into each position, summed over rows and heads (FusionRAG 3.2, ProphetKV 4.2).

    Args:
        q: [rows of the batch, q_heads, head_dim].
        k_pool: [slots, kv_heads, head_dim].
        span: the rows, and the keys that they see.
        spec: of the layer.

    Returns:
        float32 [last position + 1], which sums to rows x q_heads, less what sinks take.
    """
    if q.device.type != "cpu":
        if not has_triton():
            return reference.attention_scores(q, k_pool, span, spec)
        from fusionkv.kernels.gpu import sparse_attention_triton

        return sparse_attention_triton.attention_scores(q, k_pool, span, spec)
    return sparse_attention_cpu.attention_scores(q[span.start : span.stop], k_pool, span, spec)


@dataclass(frozen=True, slots=True)
class Temper:
    """Changes keys at positions `[low, high)`: logits are divided by `temperature`, and their sum of
    exponentials is raised to the power `scale`.
    """

    low: int
    high: int
    temperature: float
    scale: float


def tempered_attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, span: QuerySpan, temper: Temper, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of a span's rows with another temperature and weight for a range of keys (APE).

    For the few rows of a question or an answer over a fully reused context: plain torch on every device, in
    O(rows x keys) memory. Shapes and dtypes are those of `sparse_attention`; q has the span's rows only.

    For c the keys in the range and o all others, sinks included, with attentions A_c (at the temperature) and A_o and
    sums of exponentials Z_c and Z_o, the result is (Z_c^scale A_c + Z_o A_o) / (Z_c^scale + Z_o).
    """
    order, rows = span.in_order(spec.rotation, q.device), span.positions_on(q.device)[:, None]
    heads, kv_heads = q.shape[1], k_pool.shape[1]
    keys = order.keys(k_pool).float().transpose(0, 1)
    values = v_pool.index_select(0, order.slots).float().transpose(0, 1)
    folded = q.float().transpose(0, 1).reshape(kv_heads, -1, q.shape[2])
    scores = (folded @ keys.transpose(1, 2) * spec.scale).unflatten(1, (heads // kv_heads, span.rows))
    position = torch.arange(len(order.slots), device=q.device)
    unseen = position > rows
    if spec.window is not None:
        unseen |= position <= rows - spec.window
    scores = scores.masked_fill(unseen, float("-inf"))
    inside = (position >= temper.low) & (position < temper.high)
    scores = torch.where(inside, scores / temper.temperature, scores)
    # Where a row sees no key of the range, the logarithm of its mass is -inf, and it has no effect.
    mass = scores.masked_fill(~inside, float("-inf")).logsumexp(-1, keepdim=True)
    mass = torch.where(mass.isinf(), 0.0, mass)
    scores = torch.where(inside, scores + (temper.scale - 1) * mass, scores)
    weights = reference.softmax(scores.flatten(0, 1), spec.sinks)
    out = weights.reshape(kv_heads, -1, len(position)) @ values
    return out.view(heads, span.rows, -1).transpose(0, 1).to(q.dtype)
