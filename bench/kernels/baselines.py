"""Baseline attention kernels for the same problem. Keys are rotated and ordered beforehand, which is not timed."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusionkv.bench.gpu.workload import Problem

# Maximum relative error of the outputs' norm: kernels round rotated queries, baselines round rotated keys.
AGREEMENT = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class Dense:
    """A prefill problem of one request as dense tensors: q [1, heads, rows, dim]; k, v [1, kv_heads, keys, dim]."""

    def __init__(self, problem: Problem) -> None:
        (span,) = problem.spans
        order = span.in_order(problem.spec.rotation, problem.q.device)
        self.positions = span.positions
        self.q = problem.q.transpose(0, 1)[None].contiguous()
        self.k = order.keys(problem.k).transpose(0, 1)[None].contiguous()
        self.v = problem.v[order.slots].transpose(0, 1)[None].contiguous()

    @property
    def keys(self) -> int:
        return self.k.shape[2]


class Masked:
    """SDPA with a boolean mask [rows, keys], with the backend that torch chooses.

    Keys and values are repeated for every query head beforehand: no fused backend supports a mask and grouped heads.
    """

    def __init__(self, dense: Dense) -> None:
        groups = dense.q.shape[1] // dense.k.shape[1]
        self._q = dense.q
        self._k, self._v = (x.repeat_interleave(groups, 1) for x in (dense.k, dense.v))
        self._mask = torch.arange(dense.keys, device=dense.q.device) <= dense.positions.to(dense.q.device)[:, None]

    @staticmethod
    def refusal(dense: Dense) -> str:
        """Why this problem's mask is too large; empty if it is not."""
        elements = len(dense.positions) * dense.keys
        # Bytes of the mask, and of the bias in the queries' dtype that SDPA makes of it at every call.
        needs = elements * (1 + dense.q.dtype.itemsize)
        if dense.q.device.type == "cuda" and needs > torch.cuda.mem_get_info()[0] // 2:
            return f"mask and bias take {needs / 2**30:.1f} GiB"
        # Some fused kernels index with 32 bits, and an invalid access would end the whole run.
        return f"a mask of {elements} elements" if elements >= 2**31 else ""

    def __call__(self) -> torch.Tensor:
        return F.scaled_dot_product_attention(self._q, self._k, self._v, attn_mask=self._mask)


class FlashCausal:
    """SDPA's flash backend over a whole prompt with every token a row, as in a full prefill."""

    def __init__(self, dense: Dense) -> None:
        shape = (1, dense.q.shape[1], dense.keys, dense.q.shape[3])
        self._q = torch.randn(shape, dtype=dense.q.dtype, device=dense.q.device)
        self._k, self._v = dense.k, dense.v

    def __call__(self) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(self._q, self._k, self._v, is_causal=True, enable_gqa=True)


def disagreement(found: torch.Tensor, dense: torch.Tensor) -> float:
    """Relative norm of the difference. found: [rows, heads, dim]. dense: [1, heads, rows, dim]."""
    other = dense[0].transpose(0, 1).float()
    return float((found.float() - other).norm() / other.norm())
