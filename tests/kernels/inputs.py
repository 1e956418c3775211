"""What tests give the kernels: a rotation, and tensors on the device that they run on."""

import dataclasses
import os
from typing import Any

import torch

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import KVSegment, QuerySpan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Whether Triton's kernels run here.
HAS_KERNEL = DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def rotary(dim: int, partial: bool = False, interleaved: bool = False) -> Rotation:
    half = dim // (4 if partial else 2)
    return Rotation(10000.0 ** (-torch.arange(half) / half), interleaved)


def there(x: Any) -> Any:
    """A tensor, span or segment, or a tuple of them, on the device."""
    if isinstance(x, torch.Tensor):
        return x.to(DEVICE)
    if isinstance(x, tuple):
        return tuple(there(part) for part in x)
    if isinstance(x, QuerySpan):
        return QuerySpan(x.start, x.stop, there(x.positions), there(x.segments))
    if isinstance(x, KVSegment):
        return dataclasses.replace(x, positions=there(x.positions), hidden=there(x.hidden))
    return x
