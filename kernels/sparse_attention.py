"""Position-indexed sparse attention over the KV pool: few rows anywhere, most keys reused (FusionRAG 4.3).

*Rotate the query, not the cache.* A cached chunk's keys stay as their prefill wrote them; a few rows are turned back
by the chunk's shift instead, once a segment. When the rows outnumber what that saves, a CPU lays the keys of the
request out once in prompt order (turned on the way), and the rows walk them in blocks, each over its own prefix.
"""

import torch

from fusionkv.kernels import decode_attention_cpu, reference, sparse_attention_cpu
from fusionkv.kernels.backend import has_triton
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segment_table import Spans


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of a ragged batch of rows over one layer of the pool.

    q: [rows, q_heads, head_dim], carrying RoPE for the rows' positions.
    k_pool, v_pool: [slots, kv_heads, head_dim]; the rows' own keys are in there already.
    window: a row at p sees positions above p - window only; None sees all.
    Returns [rows, q_heads, head_dim], of q's dtype. Rows that no span names are left undefined.
    """
    if q.device.type != "cpu":
        if not has_triton():
            return reference.sparse_attention(q, k_pool, v_pool, spans, rotation, scale, window)
        from fusionkv.kernels import sparse_attention_triton

        return sparse_attention_triton.sparse_attention(q, k_pool, v_pool, spans, rotation, scale, window)
    out = torch.empty_like(q)
    for span in spans:
        rows = slice(span.start, span.stop)
        path = decode_attention_cpu if span.rows <= decode_attention_cpu.MOST_ROWS else sparse_attention_cpu
        out[rows] = path.attention(q[rows], k_pool, v_pool, span, rotation, scale, window)
    return out
