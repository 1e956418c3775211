"""What tests give the kernels: a rotation, and tensors on the device that they run on."""

import os
from typing import Any

import torch

from fusionkv.kernels.segments import Rotation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Whether Triton's kernels run here.
HAS_KERNEL = DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def rotary(dim: int, partial: bool = False, interleaved: bool = False) -> Rotation:
    half = dim // (4 if partial else 2)
    return Rotation(10000.0 ** (-torch.arange(half) / half), interleaved)


def rotation_matrix(inv_freq: torch.Tensor, shift: int, dim: int, interleaved: bool) -> torch.Tensor:
    """float64 [dim, dim]: one 2x2 rotation for each pair of channels, the rest unchanged."""
    matrix, half = torch.eye(dim, dtype=torch.float64), len(inv_freq)
    for i, frequency in enumerate(inv_freq.tolist()):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = torch.tensor(frequency * shift, dtype=torch.float64)
        matrix[a, a] = matrix[b, b] = angle.cos()
        matrix[a, b], matrix[b, a] = -angle.sin(), angle.sin()
    return matrix


def rotated(rotation: Rotation, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """A `rotary.Rotate` in plain torch."""
    cos, sin = (x[:, None, :, : rotation.rotary_dim // 2].float() for x in (cos, sin))
    return rotation.apply(q, cos, sin), rotation.apply(k, cos, sin)


def there(x: Any) -> Any:
    """A tensor on the device; anything else as it is, such as spans, which are in host memory."""
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x
