"""A unit of work for the engine: some rows of one request, what they see, and what is wanted of them."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from fusionkv.fusion_worker.compute.attention import LayerState, Shallow, shallow
from fusionkv.fusion_worker.compute.batch import Batch, States
from fusionkv.fusion_worker.compute.kv_pool import SlotRange
from fusionkv.fusion_worker.decode.sampling import Sampler
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.select.base import Selector
from fusionkv.fusion_worker.select.fresh_states import FreshStates
from fusionkv.kernels.segments import KVSegment
from fusionkv.kernels.tempered_attention import Temper


@dataclass(frozen=True, slots=True)
class Result:
    """What was asked for, the rest None.

    token: id sampled from the last row. logits: float32 [rows asked for, vocabulary]. scores: float32
    [last position + 1], of a shallow probe [selectors, last position + 1]. shallow: the rows behind layer 0. votes:
    float32 [layers, kv_heads, last position + 1].
    """

    token: int | None = None
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    shallow: Shallow | None = None
    votes: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ShallowProbe:
    """Scores tokens by their states behind layer 0, and stops there.

    selectors: each needs `FreshLayer`. starts: as for `FreshStates`.
    """

    selectors: tuple[Selector[FreshStates], ...]
    starts: torch.Tensor

    def look(self, model: Model, batch: Batch) -> tuple[Shallow, torch.Tensor]:
        """The batch's one span behind layer 0, and its scores."""
        found = shallow(model, batch)
        return found, self.scores(model, batch, found.second)

    @torch.inference_mode()
    def scores(self, model: Model, batch: Batch, states: States) -> torch.Tensor:
        """float32 [selectors, last position + 1], of the batch's one span. states: of layer 1."""
        (span,) = batch.spans
        fresh = FreshStates(states, batch.pool[1], span, model.rotations[1], self.starts, model.ranks)
        return torch.stack([selector.scores(fresh) for selector in self.selectors])


@dataclass(slots=True, eq=False)
class ForwardJob:
    """Rows to compute in one or more steps.

    ids, positions: int64 [rows], positions ascending. runs: where their KV goes, in row order.
    seen: segments of keys that are there already. The rows see each other by `own`.
    unstored: rows at the front whose keys are in `seen`, so that their KV is not written.
    logits: how many rows, the last ones, are wanted as logits.
    probe: layers whose attention into each position is summed up; or each token is scored by selectors.
    ahead: the rows, when they have been through layer 0 already.
    temper: how the rows attend to their context, when it is not as the model was trained.
    votes: how many rows, the last ones, are wanted as votes: their attention by layer and KV head.
    background: comes after all prefills that somebody waits for.
    A work is split over steps if what is wanted of it comes from its last row alone.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    runs: Sequence[SlotRange]
    seen: tuple[KVSegment, ...] = ()
    unstored: int = 0
    sampler: Sampler | None = None
    logits: int = 0
    probe: frozenset[int] | ShallowProbe = frozenset()
    ahead: LayerState | None = None
    temper: Temper | None = None
    votes: int = 0
    background: bool = False
    done: int = 0
    abandoned: bool = False
    future: "Future[Result]" = field(default_factory=Future)

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def left(self) -> int:
        """Rows that no step has taken yet."""
        return self.rows - self.done

    @property
    def shallow(self) -> bool:
        return isinstance(self.probe, ShallowProbe)

    @property
    def splittable(self) -> bool:
        return not (self.probe or self.logits > 1 or self.ahead or self.votes)

    @property
    def alone(self) -> bool:
        """Whether its rows go through other layers than most, so that it takes a step of its own."""
        return self.shallow or self.ahead is not None

    def own(self, stop: int) -> tuple[KVSegment, ...]:
        """The first `stop` rows as keys."""
        return lay_out(self.positions[self.unstored : stop], self.runs)

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """int64: the pool slots of these rows, as many of them as are stored."""
        first = max(0, start - self.unstored)
        return slots_of(self.runs)[first : stop - self.unstored].to(self.ids.device)


def slots_of(runs: Sequence[SlotRange]) -> torch.Tensor:
    """int64: every slot of the runs, in order."""
    return torch.cat([torch.arange(run.start, run.start + run.length) for run in runs])


def behind(runs: Sequence[SlotRange], count: int) -> tuple[SlotRange, ...]:
    """The runs without their first `count` slots."""
    left: list[SlotRange] = []
    for run in runs:
        skipped = min(count, run.length)
        count -= skipped
        if run.length > skipped:
            left.append(SlotRange(run.start + skipped, run.length - skipped))
    return tuple(left)


def lay_out(positions: torch.Tensor, runs: Sequence[SlotRange]) -> tuple[KVSegment, ...]:
    """Segments for tokens at `positions` (ascending) that fill `runs` in order. Gapless stretches stay implicit."""
    segments: list[KVSegment] = []
    at = 0
    for run in runs:
        part = positions[at : at + run.length]
        if len(part) == 0:
            break
        first = int(part[0])
        dense = int(part[-1]) - first + 1 == len(part)
        segments.append(KVSegment(run.start, len(part), first, positions=None if dense else part))
        at += len(part)
    return tuple(segments)


async def settled(future: "Future[Result]", work: ForwardJob) -> Result:
    """The work's result. When the caller is cancelled, returns only once the engine no longer touches its slots."""
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        work.abandoned = True
        if not future.cancel():
            await asyncio.wait([waiting])
        raise
