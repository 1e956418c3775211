"""Copies of chunks between the pool's slots and bytes, on one rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.pool.slots import SlotRange, filled
from fusionkv.fusion_worker.transfer.entry_format import EntryFormat
from fusionkv.fusion_worker.transfer.pinned import to_host
from fusionkv.kernels.dequantise import restore_to
from fusionkv.kernels.quantised import Quantised


class RankCopies:
    """Copies beside the engine's steps, on CUDA streams of their own."""

    def __init__(self, pool: KVPool, kind: str) -> None:
        """kind: as of `EntryFormat`."""
        self.format = EntryFormat(pool.shape, kind)
        self.device = pool.kv.device
        self._pool = pool
        # Loads do not wait for what is stored, which waits for the step that computes it.
        self._streams = tuple(torch.cuda.Stream(pool.kv.device) for _ in range(2 if pool.kv.is_cuda else 0))

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickles on another rank as the copies of that rank's pool."""
        return RankCopies, (self._pool, self.format.name)

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

    def buffer(self, size: int) -> torch.Tensor:
        """Allocates uint8 [size] on the device, for use within `beside`."""
        with self.beside():
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def read(self, runs: Sequence[SlotRange], tokens: int) -> torch.Tensor:
        """Copies this rank's part of a chunk: uint8 [bytes] in host memory."""
        with self._behind():
            return to_host(self.format.pack(self._in_slots(runs, tokens).contiguous())).view(torch.uint8).reshape(-1)

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
            there = part.to(self.device, non_blocking=True)
            kv, places = self.format.unpack(there, tokens), list(self._places(runs, tokens))
            if isinstance(kv, Quantised):
                restore_to(kv, places)
                return
            for place, piece in zip(places, kv.split([place.shape[2] for place in places], dim=2), strict=True):
                place.copy_(piece)

    def _in_slots(self, runs: Sequence[SlotRange], tokens: int) -> torch.Tensor:
        """A chunk's KV in the pool itself, or a copy where it lies in several runs."""
        places = list(self._places(runs, tokens))
        return places[0] if len(places) == 1 else torch.cat(places, dim=2)

    def _places(self, runs: Sequence[SlotRange], tokens: int) -> Iterator[torch.Tensor]:
        """The slots of a chunk, a view of the pool for each run."""
        for _, run in filled(runs, tokens):
            yield self._pool.kv[:, :, run.start : run.start + run.length]


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[torch.cuda.Stream]:
    """Runs on a stream, and waits for what was launched there; not for what other threads launch later."""
    with torch.cuda.stream(stream):
        yield stream
        done = torch.cuda.Event()
        done.record(stream)
    done.synchronize()
