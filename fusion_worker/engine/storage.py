"""The form in which chunks' KV leaves the pool and comes back: as computed, or in one byte a number."""

import torch

from fusionkv.fusion_worker.engine.kv_pool import KVPool, Resident
from fusionkv.fusion_worker.models import KVShape
from fusionkv.kernels.quantised import GROUP, KINDS, Quantised, quantise, restore


class Storage:
    """Copies chunks between the pool's slots and bytes.

    kind: plain, int8 or fp8. Plain bytes are [layer, 2, token, kv_head, head_dim]; the other two hold the same in one
    byte a number, then the scales of keys and of values (kernels/quantised.py).
    """

    def __init__(self, pool: KVPool, kind: str) -> None:
        self._pool = pool
        self._kind = KINDS.get(kind)
        self.settings = {} if self._kind is None else {"store": kind}

    @property
    def lossless(self) -> bool:
        """Whether what comes back is what was stored."""
        return self._kind is None

    def size(self, tokens: int) -> int:
        """Bytes of an entry of `tokens` tokens."""
        shape = self._pool.shape
        if self._kind is None:
            return tokens * shape.token_bytes
        return _numel(_numbers(shape, tokens)) + 2 * sum(map(_numel, _scales(shape, tokens)))

    def take_out(self, resident: Resident) -> memoryview:
        """A copy of a chunk's KV."""
        kv = self._read(resident)
        if self._kind is not None:
            kv = self._pack(kv)
        return kv.cpu().view(torch.uint8).reshape(-1).numpy().data

    def put_in(self, resident: Resident, data: torch.Tensor) -> None:
        """Writes a chunk's KV to its slots. data: uint8 [size], in host memory."""
        shape, tokens = self._pool.shape, resident.tokens
        if self._kind is None:
            self._write(resident, data.view(shape.dtype).view(_numbers(shape, tokens)))
        else:
            # Restored where it is needed: half the bytes cross to the device.
            self._write(resident, self._unpack(data.to(self._pool.kv.device), tokens))

    def pass_through(self, resident: Resident) -> None:
        """Leaves in the slots what storing and fetching would."""
        if self._kind is not None:
            self._write(resident, self._unpack(self._pack(self._read(resident)), resident.tokens))

    def _read(self, resident: Resident) -> torch.Tensor:
        pieces = [self._pool.kv[:, :, run.start : run.start + run.length] for run in resident.runs]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return whole[:, :, : resident.tokens].contiguous()

    def _write(self, resident: Resident, kv: torch.Tensor) -> None:
        at = 0
        for run in resident.runs:
            count = min(run.length, resident.tokens - at)
            self._pool.kv[:, :, run.start : run.start + count].copy_(kv[:, :, at : at + count])
            at += count

    def _pack(self, kv: torch.Tensor) -> torch.Tensor:
        assert self._kind is not None
        stored = quantise(kv, self._kind)
        parts = (stored.numbers, stored.key_scales, stored.value_scales)
        return torch.cat([part.contiguous().view(torch.uint8).reshape(-1) for part in parts])

    def _unpack(self, data: torch.Tensor, tokens: int) -> torch.Tensor:
        assert self._kind is not None
        shape = self._pool.shape
        numbers, scales = _numbers(shape, tokens), _scales(shape, tokens)
        # The scales begin anywhere, and a view needs its own alignment.
        parts = data.split([_numel(numbers), *(2 * _numel(scale) for scale in scales)])
        keys, values = (
            part.clone().view(torch.bfloat16).view(scale) for part, scale in zip(parts[1:], scales, strict=True)
        )
        return restore(Quantised(parts[0].view(self._kind).view(numbers), keys, values), shape.dtype)


def _numbers(shape: KVShape, tokens: int) -> tuple[int, ...]:
    return (shape.layers, 2, tokens, shape.kv_heads, shape.head_dim)


def _scales(shape: KVShape, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of keys and of values."""
    groups = -(-tokens // GROUP)
    return (shape.layers, groups, shape.kv_heads, shape.head_dim), (shape.layers, tokens, shape.kv_heads)


def _numel(sizes: tuple[int, ...]) -> int:
    return torch.Size(sizes).numel()
