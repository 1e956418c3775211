"""Tile shapes of the Triton kernels, which bench/gpu/tuning.py measures."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A tile shape.

    Attributes:
        rows: query rows times heads of a group.
        keys: keys in a block.
        warps, stages: warps and pipeline stages of a program.
    """

    rows: int
    keys: int
    warps: int
    stages: int


_SMALL = Tile(32, 32, 4, 1)


def tile_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile for a head size and dtype."""
    return default(head_dim, dtype) if device.type == "cuda" else _SMALL


def scored(device: torch.device, dtype: torch.dtype) -> Tile:
    """The tile for attention summed by key. In float32, a larger one spills kilobytes, and fits few GPUs."""
    return _SMALL if device.type != "cuda" or dtype == torch.float32 else Tile(64, 64, 4, 3)


def default(head_dim: int, dtype: torch.dtype) -> Tile:
    """A tile for every GPU since sm_80: sm_86 and sm_89 have the least shared memory, 99 KiB for a program."""
    if dtype == torch.float32:
        return Tile(32 if head_dim > 64 else 64, 16 if head_dim > 128 else 32, 4, 2)
    return Tile(64, 32, 4, 2) if head_dim > 128 else Tile(128, 64, 8, 3 if head_dim <= 64 else 2)
