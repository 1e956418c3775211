"""What a worker does on all of its ranks at once. Most workers are one rank, and have nobody to tell."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fusionkv.fusion_worker.compute.batch import Batch
from fusionkv.fusion_worker.compute.forward_job import ShallowProbe
from fusionkv.fusion_worker.compute.kv_pool import PooledChunk
from fusionkv.fusion_worker.tensor_parallel.ranks import ALONE, Ranks
from fusionkv.kernels.segments import QuerySpan


class Crew:
    """A crew of one.

    `Leader` is one of several, and raises RankLost where the others can't be relied on any more; then it does nothing
    else again.
    """

    ranks: Ranks = ALONE

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """While all ranks run a batch. The engine's thread alone calls this and `shallow`."""
        yield

    @contextmanager
    def shallow(self, batch: Batch, probe: ShallowProbe) -> Iterator[None]:
        """While all ranks score a batch at layer 1."""
        yield

    def put(self, chunk: PooledChunk, parts: Sequence[torch.Tensor], write: Callable[[torch.Tensor], None]) -> None:
        """Each rank writes its part, uint8 [size], into a chunk's slots. From any thread, as all below."""
        write(parts[0])

    def take(self, chunk: PooledChunk, read: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """What each rank reads out of a chunk's slots, uint8 [size]."""
        return [read()]

    def keep(self, span: QuerySpan, tokens: torch.Tensor, slots: torch.Tensor, work: Callable[[], None]) -> None:
        """Each rank copies tokens [layers, kv_heads of all ranks, kept] of what a row sees to slots [kept]."""
        work()

    def close(self) -> None:
        """Ends the other ranks. No other call runs or comes after."""
