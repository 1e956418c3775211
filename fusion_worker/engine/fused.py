"""A prompt's context as its rows will see it, and the works that compute the rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fusionkv.fusion_worker.attention import Ahead
from fusionkv.fusion_worker.engine.kv_pool import Run
from fusionkv.fusion_worker.engine.placement import Placement
from fusionkv.fusion_worker.engine.sampling import Sampler
from fusionkv.fusion_worker.engine.work import Work, lay_out, slots_of
from fusionkv.kernels.segments import Segment
from fusionkv.kernels.tempered_attention import Temper


@dataclass(slots=True)
class Fused:
    """Placed parts, and the rows to compute over them: the chosen tokens, the question, then the answer's tokens.

    seen: the parts' keys, without those that are computed anew.
    positions, ids: int64 [rows], of all rows so far, in the order of their slots.
    chosen: int64, positions of the context tokens among them. stale: bool [context and system].
    scores: float32 [context and system] by which they were chosen; None when there was nothing to choose.
    scored_rows: rows that were computed for the scores alone.
    ahead: what the first rows go on from when the scores took them through layer 0.
    temper: how the rows attend to the context, when not as usual.
    """

    placement: Placement
    seen: tuple[Segment, ...]
    positions: torch.Tensor
    ids: torch.Tensor
    chosen: torch.Tensor
    stale: torch.Tensor
    device: torch.device
    scores: torch.Tensor | None = None
    scored_rows: int = 0
    ahead: Ahead | None = None
    temper: Temper | None = None
    slots: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.slots = slots_of(self.placement.fresh)

    def prefill(self, sampler: Sampler | None = None, logits: int = 0) -> Work:
        """The work for the chosen tokens and the question."""
        return Work(
            self.ids.to(self.device),
            self.positions.to(self.device),
            self.placement.fresh,
            self.seen,
            sampler=sampler,
            logits=logits,
            ahead=self.ahead,
            temper=self.temper,
        )

    def next(self, tokens: Sequence[int], sampler: Sampler | None = None, logits: int = 0) -> Work:
        """The work for more tokens, behind all there is."""
        used, first = len(self.positions), int(self.positions[-1]) + 1
        own = lay_out(self.positions.to(self.device), self.placement.fresh)
        positions = torch.arange(first, first + len(tokens))
        self.positions = torch.cat([self.positions, positions])
        return Work(
            torch.tensor(tokens, device=self.device),
            positions.to(self.device),
            tuple(Run(int(slot), 1) for slot in self.slots[used : used + len(tokens)]),
            (*self.seen, *own),
            sampler=sampler,
            logits=logits,
            temper=self.temper,
        )
