"""Dequantises KV to slots of a pool: in plain torch, or where there is a GPU by a Triton kernel for four bits."""

from collections.abc import Sequence

import torch

from fusionkv.kernels.gpu import has_triton
from fusionkv.kernels.quantised import Quantised, restore


def restore_to(stored: Quantised, places: Sequence[torch.Tensor]) -> None:
    """Dequantises KV to consecutive tokens of `places`, each [layers, tensors, some tokens, kv_heads, head_dim]."""
    counts = [place.shape[2] for place in places]
    if stored.numbers.dtype == torch.uint8 and stored.numbers.is_cuda and has_triton():
        from fusionkv.kernels.gpu import quantised_triton

        for number, place in enumerate(places):
            quantised_triton.restore_to(stored, sum(counts[:number]), place)
        return
    for place, piece in zip(places, restore(stored, places[0].dtype).split(counts, dim=2), strict=True):
        place.copy_(piece)
