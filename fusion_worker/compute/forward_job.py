"""A job for the engine: rows of one request, the keys that they see, and the outputs to return."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from fusionkv.fusion_worker.compute.attention import LayerState, Shallow, shallow
from fusionkv.fusion_worker.compute.batch import Batch, LeavingRows, ReusedKV
from fusionkv.fusion_worker.compute.kv_pool import SlotRange
from fusionkv.fusion_worker.decode.sampling import Sampler
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.select.base import Selector
from fusionkv.fusion_worker.select.fresh_states import FreshStates
from fusionkv.kernels.segments import KVSegment
from fusionkv.kernels.tempered_attention import Temper


@dataclass(frozen=True, slots=True)
class Result:
    """The requested outputs of a job; the others are None.

    Attributes:
        token: id sampled from the last row.
        logits: float32 [requested rows, vocabulary].
        scores: float32 [last position + 1]; of a shallow probe, [selectors, last position + 1].
        shallow: the rows after layer 0.
        votes: float32 [layers, kv_heads, last position + 1], attention of the requested rows.
    """

    token: int | None = None
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    shallow: Shallow | None = None
    votes: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ShallowProbe:
    """Scores tokens by their states after layer 0, and stops there.

    selectors: selectors that need `FreshLayer`. starts: as in `FreshStates`.
    """

    selectors: tuple[Selector[FreshStates], ...]
    starts: torch.Tensor

    @torch.inference_mode()
    def look(self, model: Model, batch: Batch) -> tuple[Shallow, torch.Tensor]:
        """The batch's single span after layer 0, and its scores, float32 [selectors, last position + 1]."""
        (span,), found = batch.spans, shallow(model, batch)
        fresh = FreshStates(found.second, batch.pool[1], span, model.rotations[1], self.starts, model.ranks)
        return found, torch.stack([selector.scores(fresh) for selector in self.selectors])


@dataclass(slots=True, eq=False)
class ForwardJob:
    """Rows to compute in one or more steps. A job is split over steps only if its output comes from its last row.

    Attributes:
        ids, positions: int64 [rows], positions ascending.
        runs: slots for the rows' KV, in row order.
        seen: segments of existing keys. The rows' own keys come from `own`.
        unstored: number of first rows whose keys are in `seen` already; their KV is not written.
        sampler: samples a token from the last row.
        logits: number of last rows to return logits of.
        probe: layers whose attention into each position is summed, or selectors that score each token.
        ahead: the rows after layer 0, if they have been through it already.
        depth: number of layers that the first rows run through, as many as `reused` has, or all; None for all layers.
        reused: the KV that the first rows' slots get in the other layers. With a depth, all rows are stored.
        temper: a change of how the rows attend to the context; None for none.
        votes: number of last rows to return the attention of, by layer and KV head.
        background: whether it runs after all prefills of waiting requests.
        done: rows taken by steps so far.
        abandoned: whether the request was cancelled.
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
    depth: int | None = None
    reused: ReusedKV | None = None
    temper: Temper | None = None
    votes: int = 0
    background: bool = False
    done: int = 0
    abandoned: bool = False
    future: "Future[Result]" = field(default_factory=Future)

    @classmethod
    def consecutive(
        cls,
        ids: Sequence[int],
        start: int,
        runs: Sequence[SlotRange],
        seen: tuple[KVSegment, ...],
        device: torch.device,
        background: bool = False,
    ) -> "ForwardJob":
        """A job for tokens at consecutive positions from `start` on."""
        positions = torch.arange(start, start + len(ids)).to(device)
        return cls(torch.tensor(ids, dtype=torch.int64).to(device), positions, runs, seen, background=background)

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def left(self) -> int:
        """Number of rows that no step has taken yet."""
        return self.rows - self.done

    @property
    def shallow(self) -> bool:
        return isinstance(self.probe, ShallowProbe)

    @property
    def splittable(self) -> bool:
        return not (self.probe or self.logits > 1 or self.ahead or self.votes)

    @property
    def alone(self) -> bool:
        """Whether it needs a separate step because its rows skip layers."""
        return self.shallow or self.ahead is not None

    def leaving(self, start: int, stop: int) -> LeavingRows | None:
        """The first of the rows `[start, stop)` that run through the first layers only; None without a depth."""
        if self.depth is None:
            return None
        if self.reused is None:
            return LeavingRows(self.depth, stop - start)
        reused = self.reused.part(start, stop)
        return LeavingRows(self.depth, len(reused.sources), reused)

    def own(self, stop: int) -> tuple[KVSegment, ...]:
        """Segments of the keys of the first `stop` rows."""
        return lay_out(self.positions[self.unstored : stop], self.runs)

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """int64: the pool slots of rows `[start, stop)` that are stored."""
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
    """Segments of tokens at ascending `positions` that fill `runs` in order; consecutive positions are implicit."""
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
