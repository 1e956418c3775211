"""Answers one sample in every cell, and compares the answers with full attention's."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from fusionkv.fusion_worker.compute.planner import Planner, Scored
from fusionkv.fusion_worker.evaluate import metrics
from fusionkv.fusion_worker.evaluate.contexts import Contexts, encoded_tokens, encoding, whole
from fusionkv.fusion_worker.evaluate.examiner import Answer, Asked, Examiner, Given
from fusionkv.fusion_worker.evaluate.report.cells import NO_CONTEXT, Cell
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import PromptLayout
from fusionkv.fusion_worker.select.base import budget
from fusionkv.protos.contract.recipes import RECIPES, Recipe
from fusionkv.protos.contract.selectors import Selector

_Scorings = dict[tuple[Any, Selector | None], Scored]


@dataclass(frozen=True, slots=True)
class Tools:
    """What all trials of a model share."""

    model: Model
    loader: Loader
    planner: Planner
    examiner: Examiner


class Trial:
    """A sample, the cells in which it is answered, and its context in the pool."""

    def __init__(self, tools: Tools, asked: Asked, cells: Sequence[Cell], contexts: Contexts) -> None:
        self._tools, self._asked, self._prompt, self._contexts = tools, asked, asked.prompt, contexts
        self._cells = cells
        self._others = [cell for cell in cells if not cell.recipe.lossless]

    async def answers(self) -> list[Answer]:
        """Answers in all cells at once: recipes share encodings, scores and full attention's context."""
        full = await self._full_attention()
        scored = await self._scored(dict.fromkeys(cell.recipe for cell in self._others))
        known = [scored.get((cell.recipe.encode, cell.recipe.select)) for cell in self._others]
        answering = (self._answer(cell, full.given, one) for cell, one in zip(self._others, known, strict=True))
        answers = dict(zip(self._others, await asyncio.gather(*answering), strict=True))
        return await self._compared(full, answers)

    async def _compared(self, full: Answer, others: dict[Cell, Answer]) -> list[Answer]:
        """The answers in the order of the cells; lossless recipes have full attention's."""
        if self._asked.task.metrics:
            full.values["chunks_left_out"] = self._asked.left_out
        answers = {cell: full for cell in self._cells if cell.recipe.lossless and cell != NO_CONTEXT} | others
        for cell, answer in answers.items():
            assert answer.first is not None
            assert full.first is not None
            answer.values["agreement"] = float(answer.first.argmax() == full.first.argmax())
            answer.values["kl"] = float(metrics.kl(full.first, answer.first))
            # Of the sample's chunks, ahead of time.
            tokens = 0 if cell.recipe.lossless else encoded_tokens(self._prompt, encoding(cell.recipe))
            per_chunk = tokens / len(self._prompt.chunks)
            answer.values |= {"encoded_tokens": tokens, "encoded_tokens_per_chunk": per_chunk}
        if NO_CONTEXT in self._cells:
            answers[NO_CONTEXT] = await self._without_context(full.given)
        for answer in answers.values():
            answer.first = answer.given = None  # logits
        return [answers[cell] for cell in self._cells]

    async def _full_attention(self) -> Answer:
        """Full attention's answer. The context's KV is computed once for all questions about it."""
        one, answer = whole(self._prompt), Answer()
        async with self._contexts.placed(self._prompt, None, len(one.question) + self._asked.answer_tokens) as layout:
            plan = await self._tools.planner.fuse(layout, one, RECIPES["full_reuse"], 0.0)
            await self._tools.examiner.answer(self._asked, plan, answer)
        answer.values |= {"recomputed": one.context_tokens, "stored": 0}
        return answer

    async def _without_context(self, given: Given | None) -> Answer:
        """Answers the question without its context; returns only the scores of its text."""
        task, answer = self._asked.task, Answer()
        bare = replace(self._asked, prompt=replace(self._prompt, chunks=()))
        async with self._tools.loader.plain(bare.prompt.tokens + bare.answer_tokens) as layout:
            plan = self._tools.planner.plain(layout, bare.prompt)
            await self._tools.examiner.answer(bare, plan, answer, given)
        names = ("gold_nll", *task.metrics, *(f"{name}_full" for name in task.compared))
        return Answer({name: answer.values[name] for name in names})

    async def _answer(self, cell: Cell, given: Given | None, scored: Scored | None) -> Answer:
        """Answers in a cell. scored: what its selector found, if it has one."""
        answer = Answer()
        keep = cell.recipe.keep if cell.recipe.kept(self._prompt.context_tokens) else None
        async with self._placed(cell.recipe, cell.ratio) as layout:
            plan = await self._tools.planner.fuse(layout, self._prompt, cell.recipe, cell.ratio, scored)
            await self._tools.examiner.answer(self._asked, plan, answer, given, keep)
        return answer

    async def _scored(self, recipes: Iterable[Recipe]) -> _Scorings:
        """Computes scores once for each encoding and selector of the recipes. Equal needs share a pass."""
        first = {(recipe.encode, recipe.select): recipe for recipe in recipes if recipe.select is not None}
        passes: dict[Any, list[Recipe]] = {}
        for recipe in first.values():
            passes.setdefault((recipe.encode, recipe.needs), []).append(recipe)

        async def one(together: Sequence[Recipe]) -> list[Scored]:
            selectors = [recipe.select for recipe in together if recipe.select is not None]
            async with self._placed(together[0], 0) as layout:
                return await self._tools.planner.score(layout, self._prompt, selectors)

        by_pass = await asyncio.gather(*map(one, passes.values()))
        return {
            (recipe.encode, recipe.select): scored
            for together, all_scored in zip(passes.values(), by_pass, strict=True)
            for recipe, scored in zip(together, all_scored, strict=True)
        }

    def _placed(self, recipe: Recipe, ratio: float) -> AbstractAsyncContextManager[PromptLayout]:
        context = self._prompt.context_tokens
        computed = budget(ratio, context, context) + recipe.links * len(self._prompt.chunks)
        fresh = computed + len(self._prompt.question) + self._asked.answer_tokens + recipe.kept(context)
        return self._contexts.placed(self._prompt, encoding(recipe), fresh)
