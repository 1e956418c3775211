"""The baseline of a prefill: torch's flash attention over a whole prompt. Keys are ordered beforehand, not timed."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusionkv.bench.gpu.workload import Problem


class FlashCausal:
    """SDPA's flash backend over a whole prompt of one request with every token a row, as in a full prefill."""

    def __init__(self, problem: Problem) -> None:
        (span,) = problem.spans
        order = span.in_order(problem.spec.rotation, problem.q.device)
        # [1, kv_heads, keys, dim]
        self._k = order.keys(problem.k).transpose(0, 1)[None].contiguous()
        self._v = problem.v[order.slots].transpose(0, 1)[None].contiguous()
        shape = (1, problem.q.shape[1], self._k.shape[2], problem.q.shape[2])
        self._q = torch.randn(shape, dtype=problem.q.dtype, device=problem.q.device)

    def __call__(self) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(self._q, self._k, self._v, is_causal=True, enable_gqa=True)
