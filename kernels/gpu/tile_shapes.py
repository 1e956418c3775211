"""Tile shapes of the Triton kernels: measured once on a GPU (tuning.py), and stored by its name."""

import dataclasses
import fcntl
import json
import os
from functools import cache
from pathlib import Path

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """rows: query rows times heads of a group. keys: of a block. warps, stages: of a program."""

    rows: int
    keys: int
    warps: int
    stages: int


_INTERPRETED = Tile(32, 32, 4, 1)
# Bytes of shared memory that a program can have on every GPU since sm_80: those of sm_86 and sm_89 have the least.
ROOM = 99 << 10


@cache
def tile_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> Tile:
    """The measured tile of this GPU, head size and dtype; without one, a tile that fits every GPU since sm_80."""
    if device.type != "cuda":
        return _INTERPRETED
    return recall(tile_key(device, head_dim, dtype)) or default(head_dim, dtype)


def shared_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """Of rows of several requests, each with positions of its own: the largest that needs no registers it has not.

    Not measured; compiled for sm_80 and sm_90.
    """
    return _fitting(Tile(64 if head_dim <= 128 else 32, 32, 8, 2), head_dim, dtype)


def shared_bytes(tile: Tile, head_dim: int, dtype: torch.dtype) -> int:
    """What a program with this tile takes of shared memory at most, on GPUs before sm_90 (which has 227 KiB).

    Queries, weights, blocks of keys and values as stages need them, and 4 bytes a row and 1 KiB for reductions.
    """
    dim = 1 << (head_dim - 1).bit_length()
    numbers = tile.rows * (dim + tile.keys) + (1 + tile.stages) * tile.keys * dim
    return numbers * dtype.itemsize + 4 * tile.rows + 1024


def _fitting(tile: Tile, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile, with blocks of half as many keys where it has no room otherwise: float32 with heads beyond 128."""
    if shared_bytes(tile, head_dim, dtype) <= ROOM:
        return tile
    return dataclasses.replace(tile, keys=tile.keys // 2)


def recall(key: str) -> Tile | None:
    """The tile remembered under a key; None where there is none, or the file can't be read."""
    try:
        tile = Tile(**json.loads(_store().read_text())[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tile if all(type(value) is int for value in dataclasses.astuple(tile)) else None


def remember(key: str, tile: Tile) -> None:
    """Keeps a tile under a key, next to those of other keys, for all processes of this user."""
    path = _store()
    path.parent.mkdir(parents=True, exist_ok=True)
    # A lock of its own: the store is replaced, so that a reader never finds half of it.
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            known = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            known = {}
        known[key] = dataclasses.asdict(tile)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(known, indent=1) + "\n")
        partial.replace(path)


def _store() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusionkv" / "tiles.json"


def default(head_dim: int, dtype: torch.dtype) -> Tile:
    """Not measured: sized so that it takes at most `ROOM` of shared memory."""
    if dtype == torch.float32:
        return _fitting(Tile(32 if head_dim > 64 else 64, 32, 4, 2), head_dim, dtype)
    return Tile(64, 32, 4, 2) if head_dim > 128 else Tile(128, 64, 8, 3 if head_dim <= 64 else 2)


def tile_key(device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    return f"{torch.cuda.get_device_name(device)} d={head_dim} {str(dtype).removeprefix('torch.')}"
