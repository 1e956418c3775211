"""Copies many small arrays to a device at once."""

import itertools
from collections.abc import Sequence

import torch

_ALIGNED = 64  # bytes; Triton compiles a kernel again for pointers that are not multiples of 16


def upload(arrays: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The arrays, in host memory, on a device, by one copy that nobody waits for. On a CPU, the arrays themselves."""
    if device.type == "cpu":
        return list(arrays)
    return unpack(pack(arrays, device).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """uint8, in host memory from which a device copies: the arrays one after another."""
    # torch reuses pinned memory only after the copies that read it.
    packed = torch.empty(_starts(arrays)[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    numbers = packed.numpy()
    for array, start in zip(arrays, _starts(arrays), strict=False):
        numbers[start : start + array.nbytes] = array.contiguous().view(-1).view(torch.uint8).numpy()
    return packed


def unpack(packed: torch.Tensor, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of packed arrays, with the shapes and dtypes of `arrays`."""
    return [
        packed[start : start + array.nbytes].view(array.dtype).view(array.shape)
        for array, start in zip(arrays, _starts(arrays), strict=False)
    ]


def _starts(arrays: Sequence[torch.Tensor]) -> list[int]:
    """Where each array starts, and the end of the last one."""
    return [0, *itertools.accumulate(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]
