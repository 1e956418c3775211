"""XXH3-64 of many pieces of bytes at once, where they lie: how what a GPU read from a disk is verified on the GPU."""

import torch

from fusionkv.kernels.backend import has_triton
from fusionkv.kernels.xxh3 import accumulate, merged


def piece_digests(data: torch.Tensor, piece: int) -> list[bytes]:
    """XXH3-64 of each `piece` bytes of `data`, as `xxhash.xxh3_64_digest` gives it.

    data: uint8, contiguous, at an address that 8 divides, a whole number of pieces. piece: a multiple of 1024.
    """
    if data.device.type != "cpu" and has_triton():
        from fusionkv.kernels.gpu import checksum_triton

        accumulators = checksum_triton.accumulate(data, piece)
    else:
        accumulators = accumulate(data, piece)
    return [merged(each, piece) for each in accumulators.cpu().tolist()]
