"""A ragged batch for one forward pass: rows of several requests, the keys that they see, and probes of attention."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import QuerySpan, Spans
from fusionkv.kernels.tempered_attention import Temper


@dataclass(frozen=True, slots=True)
class States:
    """The inputs of one layer's attention: q [rows, q_heads, head_dim]; k, v [rows, kv_heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None


@dataclass(slots=True)
class Probe:
    """Sums the attention of one span's rows to each position, over the given layers.

    scores: float32 [last position + 1], complete after the forward pass.
    """

    span: QuerySpan
    layers: frozenset[int]
    scores: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scores = torch.zeros(int(self.span.positions[-1]) + 1, device=self.span.positions.device)


@dataclass(slots=True)
class Votes:
    """The attention of one span's rows to each position, by layer and KV head.

    layers: float32 [kv_heads, last position + 1] for each layer, complete after the forward pass.
    """

    span: QuerySpan
    layers: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReusedKV:
    """Reused KV of some tokens. sources: int64 [tokens], its slots. shifts: int64 [tokens], as of `KVSegment`."""

    sources: torch.Tensor
    shifts: torch.Tensor

    def part(self, start: int, stop: int) -> "ReusedKV":
        """The KV of those tokens of `[start, stop)` that exist."""
        return ReusedKV(self.sources[start:stop], self.shifts[start:stop])

    def place(self, pool: torch.Tensor, first: int, targets: torch.Tensor, rotations: Sequence[Rotation]) -> None:
        """Copies the KV of the layers from `first` on to other slots, its keys rotated by the shifts.

        pool: [layers, 2, slots, kv_heads, head_dim]. targets: int64 [tokens], the slots to write. rotations: of each
        layer.
        """
        for rotation in dict.fromkeys(rotations[first:]):
            those = [[layer] for layer in range(first, len(pool)) if rotations[layer] is rotation]
            layers = torch.tensor(those, device=pool.device)
            cos, sin = (factor[:, None] for factor in rotation.factors(self.shifts))
            pool[layers, 0, targets] = rotation.apply(pool[layers, 0, self.sources], cos, sin)
            pool[layers, 1, targets] = pool[layers, 1, self.sources]


@dataclass(frozen=True, slots=True)
class LeavingRows:
    """A span's first rows, which run through `depth` layers only.

    reused: the KV that their slots get in the later layers; None leaves those as they are.
    """

    depth: int
    rows: int
    reused: ReusedKV | None = None


@dataclass(slots=True)
class Batch:
    """A ragged batch: token rows of several requests, concatenated, with the slots of their keys.

    ids, positions: int64 [rows]; row i has position positions[i].
    slots: int64, slots of the pool to which the KV of the last len(slots) rows is written. Other rows write no KV.
    pool: [layers, 2, slots, kv_heads, head_dim]. rotations: of each layer.
    tempered: spans whose rows attend to their context at a temperature; `spans` holds all others.
    wanted: for each span, in the order of their rows, the number of rows at its end whose attention in the last
        layer or last hidden state is used; None for all.
    leaving: of each span, in the order of their rows, its first rows that run through the first layers only, or None.
        All of them have the same depth, and all rows of the batch have slots. Empty if no rows leave.
    states: inputs of attention by layer, for the layers to record; the last of these layers computes no attention.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: Spans
    pool: torch.Tensor
    rotations: Sequence[Rotation]
    probes: Sequence[Probe] = ()
    votes: Sequence[Votes] = ()
    tempered: Sequence[tuple[QuerySpan, Temper]] = ()
    wanted: Sequence[int] | None = None
    leaving: Sequence[LeavingRows | None] = ()
    states: dict[int, States | None] = field(default_factory=dict)

    @property
    def narrows(self) -> bool:
        """Whether less than half of the rows are wanted; with more, a separate pass would save little."""
        return self.wanted is not None and 2 * sum(self.wanted) < len(self.ids)

    @property
    def depth(self) -> int | None:
        """Number of layers that all rows run through; None for all layers."""
        return next((rows.depth for rows in self.leaving if rows is not None), None)

    def remaining(self) -> "tuple[torch.Tensor, Batch]":
        """Places the reused KV of the rows that leave at `depth`.

        Returns int64, the rows that remain, and a batch of them for the later layers.
        """
        counts = []
        for span, rows in zip(self._all_spans(), self.leaving, strict=True):
            count = rows.rows if rows is not None else 0
            if rows is not None and rows.reused is not None and count:
                targets = self.slots[span.start : span.start + count]
                rows.reused.place(self.pool, rows.depth, targets, self.rotations)
            counts.append(span.rows - count)
        kept, batch = self._last(counts)
        wanted = self.wanted and [n for n, count in zip(self.wanted, counts, strict=True) if count]
        return kept, replace(batch, slots=self.slots[kept], wanted=wanted)

    def narrowed(self) -> "tuple[torch.Tensor, Batch]":
        """int64, the wanted rows, and a batch of only those, which writes no KV. Only for a batch that `narrows`."""
        assert self.wanted is not None
        return self._last(self.wanted)

    def _all_spans(self) -> list[QuerySpan]:
        """Tempered and other spans, in the order of their rows."""
        return sorted((*self.spans, *(span for span, _ in self.tempered)), key=lambda span: span.start)

    def _last(self, counts: Sequence[int]) -> "tuple[torch.Tensor, Batch]":
        """The last rows of each span, and a batch of them that writes no KV.

        The order of keys that earlier layers computed is kept.
        """
        new: dict[int, QuerySpan] = {}  # by the `stop` of the old span
        at = 0
        for span, count in zip(self._all_spans(), counts, strict=True):
            if count:
                new[span.stop] = QuerySpan(at, at + count, span.positions[-count:], span.segments)
                known = {rotation: span.views[rotation] for rotation in self.rotations if rotation in span.views}
                new[span.stop].views.update(known)
                at += count
        rows = [torch.arange(stop - span.rows, stop, device=self.ids.device) for stop, span in new.items()]
        kept = torch.cat([self.slots[:0], *rows])
        return kept, replace(
            self,
            ids=self.ids[kept],
            positions=self.positions[kept],
            slots=self.slots[:0],
            spans=Spans([new[span.stop] for span in self.spans if span.stop in new]),
            probes=[_moved(probe, new) for probe in self.probes if probe.span.stop in new],
            votes=[_moved(votes, new) for votes in self.votes if votes.span.stop in new],
            tempered=[(new[span.stop], temper) for span, temper in self.tempered if span.stop in new],
            wanted=None,
            leaving=(),
            states={},
        )


_Observer = TypeVar("_Observer", Probe, Votes)


def _moved(observer: _Observer, new: Mapping[int, QuerySpan]) -> _Observer:
    """The same probe or votes, with their results so far, for rows that moved in the batch."""
    moved, span, to = copy.copy(observer), observer.span, new[observer.span.stop]
    moved.span = (
        to if span.rows == to.rows else QuerySpan(to.stop - span.rows, to.stop, span.positions, span.segments)
    )
    return moved
