"""Rank 0: it alone serves, schedules and loads, and tells the others what to do along with it."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fusionkv.fusion_worker.compute.batch import Batch
from fusionkv.fusion_worker.compute.forward_job import ShallowProbe
from fusionkv.fusion_worker.compute.kv_pool import PooledChunk
from fusionkv.fusion_worker.tensor_parallel import orders
from fusionkv.fusion_worker.tensor_parallel.crew import Crew
from fusionkv.fusion_worker.tensor_parallel.lane import Joined
from fusionkv.kernels.segments import QuerySpan
from fusionkv.protos.fusion.v1 import ranks_pb2 as pb
from fusionkv.protos.runtime.errors import Unavailable

log = logging.getLogger(__name__)


class RankLost(Unavailable):
    """A rank ended, was silent for too long, or could not do its part: the ranks are out of step for good."""


class Leader(Crew):
    """A crew of several. Steps and copies go on side by side, each in one order on all ranks.

    on_lost: told once why the crew can't go on, from the thread that found out.
    """

    def __init__(self, joined: Joined, on_lost: Callable[[RankLost], None]) -> None:
        self.ranks = joined.ranks
        self._steps, self._copies = joined.steps, joined.copies
        self._on_lost = on_lost
        self._writer = orders.StepWriter()
        self._copying = threading.Lock()
        self._failing = threading.Lock()
        self._lost: RankLost | None = None

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        with self._together():
            self._steps.tell(self._writer.batch(batch).SerializeToString())
            yield

    @contextmanager
    def shallow(self, batch: Batch, probe: ShallowProbe) -> Iterator[None]:
        with self._together():
            self._steps.tell(self._writer.shallow(batch, probe).SerializeToString())
            yield

    def put(self, chunk: PooledChunk, parts: Sequence[torch.Tensor], write: Callable[[torch.Tensor], None]) -> None:
        with self._copy(pb.Copy(put=orders.chunk(chunk))):
            write(self._copies.scatter(parts))

    def take(self, chunk: PooledChunk, read: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        with self._copy(pb.Copy(take=orders.chunk(chunk))):
            return self._copies.gather(read())

    def keep(self, span: QuerySpan, tokens: torch.Tensor, slots: torch.Tensor, work: Callable[[], None]) -> None:
        with self._copy(pb.Copy(keep=orders.keep(span, tokens, slots))):
            work()

    def close(self) -> None:
        if self._lost is None:
            self._steps.tell(pb.Step().SerializeToString())
            self._copies.tell(pb.Copy().SerializeToString())

    @contextmanager
    def _copy(self, order: pb.Copy) -> Iterator[None]:
        """While all ranks do a copy: it ends when the last of them has done it."""
        with self._copying, self._together():
            self._copies.tell(order.SerializeToString())
            yield
            self._copies.meet()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Whatever fails inside leaves other ranks in the middle of something: nothing can follow it."""
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except Exception as error:
            lost = RankLost(f"the {self.ranks.count} ranks of this worker are out of step: {error}")
            with self._failing:
                first, self._lost = self._lost is None, self._lost or lost
            if first:
                log.error("the ranks are out of step", exc_info=error)
                self._on_lost(lost)
            raise self._lost from error
