"""XXH3-64 of many pieces at once, on the device that holds them: verifies bytes read from a disk on the GPU."""

import torch

from fusionkv.kernels.gpu import has_triton
from fusionkv.kernels.xxh3 import accumulate, merged


def piece_digests(data: torch.Tensor, piece: int) -> list[bytes]:
    """XXH3-64 of each piece of `data`, equal to `xxhash.xxh3_64_digest`.

    data: uint8, contiguous, 8-byte aligned, a whole number of pieces. piece: bytes of a piece, a multiple of 1024.
    """
    if data.device.type != "cpu" and has_triton():
        from fusionkv.kernels.gpu import checksum_triton

        accumulators = checksum_triton.accumulate(data, piece)
    else:
        accumulators = accumulate(data, piece)
    return [merged(each, piece) for each in accumulators.cpu().tolist()]
