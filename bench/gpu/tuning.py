"""Measures tile shapes of the Triton kernels on this machine's GPU, and names the fastest.

Run `python -m fusionkv.bench.gpu.tuning`.
"""

import argparse
import itertools
import logging
import sys
from collections.abc import Iterator
from functools import partial

import torch

from fusionkv.bench.gpu import workload
from fusionkv.bench.gpu.workload import Shape
from fusionkv.bench.kernels.clock import Clock
from fusionkv.kernels.gpu.tile_shapes import Tile

log = logging.getLogger(__name__)


def candidates(head_dim: int) -> Iterator[Tile]:
    """The tiles to measure. Those that do not fit the GPU fail to start and are skipped."""
    for rows, keys, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        # Sums and scores of 192 of a thread's 255 registers spill 700 to 1,400 bytes, and compile slowly (sm_90).
        kept = rows * (head_dim + keys) < 192 * 32 * warps
        if kept and (rows * keys >= 64 * 64 or head_dim > 128) and not (rows == 64 and warps == 8):
            yield Tile(rows, keys, warps, stages)


def tune(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Measures every candidate on 15% of 16k tokens in chunks of 512, with 28/4 heads."""
    from fusionkv.kernels.gpu import sparse_attention_triton

    problem = workload.prefill(Shape("7B", 28, 4, head_dim), 16384, 512, 0.15, device, dtype)
    given = problem.q, problem.k, problem.v, problem.spans, problem.spec
    times, clock = dict[Tile, float](), Clock(device)
    for tile in candidates(head_dim):
        try:
            times[tile] = clock.ms(partial(sparse_attention_triton.sparse_attention, *given, tile=tile))
        except Exception as error:
            # Out of shared memory or registers; the exception's class differs between versions of Triton.
            log.info("%s does not run: %s", tile, error)
    name = torch.cuda.get_device_name(device)
    if not times:
        raise RuntimeError(f"no tile runs on {name} with head size {head_dim}")
    best = min(times, key=times.__getitem__)
    print(f"{name}, {head_dim} channels: {best} in {times[best]:.3f} ms; {len(times)} tried", flush=True)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.bench.gpu.tuning", description=__doc__)
    parser.add_argument("--head-dims", default="64,128", help="head sizes, separated by commas (%(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU found", file=sys.stderr)
        return 2
    for head_dim in map(int, args.head_dims.split(",")):
        tune(head_dim, getattr(torch, args.dtype), torch.device("cuda", torch.cuda.current_device()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
