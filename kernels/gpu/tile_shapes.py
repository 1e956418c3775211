"""Tile shapes of the Triton kernels: measured once per GPU model (bench/gpu/tuning.py), and stored by its name."""

import dataclasses
import json
import os
from functools import cache
from pathlib import Path

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
# Shared memory in bytes that a program can use on every GPU since sm_80; sm_86 and sm_89 have the least.
ROOM = 99 << 10


@cache
def tile_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile measured for this GPU, head size and dtype; without one, a tile that fits every GPU since sm_80."""
    if device.type != "cuda":
        return _SMALL
    return recall(tile_key(device, head_dim, dtype)) or default(head_dim, dtype)


def scored(device: torch.device, dtype: torch.dtype) -> Tile:
    """The tile for attention summed by key. In float32, a larger one spills kilobytes, and fits few GPUs."""
    return _SMALL if device.type != "cuda" or dtype == torch.float32 else Tile(64, 64, 4, 3)


def shared_bytes(tile: Tile, head_dim: int, dtype: torch.dtype) -> int:
    """Maximum shared memory of a program with this tile, on GPUs before sm_90 (which has 227 KiB).

    It holds queries, weights, the stages' blocks of keys and values, and for reductions 4 bytes per row and 1 KiB.
    """
    dim = 1 << (head_dim - 1).bit_length()
    numbers = tile.rows * (dim + tile.keys) + (1 + tile.stages) * tile.keys * dim
    return numbers * dtype.itemsize + 4 * tile.rows + 1024


def _fitting(tile: Tile, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile, with half as many keys per block if it would not fit: float32 with head sizes above 128."""
    if shared_bytes(tile, head_dim, dtype) <= ROOM:
        return tile
    return dataclasses.replace(tile, keys=tile.keys // 2)


def recall(key: str) -> Tile | None:
    """The stored tile of a key; None if there is none, or the file can't be read."""
    try:
        tile = Tile(**json.loads(store().read_text())[key])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # RuntimeError: no home directory
        return None
    return tile if all(type(value) is int for value in dataclasses.astuple(tile)) else None


def store() -> Path:
    """The file of measured tiles."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusionkv" / "tiles.json"


def default(head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile without measurements, which takes at most `ROOM` bytes of shared memory."""
    if dtype == torch.float32:
        return _fitting(Tile(32 if head_dim > 64 else 64, 32, 4, 2), head_dim, dtype)
    return Tile(64, 32, 4, 2) if head_dim > 128 else Tile(128, 64, 8, 3 if head_dim <= 64 else 2)


def tile_key(device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    return f"{torch.cuda.get_device_name(device)} d={head_dim} {str(dtype).removeprefix('torch.')}"
