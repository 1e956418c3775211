"""Adds to a chunk's keys and values what a linear map of them and of their place in the chunk predicts."""

import torch

from fusionkv.kernels.gpu import has_triton
from fusionkv.kernels.segments import Rotation

# Tokens times layers at a time, without a kernel: a long chunk of a large model would take gigabytes at once.
_AT_ONCE = 10_000


def correct(
    kv: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor,
    places: torch.Tensor,
    rotation: Rotation,
    cos: torch.Tensor,
    sin: torch.Tensor,
    share: float,
) -> None:
    """Corrects the KV of a chunk, in layers of one rotation.

    Args:
        kv: [layers, 2, tokens, kv_heads, head_dim].
        out: where the corrected KV goes, of the same shape and dtype; may be `kv`.
        weights: [layers, kv_heads, 2 * head_dim + places, 2 * head_dim]: from a key that is turned back to position
            0, a value and a place, to what is added to such a key and to the value.
        places: [tokens, places], in the dtype of `weights`.
        rotation: of the keys.
        cos, sin: float32 [tokens, rotary_dim / 2], of the keys' positions.
        share: how much of the change that the map predicts is added.
    """
    if kv.is_cuda and has_triton():
        from fusionkv.kernels.gpu import correction_triton

        correction_triton.correct(kv, out, weights, places, rotation, cos, sin, share)
        return
    _, _, tokens, heads, dim = kv.shape
    size, cos, sin = max(1, _AT_ONCE // tokens), cos[:, None], sin[:, None]
    for part, to, maps in zip(kv.split(size), out.split(size), weights.split(size), strict=True):
        keys, values = part.unbind(1)
        x = maps.new_empty(len(part), heads, tokens, maps.shape[2])
        rotation.apply(keys, cos, -sin, out=x[..., :dim].transpose(1, 2))
        x[..., dim : 2 * dim] = values.transpose(1, 2)
        x[..., 2 * dim :] = places
        change = (x @ maps).transpose(1, 2)
        torch.add(keys, rotation.apply(change[..., :dim], cos, sin), alpha=share, out=to[:, 0])
        torch.add(values, change[..., dim:], alpha=share, out=to[:, 1])
