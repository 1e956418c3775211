"""RMSNorm layers of transformers as torch's own, one kernel on a GPU in place of six to eight."""

from typing import Any

import torch

# Rows of the probe, from 1e-3 to 1e3: epsilon counts for the smallest only.
_SCALES = 10.0 ** torch.arange(-3.0, 4.0)


def install(network: torch.nn.Module) -> None:
    """Replaces each norm that torch's computes the same for; Gemma's, which scales by 1 + weight, stays."""
    for parent in list(network.modules()):
        for name, norm in parent.named_children():
            if type(norm).__name__.endswith("RMSNorm") and (fused := _fused(norm)):
                setattr(parent, name, fused)


@torch.inference_mode()
def _fused(norm: Any) -> torch.nn.RMSNorm | None:
    """torch's norm with the weight of another, if both map a probe to the same."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if weight is None or epsilon is None:
        return None
    fused = torch.nn.RMSNorm(weight.shape, epsilon, device="meta", dtype=weight.dtype)
    fused.weight = weight
    probe = torch.linspace(-1, 1, weight.numel()) * _SCALES[:, None]
    probe = probe.to(weight)
    # transformers rounds before and after the weight, torch once.
    rounding = 2 * torch.finfo(weight.dtype).eps
    return fused if torch.allclose(fused(probe), norm(probe), rtol=rounding, atol=0.0) else None
