"""A unit of work for the engine: some rows of one request, what they see, and what is wanted of them."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from fusionkv.fusion_worker.engine.kv_pool import Run
from fusionkv.fusion_worker.engine.sampling import Sampler
from fusionkv.kernels.segments import Segment


@dataclass(frozen=True, slots=True)
class Result:
    """What was asked for, the rest None.

    token: id sampled from the last row. scores: float32 [last position + 1]. mean: float32 [hidden], the mean of the
    rows' last hidden states.
    """

    token: int | None = None
    scores: torch.Tensor | None = None
    mean: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Work:
    """Rows to compute in one or more steps.

    ids, positions: int64 [rows], positions ascending. runs: where their KV goes, in row order.
    seen: segments of keys that are there already. The rows see each other by `own`.
    probe: layers whose attention into each position is summed up.
    A work that is sampled from or probed is small or comes last; only plain prefill is split over steps.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    runs: Sequence[Run]
    seen: tuple[Segment, ...] = ()
    sampler: Sampler | None = None
    probe: frozenset[int] = frozenset()
    mean: bool = False
    done: int = 0
    abandoned: bool = False
    future: "Future[Result]" = field(default_factory=Future)

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def splittable(self) -> bool:
        return not self.probe and not self.mean

    def own(self, stop: int) -> tuple[Segment, ...]:
        """The first `stop` rows as keys."""
        return lay_out(self.positions[:stop], self.runs)

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """int64 [stop - start]: the pool slots of these rows."""
        return slots_of(self.runs)[start:stop].to(self.ids.device)


def slots_of(runs: Sequence[Run]) -> torch.Tensor:
    """int64: every slot of the runs, in order."""
    return torch.cat([torch.arange(run.start, run.start + run.length) for run in runs])


def lay_out(positions: torch.Tensor, runs: Sequence[Run]) -> tuple[Segment, ...]:
    """Segments for tokens at `positions` (ascending) that fill `runs` in order. Gapless stretches stay implicit."""
    segments: list[Segment] = []
    at = 0
    for run in runs:
        part = positions[at : at + run.length]
        if len(part) == 0:
            break
        first = int(part[0])
        dense = int(part[-1]) - first + 1 == len(part)
        segments.append(Segment(run.start, len(part), first, positions=None if dense else part))
        at += len(part)
    return tuple(segments)


async def settled(future: "Future[Result]", work: Work) -> Result:
    """The work's result. When the caller is cancelled, returns only once the engine no longer touches its slots."""
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        work.abandoned = True
        if not future.cancel():
            await asyncio.wait([waiting])
        raise
