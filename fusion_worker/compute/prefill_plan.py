"""A prompt's context as its rows will see it, and the works that compute the rows."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusionkv.fusion_worker.compute.attention import LayerState
from fusionkv.fusion_worker.compute.forward_job import ForwardJob, behind, lay_out
from fusionkv.fusion_worker.decode.sampling import Sampler
from fusionkv.fusion_worker.load.placement import PromptLayout
from fusionkv.kernels.segments import KVSegment
from fusionkv.kernels.tempered_attention import Temper


@dataclass(frozen=True, slots=True)
class AdaptiveRatio:
    """When more of the context has to be recomputed, and how that comes about.

    certain: the least probability of a next token that is not in doubt. more: gives the same prompt with more.
    """

    certain: float
    more: Callable[[], Awaitable["PrefillPlan"]]


@dataclass(slots=True)
class PrefillPlan:
    """Placed parts, and the rows to compute over them: the chosen and link tokens, the question, then the answer's
    tokens.

    seen: the parts' keys, without those that are computed anew.
    positions, ids: int64 [rows], of all rows so far, in the order of their slots; ascending.
    chosen: int64, positions of the context tokens among them, as without links. stale: bool [context and system].
    links: how many of the rows before the question are link tokens.
    scores: float32 [context and system] by which they were chosen; None when there was nothing to choose.
    scored_rows: rows that were computed for the scores alone.
    ahead: what the first rows go on from when the scores took them through layer 0.
    doubt: when what was chosen may turn out to be too little.
    temper: how the rows attend to the context, when not as usual.
    """

    placement: PromptLayout
    seen: tuple[KVSegment, ...]
    positions: torch.Tensor
    ids: torch.Tensor
    chosen: torch.Tensor
    stale: torch.Tensor
    device: torch.device
    scores: torch.Tensor | None = None
    scored_rows: int = 0
    ahead: LayerState | None = None
    temper: Temper | None = None
    doubt: AdaptiveRatio | None = None
    links: int = 0
    _gone: int = 0  # rows at the front that are no keys any more

    @property
    def context_tokens(self) -> int:
        return sum(len(part.wanted.chunk) for part in self.placement.parts if not part.wanted.is_system)

    def evict(self, seen: tuple[KVSegment, ...]) -> None:
        """From now on rows see these keys and the question's, and no chosen or link token's."""
        self.seen, self._gone, self.doubt = seen, len(self.chosen) + self.links, None

    def visible(self) -> tuple[KVSegment, ...]:
        """The keys of all there is so far."""
        own = lay_out(self.positions[self._gone :].to(self.device), behind(self.placement.fresh, self._gone))
        return (*self.seen, *own)

    def behind(self, tokens: Sequence[int]) -> "PrefillPlan":
        """The same with more tokens behind the question."""
        if not tokens:
            return self
        first = int(self.positions[-1]) + 1
        positions = torch.cat([self.positions, torch.arange(first, first + len(tokens))])
        # The new rows have not been through layer 0 as those before them may have.
        return replace(self, ids=torch.cat([self.ids, torch.tensor(tokens)]), positions=positions, ahead=None)

    def prefill(self, sampler: Sampler | None = None, logits: int = 0, votes: int = 0) -> ForwardJob:
        """The work for the chosen tokens and the question. votes: how many rows vote for what is kept."""
        return ForwardJob(
            self.ids.to(self.device),
            self.positions.to(self.device),
            self.placement.fresh,
            self.seen,
            sampler=sampler,
            logits=logits,
            ahead=self.ahead,
            temper=self.temper,
            votes=votes,
        )

    def next(self, tokens: Sequence[int], sampler: Sampler | None = None, logits: int = 0) -> ForwardJob:
        """The work for more tokens, behind all there is."""
        used, first = len(self.positions), len(self.positions) and int(self.positions[-1]) + 1
        seen = self.visible()
        positions = torch.arange(first, first + len(tokens))
        self.positions = torch.cat([self.positions, positions])
        return ForwardJob(
            torch.tensor(tokens, device=self.device),
            positions.to(self.device),
            behind(self.placement.fresh, used),
            seen,
            sampler=sampler,
            logits=logits,
            temper=self.temper,
        )
