"""Other attention kernels on the same problem. Each gets its keys in prompt order and turned, which is not timed."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusionkv.bench.gpu.workload import Problem

# Of the norm of all outputs; the kernels and the baselines round turned queries and turned keys respectively.
AGREEMENT = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class Dense:
    """A prefill problem of one request as dense tensors: q [1, heads, rows, dim]; k, v [1, kv_heads, keys, dim]."""

    def __init__(self, problem: Problem) -> None:
        (span,) = problem.spans
        slots, cos, sin = span.in_order(problem.rotation)
        self.positions = span.positions
        self.q = problem.q.transpose(0, 1)[None].contiguous()
        self.k = problem.rotation.apply(problem.k[slots].transpose(0, 1), cos, sin)[None].contiguous()
        self.v = problem.v[slots].transpose(0, 1)[None].contiguous()

    @property
    def keys(self) -> int:
        return self.k.shape[2]


class Masked:
    """SDPA with a boolean mask [rows, keys], by whichever backend torch chooses.

    Keys and values are repeated for every query head beforehand: no fused backend takes a mask and grouped heads.
    """

    def __init__(self, dense: Dense) -> None:
        groups = dense.q.shape[1] // dense.k.shape[1]
        self._q = dense.q
        self._k, self._v = (x.repeat_interleave(groups, 1) for x in (dense.k, dense.v))
        self._mask = torch.arange(dense.keys, device=dense.q.device) <= dense.positions[:, None]

    @staticmethod
    def refusal(dense: Dense) -> str:
        """Why this problem's mask is too large; empty when it is not."""
        elements = len(dense.positions) * dense.keys
        # Of the mask, and of the bias of the queries' dtype that SDPA makes of it at every call.
        needs = elements * (1 + dense.q.dtype.itemsize)
        if dense.q.device.type == "cuda" and needs > torch.cuda.mem_get_info()[0] // 2:
            return f"mask and bias take {needs / 2**30:.1f} GiB"
        # Not every fused kernel reckons in 64 bits, and one that reads astray ends the whole run.
        return f"a mask of {elements} elements" if elements >= 2**31 else ""

    def __call__(self) -> torch.Tensor:
        return F.scaled_dot_product_attention(self._q, self._k, self._v, attn_mask=self._mask)


class FlashCausal:
    """SDPA's flash backend over a whole prompt, every token a row: what a plain prefill computes."""

    def __init__(self, dense: Dense) -> None:
        shape = (1, dense.q.shape[1], dense.keys, dense.q.shape[3])
        self._q = torch.randn(shape, dtype=dense.q.dtype, device=dense.q.device)
        self._k, self._v = dense.k, dense.v

    def __call__(self) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(self._q, self._k, self._v, is_causal=True, enable_gqa=True)


def disagreement(found: torch.Tensor, dense: torch.Tensor) -> float:
    """Norm of the difference over the norm; found [rows, heads, dim], dense [1, heads, rows, dim]."""
    other = dense[0].transpose(0, 1).float()
    return float((found.float() - other).norm() / other.norm())
