"""Attention of a few rows into every key: the column sums of softmax(QK^T), without values."""

import torch

from fusionkv.kernels import reference
from fusionkv.kernels.cpu import sparse_attention_cpu
from fusionkv.kernels.gpu import has_triton
from fusionkv.kernels.segments import QuerySpan, Rotation


def attention_scores(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    span: QuerySpan,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of a span's rows into each position, summed over rows and heads (FusionRAG 3.2, ProphetKV 4.2).

    Args:
        q: [rows of the batch, q_heads, head_dim].
        k_pool: [slots, kv_heads, head_dim].
        span: the rows, and the keys that they see.
        rotation: the layer's RoPE.
        scale: factor of the logits.
        window: sliding window; None without one.

    Returns:
        float32 [last position + 1], which sums to rows x q_heads.
    """
    if q.device.type != "cpu":
        if not has_triton():
            return reference.attention_scores(q, k_pool, span, rotation, scale, window)
        from fusionkv.kernels.gpu import attention_scores_triton

        return attention_scores_triton.attention_scores(q, k_pool, span, rotation, scale, window)
    rows = q[span.start : span.stop]
    return sparse_attention_cpu.attention_scores(rows, k_pool, span, rotation, scale, window)
