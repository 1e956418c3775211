"""Plans a prompt's prefill by its recipe: scores stale tokens, chooses those to recompute, lays out the segments."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.kv_pool import behind, lay_out
from fusionkv.fusion_worker.compute.scheduler import ForwardJob, Result, ShallowProbe
from fusionkv.fusion_worker.decode.sampling import Sampler
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Links, Prompt, PromptLayout, masked
from fusionkv.fusion_worker.select.auxiliary import Auxiliary
from fusionkv.fusion_worker.select.base import budget, choose, scores
from fusionkv.kernels.attention import Temper
from fusionkv.kernels.segments import KVSegment
from fusionkv.protos.contract.recipes import Recipe
from fusionkv.protos.contract.selectors import CachedAttention, FreshLayer, Nothing, SecondModel, Selector


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
        temper: a change of how the rows attend to the context; None for none.
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
    temper: Temper | None = None
    links: int = 0
    _evicted: int = 0  # number of first rows that are no longer visible as keys

    @property
    def context_tokens(self) -> int:
        return sum(len(part.wanted.chunk) for part in self.placement.parts if not part.wanted.is_system)

    def evict(self, seen: tuple[KVSegment, ...]) -> None:
        """Replaces the visible keys by these and the question's; those of chosen and link tokens are hidden."""
        self.seen, self._evicted = seen, len(self.chosen) + self.links

    def visible(self) -> tuple[KVSegment, ...]:
        own = lay_out(self.positions[self._evicted :].to(self.device), behind(self.placement.fresh, self._evicted))
        return (*self.seen, *own)

    def behind(self, tokens: Sequence[int]) -> "PrefillPlan":
        """The same plan with more tokens after the question."""
        if not tokens:
            return self
        first = int(self.positions[-1]) + 1
        positions = torch.cat([self.positions, torch.arange(first, first + len(tokens))])
        return replace(self, ids=torch.cat([self.ids, torch.tensor(tokens)]), positions=positions)

    def prefill(self, sampler: Sampler | None = None, logits: int = 0, votes: int = 0) -> ForwardJob:
        """The job that computes chosen tokens, link tokens and the question. Arguments are those of ForwardJob."""
        return ForwardJob(
            self.ids.to(self.device),
            self.positions.to(self.device),
            self.placement.fresh,
            self.seen,
            sampler=sampler,
            logits=logits,
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


class Scored(NamedTuple):
    """Scores of all positions before the question. rows: number of rows computed for them."""

    scores: torch.Tensor
    rows: int


class Planner:
    """Chooses the tokens to recompute. Its jobs share steps with those of other requests."""

    def __init__(self, model: Model, engine: Engine, auxiliary: Auxiliary | None = None) -> None:
        self._model = model
        self._engine = engine
        self._auxiliary = auxiliary

    def plain(self, placement: PromptLayout, prompt: Prompt) -> PrefillPlan:
        """A plan that reuses nothing: every token is a row."""
        every = torch.arange(prompt.tokens)
        stale = every[: prompt.question_start] >= len(prompt.system)
        return PrefillPlan(placement, (), every, prompt.ids, stale.nonzero()[:, 0], stale, self._model.device)

    def score_early(self, prompt: Prompt, recipe: Recipe, ratio: float) -> "asyncio.Task[Scored] | None":
        """Starts scoring that needs no KV of the primary model, while that KV loads; None if the recipe has none."""
        selector = recipe.select
        if selector is None or selector.needs != SecondModel() or not 0.0 < ratio < 1.0:
            return None

        async def score() -> Scored:
            return Scored(scores(selector, await self._auxiliary_attention(prompt)), rows=0)

        task = asyncio.create_task(score())
        # If loading fails, the scores are not awaited; this marks their error as seen.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def score(self, placement: PromptLayout, prompt: Prompt, selectors: Sequence[Selector]) -> list[Scored]:
        """Scores by selectors of equal `needs`, whose input is computed once. Scores are valid for every ratio."""
        seen: Sequence[int] | torch.Tensor
        match selectors[0].needs:
            case Nothing():
                seen, rows = (*prompt.starts[1:], prompt.question_start), 0
            case CachedAttention() as needs:
                seen, rows = await self._attention(placement, prompt, needs), len(prompt.question)
            case SecondModel():
                seen, rows = await self._auxiliary_attention(prompt), 0
            case FreshLayer():
                # Each rank scores the states that it holds.
                return await self._score_at_layer_1(placement, prompt, selectors)
        return [Scored(scores(selector, seen), rows) for selector in selectors]

    async def fuse(
        self, placement: PromptLayout, prompt: Prompt, recipe: Recipe, ratio: float, scored: Scored | None = None
    ) -> PrefillPlan:
        """The plan that recomputes `ratio` of the context. The prompt's parts are placed and ready.

        scored: the result of `score` for the same parts; None scores them now, if the ratio leaves a choice.
        """
        stale = _stale(placement, prompt)
        stale_tokens = int(stale.sum())
        count = budget(ratio, prompt.context_tokens, stale_tokens)
        if scored is None and 0 < count < stale_tokens:
            assert recipe.select is not None
            (scored,) = await self.score(placement, prompt, [recipe.select])
        if count in (0, stale_tokens):
            scored, chosen = None, stale.nonzero()[:count, 0]
        else:
            assert scored is not None
            chosen = choose(recipe.choose, scored.scores, stale, count)
        fresh = torch.zeros_like(stale)
        fresh[chosen] = True
        # With no stale token left, every recipe is full attention.
        reuses = len(chosen) < stale_tokens
        links = Links.behind(prompt, self._model.links, recipe.links if reuses else 0)
        parts = masked(placement.parts, fresh, self._model.device)
        seen = tuple(s for part, hidden in parts for s in links.placed(part).segments(hidden))
        rows = torch.cat([chosen, torch.arange(prompt.question_start, prompt.tokens)])
        positions, ids = rows, prompt.ids[rows]
        if links.each:
            positions, order = torch.cat([links.moved(rows), links.positions]).sort()
            ids = torch.cat([ids, links.ids])[order]
        plan = PrefillPlan(placement, seen, positions, ids, chosen, stale, self._model.device)
        plan.links = len(links.ids)
        if recipe.attend is not None and reuses:
            low, high = len(prompt.system), prompt.question_start + plan.links
            plan.temper = Temper(low, high, recipe.attend.temperature, recipe.attend.scale)
        if scored is not None:
            plan.scores, plan.scored_rows = scored.scores, scored.rows
        return plan

    async def _attention(self, placement: PromptLayout, prompt: Prompt, needs: CachedAttention) -> torch.Tensor:
        """float32 [question_start], as defined by `CachedAttention`."""
        question = torch.arange(prompt.question_start, prompt.tokens)
        layers = needs.of(self._model.kv.layers)
        result = await self._run(prompt, placement, question, probe=layers)
        assert result.scores is not None
        return result.scores[: prompt.question_start]

    async def _score_at_layer_1(
        self, placement: PromptLayout, prompt: Prompt, selectors: Sequence[Selector]
    ) -> list[Scored]:
        context = _stale(placement, prompt).nonzero()[:, 0]
        starts = torch.tensor([*prompt.starts[1:], prompt.question_start], device=self._model.device)
        rows = torch.cat([context, torch.arange(prompt.question_start, prompt.tokens)])
        probe = ShallowProbe(tuple(selectors), starts)
        result = await self._run(prompt, placement, rows, shallow=probe, unstored=len(context))
        assert result.scores is not None
        found = result.scores[:, : prompt.question_start]
        return [Scored(each, len(rows)) for each in found]

    async def _auxiliary_attention(self, prompt: Prompt) -> torch.Tensor:
        """float32 [question_start], as defined by `SecondModel`."""
        assert self._auxiliary is not None
        return await self._auxiliary.scores(prompt)

    async def _run(
        self,
        prompt: Prompt,
        placement: PromptLayout,
        positions: torch.Tensor,
        probe: frozenset[int] = frozenset(),
        shallow: ShallowProbe | None = None,
        unstored: int = 0,
    ) -> Result:
        device = self._model.device
        return await self._engine.run(
            ForwardJob(
                ids=prompt.ids[positions].to(device),
                positions=positions.to(device),
                # The prefill writes its own rows over these slots.
                runs=placement.fresh,
                seen=placement.segments,
                unstored=unstored,
                probe=probe,
                shallow=shallow,
            )
        )


def _stale(placement: PromptLayout, prompt: Prompt) -> torch.Tensor:
    """bool [question_start]: tokens whose reused KV differs from that of full attention."""
    stale = torch.zeros(prompt.question_start, dtype=torch.bool)
    for part in placement.parts:
        if not (part.wanted.is_system or part.wanted.lossless):
            stale[part.wanted.position : part.wanted.position + len(part.wanted.chunk)] = True
    return stale
