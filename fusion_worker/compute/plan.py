"""The plan of a prompt's prefill: its parts in the pool, and the rows to compute over them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusionkv.fusion_worker.compute.jobs import ForwardJob, Output, T_co
from fusionkv.fusion_worker.pool.slots import behind, lay_out
from fusionkv.fusion_worker.prompt import PromptLayout
from fusionkv.kernels.attention import Temper
from fusionkv.kernels.segments import KVSegment


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Loaded parts, and the rows to compute over them: chosen tokens, link tokens, the question, and then the answer.

    Attributes:
        layout: the parts, and slots for the rows.
        keys: the parts' keys, without those of recomputed tokens.
        positions, ids: int64 [rows], all rows so far, ascending, in the order of their slots.
        chosen: int64, positions without links of the context tokens to recompute.
        stale: bool [system and context tokens].
        scores: float32 [system and context tokens], by which tokens were chosen; None if there was no choice.
        scored_rows: number of rows computed only for the scores.
        temper: a change of how the rows attend to the context; None for none.
        links: number of link tokens among the rows.
        evicted: number of first rows that are no longer visible as keys.
    """

    layout: PromptLayout
    keys: tuple[KVSegment, ...]
    positions: torch.Tensor
    ids: torch.Tensor
    chosen: torch.Tensor
    stale: torch.Tensor
    scores: torch.Tensor | None = None
    scored_rows: int = 0
    temper: Temper | None = None
    links: int = 0
    evicted: int = 0

    @property
    def context_tokens(self) -> int:
        return sum(len(part.source.chunk) for part in self.layout.parts if not part.source.is_system)

    @property
    def lossless_tokens(self) -> int:
        """Context tokens whose KV equals that of full attention; 0 if nothing is reused."""
        system = sum(len(part.source.chunk) for part in self.layout.parts if part.source.is_system)
        return len(self.stale) - system - int(self.stale.sum()) if self.layout.parts else 0

    def visible(self) -> tuple[KVSegment, ...]:
        """The keys that a row after all rows so far sees."""
        return (*self.keys, *lay_out(self.positions[self.evicted :], behind(self.layout.fresh, self.evicted)))

    def evict(self, keys: tuple[KVSegment, ...]) -> "PrefillPlan":
        """The plan with these keys in place of the parts' keys and of those of chosen and link tokens."""
        return replace(self, keys=keys, evicted=len(self.chosen) + self.links)

    def followed_by(self, tokens: Sequence[int]) -> "PrefillPlan":
        """The plan with more tokens after all rows so far."""
        if not tokens:
            return self
        positions = torch.cat([self.positions, self._next_positions(len(tokens))])
        return replace(self, ids=torch.cat([self.ids, torch.tensor(tokens)]), positions=positions)

    def prefill(self, output: Output[T_co]) -> ForwardJob[T_co]:
        """The job that computes all rows."""
        return ForwardJob(self.ids, self.positions, self.layout.fresh, self.keys, output, temper=self.temper)

    def next(self, tokens: Sequence[int], output: Output[T_co]) -> ForwardJob[T_co]:
        """The job that computes more tokens after all rows so far, which have been computed."""
        return ForwardJob(
            torch.tensor(tokens),
            self._next_positions(len(tokens)),
            behind(self.layout.fresh, len(self.positions)),
            self.visible(),
            output,
            temper=self.temper,
        )

    def _next_positions(self, count: int) -> torch.Tensor:
        first = int(self.positions[-1]) + 1 if len(self.positions) else 0
        return torch.arange(first, first + count)
