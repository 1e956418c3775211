"""Tile shapes of the Triton kernels: measured once on a GPU, stored by its name, chosen by it ever after.

`python -m fusionkv.kernels.tuning` measures this machine's GPU and stores what was fastest.
"""

import argparse
import dataclasses
import fcntl
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segment_table import Spans
from fusionkv.kernels.segments import Segment, Span

log = logging.getLogger(__name__)


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
    return recall(_key(device, head_dim, dtype)) or default(head_dim, dtype)


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


def _key(device: torch.device, head_dim: int, dtype: torch.dtype) -> str:
    return f"{torch.cuda.get_device_name(device)} d={head_dim} {str(dtype).removeprefix('torch.')}"


def candidates(head_dim: int) -> Iterator[Tile]:
    """What is tried; what does not fit the GPU fails to start and is left out."""
    for rows, keys, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        if (rows * keys >= 64 * 64 or head_dim > 128) and not (rows == 64 and warps == 8):
            yield Tile(rows, keys, warps, stages)


def tune(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Measures every candidate on 15% of 16k tokens in chunks of 512, 28/4 heads, and stores the fastest."""
    from fusionkv.kernels import sparse_attention_triton

    context, chunk, heads, kv_heads = 16384, 512, 28, 4
    chosen = torch.randperm(context, device=device)[: context * 15 // 100].sort().values
    hidden = torch.zeros(context, dtype=torch.bool, device=device).index_fill_(0, chosen, True)
    segments = [Segment(i, chunk, i, shift=i, hidden=hidden[i : i + chunk]) for i in range(0, context, chunk)]
    segments.append(Segment(context, len(chosen), int(chosen[0]), positions=chosen))
    rotation = Rotation(1e6 ** (-torch.arange(head_dim // 2) / (head_dim // 2)), interleaved=False)
    pool = torch.randn(2, context + len(chosen), kv_heads, head_dim, device=device, dtype=dtype)
    q = torch.randn(len(chosen), heads, head_dim, device=device, dtype=dtype)
    times: dict[Tile, float] = {}
    for tile in candidates(head_dim):
        spans = Spans([Span(0, len(chosen), chosen, tuple(segments))])

        def call(tile: Tile = tile, spans: Spans = spans) -> torch.Tensor:
            return sparse_attention_triton.attend(q, pool[0], pool[1], spans, rotation, head_dim**-0.5, None, tile)

        try:
            times[tile] = _milliseconds(call)
        except Exception as error:
            # Out of shared memory or registers: Triton's own class for it has moved between its versions.
            log.info("%s does not run: %s", tile, error)
    if not times:
        raise RuntimeError(f"no tile runs on {torch.cuda.get_device_name(device)} with head size {head_dim}")
    best = min(times, key=times.__getitem__)
    remember(_key(device, head_dim, dtype), best)
    tile_for.cache_clear()
    print(f"{_key(device, head_dim, dtype)}: {best} in {times[best]:.3f} ms; {len(times)} tried", flush=True)
    return best


def _milliseconds(call: Callable[[], torch.Tensor]) -> float:
    """Median of 5 after a warm-up that compiles."""
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(5)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return float(sorted(start.elapsed_time(stop) for start, stop in events)[2])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.kernels.tuning", description=__doc__)
    parser.add_argument("--head-dims", default="64,128", help="head sizes, a comma between (%(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU to measure", file=sys.stderr)
        return 2
    for head_dim in map(int, args.head_dims.split(",")):
        tune(head_dim, getattr(torch, args.dtype), torch.device("cuda", torch.cuda.current_device()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
