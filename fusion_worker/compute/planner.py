"""Plans a prompt's prefill by its recipe: scores stale tokens, chooses those to recompute, lays out the segments."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import AttentionScores, ForwardJob, Output, ShallowScores
from fusionkv.fusion_worker.compute.plan import PrefillPlan
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Links, Prompt, PromptLayout, masked
from fusionkv.fusion_worker.select.auxiliary import Auxiliary
from fusionkv.fusion_worker.select.base import Attended, budget, choose, scores
from fusionkv.kernels.attention import Temper
from fusionkv.protos.contract.recipes import Recipe
from fusionkv.protos.contract.selectors import CachedAttention, FreshLayer, Nothing, SecondModel, Selector


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

    def plain(self, layout: PromptLayout, prompt: Prompt) -> PrefillPlan:
        """A plan that reuses nothing: every token is a row."""
        every = torch.arange(prompt.tokens)
        stale = every[: prompt.question_start] >= len(prompt.system)
        return PrefillPlan(layout, (), every, prompt.ids, stale.nonzero()[:, 0], stale)

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

    async def score(self, layout: PromptLayout, prompt: Prompt, selectors: Sequence[Selector]) -> list[Scored]:
        """Scores by selectors of equal `needs`, whose input is computed once. Scores are valid for every ratio."""
        inputs: Sequence[int] | Attended
        match selectors[0].needs:
            case Nothing():
                inputs, rows = _starts(prompt), 0
            case CachedAttention() as needs:
                inputs, rows = await self._attention(layout, prompt, needs), len(prompt.question)
            case SecondModel():
                inputs, rows = await self._auxiliary_attention(prompt), 0
            case FreshLayer():
                # Each rank scores the states that it holds.
                return await self._score_at_layer_1(layout, prompt, selectors)
        return [Scored(scores(selector, inputs), rows) for selector in selectors]

    async def fuse(
        self, layout: PromptLayout, prompt: Prompt, recipe: Recipe, ratio: float, scored: Scored | None = None
    ) -> PrefillPlan:
        """The plan that recomputes `ratio` of the context. The prompt's parts are placed and ready.

        scored: the result of `score` for the same parts; None scores them now, if the ratio leaves a choice.
        """
        stale = _stale(layout, prompt)
        stale_tokens = int(stale.sum())
        count = budget(ratio, prompt.context_tokens, stale_tokens)
        if scored is None and 0 < count < stale_tokens:
            assert recipe.select is not None
            (scored,) = await self.score(layout, prompt, [recipe.select])
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
        parts = masked(layout.parts, fresh)
        keys = tuple(segment for part, hidden in parts for segment in links.placed(part).segments(hidden))
        rows = torch.cat([chosen, torch.arange(prompt.question_start, prompt.tokens)])
        positions, ids = rows, prompt.ids[rows]
        if links.each:
            positions, order = torch.cat([links.moved(rows), links.positions]).sort()
            ids = torch.cat([ids, links.ids])[order]
        temper = None
        if recipe.attend is not None and reuses:
            low, high = len(prompt.system), prompt.question_start + len(links.ids)
            temper = Temper(low, high, recipe.attend.temperature, recipe.attend.scale)
        plan = PrefillPlan(layout, keys, positions, ids, chosen, stale, temper=temper, links=len(links.ids))
        return plan if scored is None else replace(plan, scores=scored.scores, scored_rows=scored.rows)

    async def _attention(self, layout: PromptLayout, prompt: Prompt, needs: CachedAttention) -> Attended:
        """As defined by `CachedAttention`."""
        question = torch.arange(prompt.question_start, prompt.tokens)
        output = AttentionScores(needs.of(self._model.kv.layers))
        attention = await self._run(prompt, layout, question, output)
        return Attended(attention[: prompt.question_start], _starts(prompt))

    async def _score_at_layer_1(
        self, layout: PromptLayout, prompt: Prompt, selectors: Sequence[Selector]
    ) -> list[Scored]:
        context = _stale(layout, prompt).nonzero()[:, 0]
        rows = torch.cat([context, torch.arange(prompt.question_start, prompt.tokens)])
        output = ShallowScores(tuple(selectors), torch.tensor(_starts(prompt)))
        scored = await self._run(prompt, layout, rows, output, unstored=len(context))
        return [Scored(each, len(rows)) for each in scored[:, : prompt.question_start]]

    async def _auxiliary_attention(self, prompt: Prompt) -> Attended:
        """As defined by `SecondModel`."""
        assert self._auxiliary is not None
        return Attended(await self._auxiliary.scores(prompt), _starts(prompt))

    async def _run(
        self,
        prompt: Prompt,
        layout: PromptLayout,
        positions: torch.Tensor,
        output: Output[torch.Tensor],
        unstored: int = 0,
    ) -> torch.Tensor:
        # The prefill writes its own rows over these slots.
        job = ForwardJob(prompt.ids[positions], positions, layout.fresh, layout.segments, output, unstored)
        return await self._engine.run(job)


def _starts(prompt: Prompt) -> tuple[int, ...]:
    """The first position of every chunk and of the question."""
    return (*prompt.starts[1:], prompt.question_start)


def _stale(layout: PromptLayout, prompt: Prompt) -> torch.Tensor:
    """bool [question_start]: tokens whose reused KV differs from that of full attention."""
    stale = torch.zeros(prompt.question_start, dtype=torch.bool)
    for part in layout.parts:
        if not (part.source.is_system or part.source.lossless):
            stale[part.source.position : part.source.position + len(part.source.chunk)] = True
    return stale
