"""The format of chunks' KV outside the pool: plain, int8, fp8 or int4."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.models import KVShape
from fusionkv.kernels.quantised import KINDS, Quantised, quantise, sizes


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """Plain entries are [layer, tensor, token, kv_head, head_dim], by `KVShape`.

    Others hold the same array in a byte or half a byte a number, followed by the scales of keys and of values
    (kernels/quantised.py). An entry has the heads of all ranks, so it does not depend on their number; a part has one
    rank's heads, in the same arrays.

    shape: one rank's. name: plain, int8, fp8 or int4.
    """

    shape: KVShape
    name: str

    @property
    def kind(self) -> torch.dtype | None:
        """The dtype of quantised numbers; None if the format is plain: fetched KV equals stored KV then."""
        return KINDS.get(self.name)

    def size(self, tokens: int, ranks: int) -> int:
        """Bytes of an entry of `tokens` tokens."""
        return self.shape.kv_heads * ranks * sum(blocks * each for blocks, each in self._arrays(tokens))

    def join(self, parts: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """The entry of all ranks' parts: uint8 each."""
        if len(parts) == 1:
            return parts[0]
        arrays, heads = self._arrays(tokens), self.shape.kv_heads
        cut = [self._cut(part, tokens) for part in parts]
        joined = [
            torch.cat([piece.view(blocks, heads, each) for piece in pieces], dim=1).view(-1)
            for pieces, (blocks, each) in zip(zip(*cut, strict=True), arrays, strict=True)
        ]
        return joined[0] if len(joined) == 1 else torch.cat(joined)

    def split(self, entry: torch.Tensor, tokens: int, ranks: int) -> list[torch.Tensor]:
        """The parts of an entry, for each rank: uint8 each."""
        if ranks == 1:
            return [entry]
        arrays = zip(self._cut(entry, tokens, ranks), self._arrays(tokens), strict=True)
        shared = [array.view(blocks, ranks, -1) for array, (blocks, _) in arrays]
        return [torch.cat([array[:, rank].reshape(-1) for array in shared]) for rank in range(ranks)]

    def pack(self, kv: torch.Tensor) -> torch.Tensor:
        """The part of KV [layers, tensors, tokens, kv_heads, head_dim], quantised: uint8."""
        if self.kind is None:
            return kv
        stored = quantise(kv, self.kind)
        parts = (stored.numbers, stored.key_scales, stored.value_scales)
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])

    def unpack(self, part: torch.Tensor, tokens: int) -> torch.Tensor | Quantised:
        """The KV of a part: uint8. Plain KV is a view of it."""
        shape, kind = self.shape, self.kind
        if kind is None:
            return self._kv(part.view(shape.dtype), tokens)
        numbers, *scales = self._cut(part, tokens)
        # The scales begin at any byte, but a view as bfloat16 must be aligned.
        keys, values = (scale.clone().view(torch.bfloat16) for scale in scales)
        each, count = sizes(kind, shape.head_dim), shape.tensors - 1
        per_block = each.keys // (2 * shape.head_dim)
        return Quantised(
            self._kv(numbers.view(kind), tokens),
            keys.view(shape.layers, -1, shape.kv_heads, per_block, shape.head_dim),
            values.view(shape.layers, count, tokens, shape.kv_heads, per_block, each.values // (2 * per_block)),
        )

    def _kv(self, numbers: torch.Tensor, tokens: int) -> torch.Tensor:
        """[layers, tensors, tokens, kv_heads, numbers of a head]."""
        return numbers.view(self.shape.layers, self.shape.tensors, tokens, self.shape.kv_heads, -1)

    def _arrays(self, tokens: int) -> list[tuple[int, int]]:
        """Shapes of an entry's arrays, each [blocks, kv_heads, bytes]: blocks and bytes."""
        shape, kind = self.shape, self.kind
        blocks = shape.layers * shape.tensors * tokens
        if kind is None:
            return [(blocks, shape.head_dim * shape.dtype.itemsize)]
        each = sizes(kind, shape.head_dim)
        groups = -(-tokens // each.group)
        values = shape.layers * (shape.tensors - 1) * tokens
        return [(blocks, each.numbers), (shape.layers * groups, each.keys), (values, each.values)]

    def _cut(self, entry: torch.Tensor, tokens: int, ranks: int = 1) -> Sequence[torch.Tensor]:
        """The arrays of an entry with the heads of `ranks` ranks: uint8 each."""
        heads = self.shape.kv_heads * ranks
        return entry.split([blocks * heads * each for blocks, each in self._arrays(tokens)])
