"""Quantises KV to int8 or float8 with a scale for each block; in plain torch, on every device.

Keys have channels that are large at all tokens, so a block of keys is one channel of one head over 64 tokens. Values
have tokens that are large in all channels, so a block of values is one token of one head. A block's scale is its
largest magnitude divided by the format's largest number, in bfloat16, which has the range of float32.
"""

from dataclasses import dataclass

import torch

GROUP = 64  # tokens in a block of keys
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class Quantised:
    """Quantised KV.

    Attributes:
        numbers: int8 or float8 [layers, 2, tokens, kv_heads, head_dim].
        key_scales: bfloat16 [layers, groups, kv_heads, head_dim].
        value_scales: bfloat16 [layers, tokens, kv_heads].
    """

    numbers: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor


def quantise(kv: torch.Tensor, kind: torch.dtype) -> Quantised:
    """Quantises KV. kv: [layers, 2, tokens, kv_heads, head_dim], finite. kind: a value of `KINDS`."""
    layers, _, tokens, heads, dim = kv.shape
    groups = -(-tokens // GROUP)
    keys, values = kv[:, 0].float(), kv[:, 1].float()
    padded = torch.nn.functional.pad(keys.abs(), (0, 0, 0, 0, 0, groups * GROUP - tokens))
    key_scales = _scale(padded.view(layers, groups, GROUP, heads, dim).amax(2), kind)
    value_scales = _scale(values.abs().amax(-1), kind)
    scaled = torch.stack([keys / _of_tokens(key_scales, tokens), values / value_scales.float()[..., None]], dim=1)
    largest = _LARGEST[kind]
    # A scale may be rounded down, so that numbers exceed the format's largest; float8 would turn those into NaN.
    scaled = scaled.nan_to_num(0.0).clamp(-largest, largest)
    return Quantised((scaled.round() if kind == torch.int8 else scaled).to(kind), key_scales, value_scales)


def restore(stored: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Dequantises KV to [layers, 2, tokens, kv_heads, head_dim] of `dtype`."""
    tokens = stored.numbers.shape[2]
    keys = stored.numbers[:, 0].float() * _of_tokens(stored.key_scales, tokens)
    values = stored.numbers[:, 1].float() * stored.value_scales.float()[..., None]
    return torch.stack([keys, values], dim=1).to(dtype)


def _scale(largest: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return (largest / _LARGEST[kind]).bfloat16()


def _of_tokens(scales: torch.Tensor, tokens: int) -> torch.Tensor:
    """float32 [layers, tokens, kv_heads, head_dim]: each token's key scales."""
    return scales.float().repeat_interleave(GROUP, dim=1)[:, :tokens]
