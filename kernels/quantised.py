"""Quantises KV to int8, float8 or four bits with scales for each block; in plain torch, on every device.

Keys have channels that are large at all tokens, so a block of keys is one channel of one head over a group of tokens.
Values have tokens that are large in all channels, so a block of values is one token of one head, in four bits at most
32 channels of it. A scale is in bfloat16, which has the range of float32.

In int8 and float8, a block's scale is its largest magnitude divided by the format's largest number. Four bits have a
minimum beside the scale and groups of 32, as in KIVI (Liu et al. 2024): a key's channels are far from 0 where the
model has biases. Without minima and in groups of 64, the KL from unquantised KV is twelve times as large on Qwen2.5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# The dtypes of numbers; a byte of int4 holds two.
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_STEPS = 15.0


class Sizes(NamedTuple):
    """Bytes of one head.

    group: tokens in a block of keys.
    numbers: of a token's key, or value.
    keys: of the scales of a group's keys.
    values: of the scales of a token's value.
    """

    group: int
    numbers: int
    keys: int
    values: int

    def token(self, tensors: int) -> float:
        """Key and value of a token, with their scales; the key alone if there is one tensor."""
        return tensors * self.numbers + self.keys / self.group + (tensors - 1) * self.values


def sizes(kind: torch.dtype, head_dim: int) -> Sizes:
    """kind: a value of `KINDS`. head_dim: even."""
    if kind == torch.uint8:
        return Sizes(32, head_dim // 2, 4 * head_dim, 4 * (head_dim // value_width(head_dim)))
    return Sizes(64, head_dim, 2 * head_dim, 2)


def value_width(head_dim: int) -> int:
    """Channels in a block of values in four bits."""
    return math.gcd(head_dim, 32)


@dataclass(frozen=True, slots=True)
class Quantised:
    """Quantised KV. In four bits, a block has two scales: the scale itself, and the minimum.

    Attributes:
        numbers: int8 or float8 [layers, 2, tokens, kv_heads, head_dim], or [layers, 1, ...] of keys alone; in four
            bits, uint8 [..., head_dim / 2], with channel i in the low half of byte i, and channel i + head_dim / 2 in
            the high half.
        key_scales: bfloat16 [layers, groups, kv_heads, scales, head_dim].
        value_scales: bfloat16 [layers, 1, tokens, kv_heads, scales, blocks]; [layers, 0, ...] without values.
    """

    numbers: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor


def quantise(kv: torch.Tensor, kind: torch.dtype) -> Quantised:
    """Quantises KV. kv: [layers, 2, tokens, kv_heads, head_dim], or [layers, 1, ...] of keys alone, finite.
    kind: a value of `KINDS`.
    """
    tokens, dim = kv.shape[2], kv.shape[-1]
    keys, values = kv[:, 0].float(), kv[:, 1:].float()
    blocks = values.unflatten(-1, (-1, dim if kind != torch.uint8 else value_width(dim)))
    key_scales, value_scales = _scales(_grouped(keys, kind), 2, kind), _scales(blocks, -1, kind)
    lowered = [
        _lowered(keys, _of_tokens(key_scales, tokens, kind).unbind(-2), kind)[:, None],
        _lowered(blocks, value_scales.float()[..., None].unbind(-3), kind).flatten(-2),
    ]
    numbers = torch.cat(lowered, dim=1)
    if kind == torch.uint8:
        low, high = numbers.chunk(2, dim=-1)
        numbers = low | high << 4
    return Quantised(numbers, key_scales, value_scales)


def restore(stored: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Dequantises KV to [layers, tensors, tokens, kv_heads, head_dim] of `dtype`."""
    numbers, kind = stored.numbers, stored.numbers.dtype
    if kind == torch.uint8:
        numbers = torch.cat([numbers & 15, numbers >> 4], dim=-1)
    keys, values = numbers[:, 0].float(), numbers[:, 1:].float()
    blocks = values.unflatten(-1, (stored.value_scales.shape[-1], numbers.shape[-1] // stored.value_scales.shape[-1]))
    keys = _raised(keys, _of_tokens(stored.key_scales, keys.shape[1], kind).unbind(-2))
    values = _raised(blocks, stored.value_scales.float()[..., None].unbind(-3)).flatten(-2)
    return torch.cat([keys[:, None], values], dim=1).to(dtype)


def _scales(numbers: torch.Tensor, dim: int, kind: torch.dtype) -> torch.Tensor:
    """bfloat16 [..., scales, blocks] of blocks along `dim`."""
    if kind != torch.uint8:
        return (numbers.abs().amax(dim) / _LARGEST[kind]).bfloat16().unsqueeze(-2)
    minimum = numbers.amin(dim).bfloat16()
    return torch.stack([((numbers.amax(dim) - minimum.float()) / _STEPS).bfloat16(), minimum], dim=-2)


def _lowered(numbers: torch.Tensor, scales: Sequence[torch.Tensor], kind: torch.dtype) -> torch.Tensor:
    if kind == torch.uint8:
        scale, minimum = scales
        return ((numbers - minimum) / scale).nan_to_num(0.0).round().clamp(0, _STEPS).to(kind)
    # A scale may be rounded down, so that numbers exceed the format's largest; float8 would turn those into NaN.
    scaled = (numbers / scales[0]).nan_to_num(0.0).clamp(-_LARGEST[kind], _LARGEST[kind])
    return (scaled.round() if kind == torch.int8 else scaled).to(kind)


def _raised(numbers: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    raised = numbers * scales[0]
    return raised if len(scales) == 1 else raised + scales[1]


def _grouped(keys: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """[layers, groups, group, kv_heads, head_dim]; the last group is filled up with its last token."""
    tokens, group = keys.shape[1], sizes(kind, keys.shape[-1]).group
    missing = -tokens % group
    return torch.cat([keys, keys[:, -1:].expand(-1, missing, -1, -1)], dim=1).unflatten(1, (-1, group))


def _of_tokens(scales: torch.Tensor, tokens: int, kind: torch.dtype) -> torch.Tensor:
    """float32 [layers, tokens, kv_heads, scales, head_dim]: each token's key scales."""
    return scales.float().repeat_interleave(sizes(kind, scales.shape[-1]).group, dim=1)[:, :tokens]
