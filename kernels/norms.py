"""RMSNorm layers of transformers, by one to three kernels on a GPU in place of six to ten, and faster on a CPU."""

from typing import Any

import torch

# Rows of the probe, from 1e-3 to 1e3: epsilon counts for the smallest only.
_SCALES = 10.0 ** torch.arange(-3.0, 4.0)


class WideRMSNorm(torch.nn.RMSNorm):
    """torch's norm in float32, rounded once, with a float32 weight: three kernels on a GPU.

    On a CPU, 2,400 rows of 576 channels in bfloat16 take 1.7 ms of a core; torch's own operator takes 3.7 ms, and the
    layer of transformers 3.0 ms.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if not x.is_cpu:
            return super().forward(wide).to(x.dtype)
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        factors = squares.div_(x.shape[-1]).add_(self.eps or 0.0).rsqrt_()
        scaled = wide * factors if wide is x else wide.mul_(factors)
        return scaled.mul_(self.weight).to(x.dtype)


def install(network: torch.nn.Module) -> None:
    """Replaces each norm that one of these computes the same for."""
    for parent in list(network.modules()):
        for name, norm in parent.named_children():
            if type(norm).__name__.endswith("RMSNorm") and (found := _replacement(norm)):
                setattr(parent, name, found)


@torch.inference_mode()
def _replacement(norm: Any) -> torch.nn.RMSNorm | None:
    """A norm with the weight of another, if both map a probe to the same. Gemma adds its weights to 1."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or epsilon is None:
        return None
    probe = torch.linspace(-1, 1, weight.numel()) * _SCALES[:, None]
    probe = probe.to(weight)
    # transformers rounds before and after the weight, torch once.
    expected, rounding = norm(probe), 2 * torch.finfo(weight.dtype).eps + 1e-6
    plain = (WideRMSNorm, weight.float()) if weight.is_cpu else (torch.nn.RMSNorm, weight)
    for kind, scale in (plain, (WideRMSNorm, 1.0 + weight.float())):
        found = kind(weight.shape, epsilon, device="meta", dtype=scale.dtype)
        found.weight = torch.nn.Parameter(scale, requires_grad=False)
        if torch.allclose(found(probe), expected, rtol=rounding, atol=0.0):
            return found
    return None
