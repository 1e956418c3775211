"""Position-indexed sparse attention over the KV pool: few rows at any positions, most keys reused (FusionRAG 4.3).

*Rotate the query, not the cache.* A cached chunk's keys stay as prefill wrote them; the rows are rotated back by the
chunk's shift instead, once per segment. For more than a few rows, a CPU gathers and rotates the request's keys once,
in prompt order.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from fusionkv.kernels import reference
from fusionkv.kernels.attention_scores import attention_scores
from fusionkv.kernels.cpu import sparse_attention_cpu
from fusionkv.kernels.gpu import has_triton
from fusionkv.kernels.segments import QuerySpan, Rotation, Spans

_NONE: Mapping[QuerySpan, torch.Tensor] = MappingProxyType({})


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
    scores: Mapping[QuerySpan, torch.Tensor] = _NONE,
) -> torch.Tensor:
    """Attention of a ragged batch of rows over one layer of the pool.

    q: [rows, q_heads, head_dim], carrying RoPE for the rows' positions.
    k_pool, v_pool: [slots, kv_heads, head_dim]; they hold the rows' own keys already.
    window: a row at position p sees only positions above p - window; None for no window.
    scores: for some of the spans, float32 [last position + 1], to which their `attention_scores` are added.
    Returns [rows, q_heads, head_dim], in q's dtype. Rows of no span are undefined.
    """
    if q.device.type != "cpu":
        for span, into in scores.items():
            into += attention_scores(q, k_pool, span, rotation, scale, window)
        if not has_triton():
            return reference.sparse_attention(q, k_pool, v_pool, spans, rotation, scale, window)
        from fusionkv.kernels.gpu import sparse_attention_triton

        return sparse_attention_triton.sparse_attention(q, k_pool, v_pool, spans, rotation, scale, window)
    return sparse_attention_cpu.sparse_attention(q, k_pool, v_pool, spans, rotation, scale, window, scores)
