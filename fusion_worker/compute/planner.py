"""Plans a prompt's prefill by its recipe: scores stale tokens, chooses those to recompute, lays out the segments."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusionkv.fusion_worker.auxiliary.auxiliary import Auxiliary
from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.model_runner import LayerState, ReusedKV, Shallow
from fusionkv.fusion_worker.compute.prefill_plan import AdaptiveRatio, PrefillPlan
from fusionkv.fusion_worker.compute.scheduler import ForwardJob, Result, ShallowProbe
from fusionkv.fusion_worker.load.placement import Links, PromptLayout, masked
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.recipes.recipes import Recipe
from fusionkv.fusion_worker.select.base import (
    CachedAttention,
    ChunkPlaces,
    FreshLayer,
    Nothing,
    SecondModel,
    Selector,
    budget,
    top_k,
)
from fusionkv.fusion_worker.select.fresh_states import FreshStates
from fusionkv.kernels.segments import KVSegment
from fusionkv.kernels.tempered_attention import Temper
from fusionkv.protos.runtime.errors import FailedPrecondition


@dataclass(slots=True)
class Scored:
    """Scores of all positions before the question; the rows' states after layer 0, if scoring computed them."""

    scores: torch.Tensor
    rows: int
    shallow: Shallow | None = None


class Planner:
    """Chooses the tokens to recompute. Its jobs share steps with those of other requests."""

    def __init__(self, model: Model, engine: Engine, auxiliary: Auxiliary | None = None) -> None:
        self._model = model
        self._engine = engine
        self._auxiliary = auxiliary

    def check(self, recipe: Recipe, chunks: int) -> None:
        """Raises FailedPrecondition if the model can't follow the recipe with this many chunks."""
        if recipe.needs == FreshLayer() and self._model.kv.layers < 2:
            raise FailedPrecondition(f"{self._model.name} has one layer; {recipe.name} scores tokens at a second")
        if recipe.needs == SecondModel() and self._auxiliary is None:
            raise FailedPrecondition(
                f"{recipe.name} chooses tokens by a small second model: start the worker with --auxiliary DIRECTORY"
            )
        if recipe.keep is not None and self._model.windowed:
            raise FailedPrecondition(
                f"{self._model.name} sees a window of its context; {recipe.name} would keep tokens outside of it"
            )
        if recipe.links:
            self._check_links(recipe, chunks)
        if recipe.anchored and recipe.anchored not in self._model.anchors:
            known = ", ".join(f"+anchored({percent})" for percent in self._model.anchors)
            use = f"use {known}" if known else "it was not trained with any (models/README.md says how to)"
            raise FailedPrecondition(
                f"{self._model.name} has no anchor tokens that save {recipe.anchored}%, as {recipe.name} does: {use}"
            )

    def _check_links(self, recipe: Recipe, chunks: int) -> None:
        name, links = self._model.name, self._model.links
        each = len(links[0]) if links else 0
        if recipe.links > each:
            use = f"use +linked({each})" if each else "it was not trained with any"
            raise FailedPrecondition(
                f"{name} has {each} link tokens for a chunk; {recipe.name} takes {recipe.links}: {use}"
            )
        if chunks > len(links):
            raise FailedPrecondition(
                f"{name} has link tokens for {len(links)} chunks; {recipe.name} is asked to link {chunks}"
            )

    def plain(self, placement: PromptLayout, prompt: Prompt) -> PrefillPlan:
        """A plan that reuses nothing: every token is a row."""
        everything = torch.arange(prompt.question_start)
        stale = everything >= len(prompt.system)
        chosen = everything[stale]
        every = torch.arange(prompt.tokens)
        return PrefillPlan(placement, (), every, prompt.ids, chosen, stale, self._model.device)

    def score_early(self, prompt: Prompt, recipe: Recipe, ratio: float) -> "asyncio.Task[Scored] | None":
        """Starts scoring that needs no KV of the primary model, while that KV loads; None if the recipe has none."""
        selector = recipe.select
        if selector is None or selector.needs != SecondModel() or not 0.0 < ratio < 1.0:
            return None

        async def score() -> Scored:
            return Scored(selector.scores(await self._auxiliary_attention(prompt)), rows=0)

        task = asyncio.create_task(score())
        # If loading fails, the scores are not awaited; this marks their error as seen.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def score(
        self, placement: PromptLayout, prompt: Prompt, selectors: Sequence[Selector[Any]]
    ) -> list[Scored]:
        """Scores by selectors of equal `needs`, whose input is computed once. Scores are valid for every ratio."""
        seen: ChunkPlaces | torch.Tensor
        match selectors[0].needs:
            case Nothing():
                seen, rows = _places(placement, prompt), 0
            case CachedAttention() as needs:
                seen, rows = await self._attention(placement, prompt, needs), len(prompt.question)
            case SecondModel():
                seen, rows = await self._auxiliary_attention(prompt), 0
            case FreshLayer():
                # Each rank scores the states that it holds.
                return await self._score_at_layer_1(placement, prompt, selectors)
        return [Scored(selector.scores(seen), rows) for selector in selectors]

    async def fuse(
        self, placement: PromptLayout, prompt: Prompt, recipe: Recipe, ratio: float, scored: Scored | None = None
    ) -> PrefillPlan:
        """The plan that recomputes `ratio` of the context. The prompt's parts are placed and ready.

        scored: the result of `score` for the same parts; None scores them now, if the ratio leaves a choice.
        """
        if recipe.adapt is None or not 0.0 < ratio < 1.0:
            return await self._fuse(placement, prompt, recipe, ratio, scored)
        stale = int(_stale(placement, prompt).sum())
        if scored is None and 0 < budget(ratio, prompt.context_tokens, stale) < stale:
            scored = await self._score(placement, prompt, recipe)
        first = await self._fuse(placement, prompt, recipe, ratio * recipe.adapt.first, scored)

        async def more() -> PrefillPlan:
            fused = await self._fuse(placement, prompt, recipe, ratio, scored)
            # Scoring was computed once for both plans.
            again = scored.rows if scored is not None else 0
            fused.scored_rows += len(first.ids) + max(0, first.scored_rows - again)
            return fused

        first.doubt = AdaptiveRatio(recipe.adapt.certain, more)
        return first

    async def _fuse(
        self, placement: PromptLayout, prompt: Prompt, recipe: Recipe, ratio: float, scored: Scored | None
    ) -> PrefillPlan:
        stale = _stale(placement, prompt)
        stale_tokens = int(stale.sum())
        count = budget(ratio, prompt.context_tokens, stale_tokens)
        if count in (0, stale_tokens):
            scored = None
            chosen = stale.nonzero()[:, 0] if count else torch.empty(0, dtype=torch.int64)
        else:
            scored = scored or await self._score(placement, prompt, recipe)
            choose = top_k if recipe.choose is None else recipe.choose.choose
            chosen = choose(scored.scores, stale, count)
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
        fused = PrefillPlan(placement, seen, positions, ids, chosen, stale, self._model.device)
        fused.links = len(links.ids)
        layers = self._model.kv.layers
        if reuses and len(chosen) and (depth := max(1, round(recipe.depth * layers))) < layers:
            fused.depth, fused.reused = depth, _hidden(seen, self._model.device)
        if recipe.attend is not None and reuses:
            low, high = len(prompt.system), prompt.question_start + fused.links
            fused.temper = Temper(low, high, recipe.attend.temperature, recipe.attend.scale)
        if scored is not None:
            fused.scores, fused.scored_rows = scored.scores, scored.rows
            # SnapKV's votes need every layer, and rows that continue from layer 1 skip layer 0. Link tokens have no
            # states after layer 0.
            can_continue = recipe.keep is None and not fused.links
            if recipe.from_layer_1 and can_continue and scored.shallow is not None:
                fused.ahead = _continued(scored.shallow, stale, chosen)
        return fused

    async def _score(self, placement: PromptLayout, prompt: Prompt, recipe: Recipe) -> Scored:
        assert recipe.select is not None
        return (await self.score(placement, prompt, [recipe.select]))[0]

    async def _attention(self, placement: PromptLayout, prompt: Prompt, needs: CachedAttention) -> torch.Tensor:
        """float32 [question_start], as defined by `CachedAttention`."""
        question = torch.arange(prompt.question_start, prompt.tokens)
        layers = needs.of(self._model.kv.layers)
        result = await self._run(prompt, placement, question, layers)
        assert result.scores is not None
        return result.scores[: prompt.question_start].cpu()

    async def _score_at_layer_1(
        self, placement: PromptLayout, prompt: Prompt, selectors: Sequence[Selector[FreshStates]]
    ) -> list[Scored]:
        context = _stale(placement, prompt).nonzero()[:, 0]
        starts = torch.tensor([*prompt.starts[1:], prompt.question_start], device=self._model.device)
        rows = torch.cat([context, torch.arange(prompt.question_start, prompt.tokens)])
        probe = ShallowProbe(tuple(selectors), starts)
        result = await self._run(prompt, placement, rows, probe, unstored=len(context))
        assert result.scores is not None
        found = result.scores[:, : prompt.question_start].cpu()
        return [Scored(each, len(rows), result.shallow) for each in found]

    async def _auxiliary_attention(self, prompt: Prompt) -> torch.Tensor:
        """float32 [question_start], as defined by `SecondModel`."""
        assert self._auxiliary is not None
        return await self._auxiliary.scores(prompt)

    async def _run(
        self,
        prompt: Prompt,
        placement: PromptLayout,
        positions: torch.Tensor,
        probe: frozenset[int] | ShallowProbe,
        unstored: int = 0,
    ) -> Result:
        device = self._model.device
        depth = self._model.kv.layers if isinstance(probe, ShallowProbe) else max(probe) + 1
        return await self._engine.run(
            ForwardJob(
                ids=prompt.ids[positions].to(device),
                positions=positions.to(device),
                # The prefill itself writes the question's keys again, to the same slots.
                runs=placement.fresh,
                seen=placement.segments,
                unstored=unstored,
                probe=probe,
                depth=depth if depth < self._model.kv.layers else None,
            )
        )


def _places(placement: PromptLayout, prompt: Prompt) -> ChunkPlaces:
    chunks = [part.wanted for part in placement.parts if not part.wanted.is_system]
    starts = tuple(wanted.position for wanted in chunks)
    stops = tuple(wanted.position + len(wanted.chunk) for wanted in chunks)
    return ChunkPlaces(starts, stops, prompt.question_start)


def _stale(placement: PromptLayout, prompt: Prompt) -> torch.Tensor:
    """bool [question_start]: tokens whose reused KV differs from that of full attention."""
    stale = torch.zeros(prompt.question_start, dtype=torch.bool)
    for part in placement.parts:
        if not (part.wanted.is_system or part.wanted.lossless):
            stale[part.wanted.position : part.wanted.position + len(part.wanted.chunk)] = True
    return stale


def _hidden(seen: Sequence[KVSegment], device: torch.device) -> ReusedKV:
    """The reused KV of the chosen tokens, which the segments hide, in the order of positions."""
    slots, shifts = list[torch.Tensor](), list[torch.Tensor]()
    for segment in seen:
        if segment.hidden is not None:
            hidden = segment.hidden.nonzero()[:, 0]
            slots.append(segment.start + hidden)
            shifts.append(torch.full_like(hidden, segment.shift))
    return ReusedKV(torch.cat(slots).to(device), torch.cat(shifts).to(device))


def _continued(shallow: Shallow, stale: torch.Tensor, chosen: torch.Tensor) -> LayerState:
    """States of the chosen tokens and the question; `shallow` has those of all stale tokens and the question."""
    row = stale.cumsum(0) - 1
    question = torch.arange(int(stale.sum()), len(shallow.hidden))
    return shallow.of(torch.cat([row[chosen], question]).to(shallow.hidden.device))
