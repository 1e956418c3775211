"""The storage format of chunks' KV outside the pool: plain, int8, fp8 or int4."""

import asyncio
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from fusionkv.fusion_worker.compute.engine import TPGroup
from fusionkv.fusion_worker.pool.chunks import PooledChunk
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.pool.slots import SlotRange
from fusionkv.fusion_worker.transfer.pinned import PinnedMapping, to_host
from fusionkv.kernels.dequantise import restore_to
from fusionkv.kernels.quantised import KINDS, Quantised, quantise, sizes
from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.cancellation import to_the_end


class Storage:
    """Copies chunks between the pool's slots and bytes.

    Plain entries are [layer, tensor, token, kv_head, head_dim], by `KVShape`. Others hold the same array in a byte or
    half a byte a number, followed by the scales of keys and of values (kernels/quantised.py). An entry has the heads
    of all ranks, so it does not depend on their number; a part has one rank's heads, in the same arrays.
    """

    def __init__(self, pool: KVPool, kind: str, tp: TPGroup | None = None) -> None:
        """kind: plain, int8, fp8 or int4. tp: copies on all ranks; None for one rank, and on ranks other than 0."""
        self._tp = tp or TPGroup()
        self.pool = pool
        streams = 2 if pool.kv.is_cuda else 0
        # Loads do not wait for what is stored, which waits for the step that computes it.
        self._streams = tuple(torch.cuda.Stream(pool.kv.device) for _ in range(streams))
        self._pinned = PinnedMapping(pool.kv.device)
        self._name, self._kind = kind, KINDS.get(kind)
        self.settings = {} if self._kind is None else {"store": kind}

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickles on another rank as the storage of that rank's pool."""
        return Storage, (self.pool, self._name)

    @property
    def device(self) -> torch.device:
        return self.pool.kv.device

    @contextmanager
    def beside(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Loads inside overlap with the engine's kernels, on a separate CUDA stream. Thread-safe.

        They wait for `after`, and are complete on exit. Without CUDA this does nothing.
        """
        if not self._streams:
            yield
            return
        with _on(self._streams[0]) as stream:
            if after is not None:
                stream.wait_event(after)
            yield

    @contextmanager
    def _behind(self) -> Iterator[None]:
        """As `beside`, on a stream that waits for all kernels launched so far: one may write what is read here."""
        if not self._streams:
            yield
            return
        with _on(self._streams[1]) as stream:
            stream.wait_stream(torch.cuda.default_stream(self.device))
            yield

    @property
    def lossless(self) -> bool:
        """Whether fetched KV equals stored KV."""
        return self._kind is None

    def size(self, tokens: int) -> int:
        """Bytes of an entry of `tokens` tokens."""
        heads = self.pool.shape.kv_heads * self._tp.ranks.count
        return heads * sum(blocks * each for blocks, each in self._arrays(tokens))

    def buffer(self, size: int) -> torch.Tensor:
        """Allocates uint8 [size] on the device, for use within `beside`."""
        with self.beside():
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def take_out(self, pooled: PooledChunk) -> memoryview:
        """Copies a chunk's KV out of the pool, as the bytes of an entry."""
        runs, tokens = pooled.runs, pooled.tokens
        parts = self._tp.copy(partial(self.read, runs, tokens))
        return self._join(parts, tokens).numpy().data

    def finite(self, pooled: PooledChunk) -> bool:
        """Whether a chunk's KV in the pool holds neither NaN nor infinity."""
        return all(map(bool, self._tp.copy(partial(self.read_finite, pooled.runs, pooled.tokens))))

    def put_in(self, pooled: PooledChunk, data: torch.Tensor) -> None:
        """Writes an entry to a chunk's slots. data: uint8 [size], in host memory or on the device."""
        # Other ranks have no such event.
        after = pooled.freed if self._tp.ranks.count == 1 else None
        self._tp.copy(partial(self.write, pooled.runs, pooled.tokens, after=after), self._split(data, pooled.tokens))

    async def copy_in(self, cache: CacheClient, entry: Entry, pooled: PooledChunk) -> bool:
        """Copies a leased entry from the shared memory of a cache service on this machine to a chunk's slots.

        False if the entry is not in shared memory, or its lease ended meanwhile. For a GPU also while that memory is
        not page-locked, since the driver would copy it twice, and with several ranks.
        """
        data = cache.view(entry)
        if data is None:
            return False
        if self.device.type != "cpu" and not (self._tp.ranks.count == 1 and self._pinned.holds(data)):
            return False

        def copy() -> bool:
            with self._pinned.reading():
                self.put_in(pooled, _tensor(data))
            if cache.is_leased(entry):
                return True
            # The bytes read may be of another entry. A NaN among them would spoil attention even at weight 0
            # (KVPool.of).
            self.put_in(pooled, torch.zeros(entry.size, dtype=torch.uint8))
            return False

        # Runs to the end even if the caller is cancelled, so that the slots are not reused while they are written.
        return await to_the_end(asyncio.to_thread(copy))

    def read(self, runs: Sequence[SlotRange], tokens: int) -> torch.Tensor:
        """Copies this rank's part of a chunk: uint8 [bytes] in host memory."""
        with self._behind():
            kv = self._in_slots(runs, tokens).contiguous()
            if self._kind is not None:
                kv = self._pack(kv)
            return to_host(kv).view(torch.uint8).reshape(-1)

    def read_finite(self, runs: Sequence[SlotRange], tokens: int) -> torch.Tensor:
        """Whether this rank's part of a chunk is finite: uint8 [1], 1 or 0."""
        with self._behind():
            # NaN is the minimum and the maximum of what holds one. 20 times as fast as `isfinite` of each number.
            extremes = torch.stack(self._in_slots(runs, tokens).aminmax())
            return extremes.isfinite().all().view(1).to("cpu", torch.uint8)

    def write(
        self, runs: Sequence[SlotRange], tokens: int, part: torch.Tensor, after: torch.cuda.Event | None = None
    ) -> None:
        """Writes this rank's part, uint8 [bytes] in host memory or on the device, to the chunk's slots.

        after: as of `PooledChunk.freed`; None waits for all kernels launched so far.
        """
        with self._behind() if after is None else self.beside(after):
            # Copied whole, then on the device to the slots; quantised, half as many bytes or a third.
            there, places = part.to(self.device, non_blocking=True), list(self._places(runs, tokens))
            if self._kind is not None:
                restore_to(self._unpack(there, tokens), places)
                return
            kv = self._kv(there.view(self.pool.shape.dtype), tokens)
            for place, piece in zip(places, kv.split([place.shape[2] for place in places], dim=2), strict=True):
                place.copy_(piece)

    def _kv(self, numbers: torch.Tensor, tokens: int) -> torch.Tensor:
        """[layers, tensors, tokens, kv_heads, numbers of a head]."""
        shape = self.pool.shape
        return numbers.view(shape.layers, shape.tensors, tokens, shape.kv_heads, -1)

    def _arrays(self, tokens: int) -> list[tuple[int, int]]:
        """Shapes of an entry's arrays, each [blocks, kv_heads, bytes]: blocks and bytes."""
        shape = self.pool.shape
        blocks = shape.layers * shape.tensors * tokens
        if self._kind is None:
            return [(blocks, shape.head_dim * shape.dtype.itemsize)]
        each = sizes(self._kind, shape.head_dim)
        groups = -(-tokens // each.group)
        values = shape.layers * (shape.tensors - 1) * tokens
        return [(blocks, each.numbers), (shape.layers * groups, each.keys), (values, each.values)]

    def _cut(self, entry: torch.Tensor, tokens: int, ranks: int = 1) -> Sequence[torch.Tensor]:
        """The arrays of an entry with the heads of `ranks` ranks: uint8 each."""
        heads = self.pool.shape.kv_heads * ranks
        return entry.split([blocks * heads * each for blocks, each in self._arrays(tokens)])

    def _join(self, parts: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        if len(parts) == 1:
            return parts[0]
        arrays, heads = self._arrays(tokens), self.pool.shape.kv_heads
        cut = [self._cut(part, tokens) for part in parts]
        joined = [
            torch.cat([piece.view(blocks, heads, each) for piece in pieces], dim=1).view(-1)
            for pieces, (blocks, each) in zip(zip(*cut, strict=True), arrays, strict=True)
        ]
        return joined[0] if len(joined) == 1 else torch.cat(joined)

    def _split(self, entry: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        count = self._tp.ranks.count
        if count == 1:
            return [entry]
        arrays = zip(self._cut(entry, tokens, count), self._arrays(tokens), strict=True)
        shared = [array.view(blocks, count, -1) for array, (blocks, _) in arrays]
        return [torch.cat([array[:, rank].reshape(-1) for array in shared]) for rank in range(count)]

    def _in_slots(self, runs: Sequence[SlotRange], tokens: int) -> torch.Tensor:
        """A chunk's KV in the pool itself, or a copy where it lies in several runs."""
        pieces = [self.pool.kv[:, :, run.start : run.start + run.length] for run in runs]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2))[:, :, :tokens]

    def _places(self, runs: Sequence[SlotRange], tokens: int) -> Iterator[torch.Tensor]:
        """The slots of a chunk, a view of the pool for each run."""
        for run in runs:
            count = min(run.length, tokens)
            tokens -= count
            yield self.pool.kv[:, :, run.start : run.start + count]

    def _pack(self, kv: torch.Tensor) -> torch.Tensor:
        assert self._kind is not None
        stored = quantise(kv, self._kind)
        parts = (stored.numbers, stored.key_scales, stored.value_scales)
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])

    def _unpack(self, data: torch.Tensor, tokens: int) -> Quantised:
        assert self._kind is not None
        shape = self.pool.shape
        numbers, *scales = self._cut(data, tokens)
        # The scales begin at any byte, but a view as bfloat16 must be aligned.
        keys, values = (part.clone().view(torch.bfloat16) for part in scales)
        each, count = sizes(self._kind, shape.head_dim), shape.tensors - 1
        per_block = each.keys // (2 * shape.head_dim)
        return Quantised(
            self._kv(numbers.view(self._kind), tokens),
            keys.view(shape.layers, -1, shape.kv_heads, per_block, shape.head_dim),
            values.view(shape.layers, count, tokens, shape.kv_heads, per_block, each.values // (2 * per_block)),
        )


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[torch.cuda.Stream]:
    """Runs on a stream, and waits for what was launched there; not for what other threads launch later."""
    with torch.cuda.stream(stream):
        yield stream
        done = torch.cuda.Event()
        done.record(stream)
    done.synchronize()


def _tensor(data: memoryview) -> torch.Tensor:
    """uint8 [len(data)] over the memory of `data`, which must outlive it. Avoids torch's read-only warning."""
    address = np.frombuffer(data, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * len(data)).from_address(address), dtype=torch.uint8)
