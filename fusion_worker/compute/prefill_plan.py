"""A prefill's plan: the keys that a prompt's rows see, the rows to compute, and the steps of the engine by it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.kv_pool import behind, lay_out
from fusionkv.fusion_worker.compute.model_runner import LayerState, ReusedKV
from fusionkv.fusion_worker.compute.scheduler import ForwardJob, Result
from fusionkv.fusion_worker.decode.sampling import Sampler
from fusionkv.fusion_worker.load.placement import PromptLayout
from fusionkv.kernels.segments import KVSegment
from fusionkv.kernels.tempered_attention import Temper


@dataclass(frozen=True, slots=True)
class AdaptiveRatio:
    """When to recompute more of the context, and how.

    certain: minimum probability of the most likely next token; below it, more is recomputed. more: makes a plan of
    the same prompt that recomputes more.
    """

    certain: float
    more: Callable[[], Awaitable["PrefillPlan"]]

    def doubts(self, logits: torch.Tensor) -> torch.Tensor:
        """bool [rows]: whether no token reaches the minimum probability. logits: float32 [rows, vocabulary]."""
        return logits.softmax(-1).amax(-1) < self.certain


@dataclass(slots=True)
class PrefillPlan:
    """Loaded parts, and the rows to compute over them: chosen tokens, link tokens, the question, and then the answer.

    Attributes:
        placement: the parts, and slots for the rows.
        seen: the parts' keys, without those of recomputed tokens.
        positions, ids: int64 [rows], all rows so far, ascending, in the order of their slots.
        chosen: int64, positions without links of the context tokens to recompute.
        stale: bool [system and context tokens].
        scores: float32 [system and context tokens], by which tokens were chosen; None if there was no choice.
        scored_rows: number of rows computed only for the scores.
        ahead: the first rows after layer 0, if scoring computed them.
        depth: number of layers that chosen tokens run through; None for all layers.
        reused: with a depth, the reused KV of the chosen tokens, for the other layers.
        temper: a change of how the rows attend to the context; None for none.
        doubt: when to recompute more; None for never.
        links: number of link tokens among the rows.
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
    depth: int | None = None
    reused: ReusedKV | None = None
    temper: Temper | None = None
    doubt: AdaptiveRatio | None = None
    links: int = 0
    _evicted: int = 0  # number of first rows that are no longer visible as keys

    @property
    def context_tokens(self) -> int:
        return sum(len(part.wanted.chunk) for part in self.placement.parts if not part.wanted.is_system)

    def evict(self, seen: tuple[KVSegment, ...]) -> None:
        """Replaces the visible keys by these and the question's; those of chosen and link tokens are hidden."""
        self.seen, self._evicted, self.doubt = seen, len(self.chosen) + self.links, None

    def visible(self) -> tuple[KVSegment, ...]:
        own = lay_out(self.positions[self._evicted :].to(self.device), behind(self.placement.fresh, self._evicted))
        return (*self.seen, *own)

    def behind(self, tokens: Sequence[int]) -> "PrefillPlan":
        """The same plan with more tokens after the question."""
        if not tokens:
            return self
        first = int(self.positions[-1]) + 1
        positions = torch.cat([self.positions, torch.arange(first, first + len(tokens))])
        # The new rows have not been through layer 0, so `ahead` would not cover all rows.
        return replace(self, ids=torch.cat([self.ids, torch.tensor(tokens)]), positions=positions, ahead=None)

    def prefill(self, sampler: Sampler | None = None, logits: int = 0, votes: int = 0) -> ForwardJob:
        """The job that computes chosen tokens, link tokens and the question. Arguments are those of ForwardJob."""
        return ForwardJob(
            self.ids.to(self.device),
            self.positions.to(self.device),
            self.placement.fresh,
            self.seen,
            sampler=sampler,
            logits=logits,
            ahead=self.ahead,
            depth=self.depth,
            reused=self.reused,
            temper=self.temper,
            votes=votes,
        )

    def next(self, tokens: Sequence[int], sampler: Sampler | None = None, logits: int = 0) -> ForwardJob:
        """The job that computes more tokens after all rows so far, which are added to the plan."""
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


async def step(
    engine: Engine, plan: PrefillPlan, answer: Sequence[int], sampler: Sampler, logits: int = 0, votes: int = 0
) -> tuple[PrefillPlan, Result]:
    """Computes the token after `answer`; recomputes more of the context first if that token is uncertain.

    answer: the tokens so far; the KV of the last one is not computed yet. logits, votes: as for `ForwardJob`. Returns
    the plan that the token was computed with, and the result.
    """

    def job(sampler: Sampler | None, logits: int) -> ForwardJob:
        return plan.next(answer[-1:], sampler, logits) if answer else plan.prefill(sampler, logits, votes)

    if plan.doubt is None:
        return plan, await engine.run(job(sampler, logits))
    result = await engine.run(job(None, 1))
    assert result.logits is not None
    if plan.doubt.doubts(result.logits).any():
        plan = (await plan.doubt.more()).behind(answer)
        result = await engine.run(plan.prefill(None, 1, votes))
    assert result.logits is not None
    return plan, replace(result, token=sampler.draw(result.logits[0]))
