"""Copies many small arrays to a device at once."""

from collections.abc import Sequence

import torch

_ALIGNED = 64  # bytes; Triton compiles a kernel again for pointers that are not multiples of 16


def upload(arrays: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The arrays, in host memory, on a device, by one copy that nobody waits for. On a CPU, the arrays themselves."""
    if device.type == "cpu":
        return list(arrays)
    places, size = [], 0
    for array in arrays:
        places.append((size, array.nbytes))
        size += -(-array.nbytes // _ALIGNED) * _ALIGNED
    # torch reuses pinned memory only after the copies that read it.
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    numbers = packed.numpy()
    for array, (start, length) in zip(arrays, places, strict=True):
        numbers[start : start + length] = array.contiguous().view(-1).view(torch.uint8).numpy()
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + length].view(array.dtype).view(array.shape)
        for array, (start, length) in zip(arrays, places, strict=True)
    ]
