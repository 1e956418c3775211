"""The dtype in which a CPU multiplies matrices fastest."""

import timeit
from functools import cache

import torch

_ROUNDS, _PRODUCTS = 5, 4


@cache
def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in, for many rows of vectors stored in `dtype`.

    float16 becomes float32: float16 would overflow, and few CPUs compute in it. bfloat16 stays bfloat16 where its
    matrix products are faster than float32's, which is measured once (4 ms). With AMX they are several times faster;
    without it, an Emerald Rapids core reaches 185 GFLOPS in float32 and 100 in bfloat16.
    """
    if dtype == torch.float16:
        return torch.float32
    if dtype != torch.bfloat16:
        return dtype
    return dtype if _seconds(dtype) < _seconds(torch.float32) else torch.float32


@torch.inference_mode()
def _seconds(dtype: torch.dtype) -> float:
    """The shortest time of several matrix products of the size that attention computes in one block.

    By one thread: on cores that others use, several wait for each other 500 times as long as they compute.
    """
    rows, keys = torch.ones(1, 256, 64, dtype=dtype), torch.ones(1, 64, 512, dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return min(timeit.repeat(lambda: torch.bmm(rows, keys), repeat=_ROUNDS, number=_PRODUCTS))
    finally:
        torch.set_num_threads(threads)
