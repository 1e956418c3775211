"""Measures cells over a block of samples, in process with the real engine, many samples at a time."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import torch

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.kv_pool import KVPool, PooledChunk, pool_size, slots_of
from fusionkv.fusion_worker.compute.planner import Planner, Scored
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.evaluate import metrics
from fusionkv.fusion_worker.evaluate.contexts import (
    Contexts,
    Encoding,
    deviation,
    encoded_tokens,
    encoding,
    encodings,
    hold,
    whole,
)
from fusionkv.fusion_worker.evaluate.data.neighbours import Neighbours
from fusionkv.fusion_worker.evaluate.data.prompts import Prompter
from fusionkv.fusion_worker.evaluate.data.samples import Block, Sample, Task
from fusionkv.fusion_worker.evaluate.examiner import Answer, Asked, Examiner, Given, clock, together
from fusionkv.fusion_worker.evaluate.report.cells import NO_CONTEXT, Cell, Measured
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.load.passages import TOKENS
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Prompt, PromptLayout
from fusionkv.fusion_worker.quality import explain
from fusionkv.fusion_worker.select.auxiliary import Auxiliary
from fusionkv.fusion_worker.select.base import budget
from fusionkv.protos.contract.capabilities import check_usable
from fusionkv.protos.contract.recipes import RECIPES, Isolated, Primed, Recipe, SimilarityGuided
from fusionkv.protos.contract.selectors import Selector, SnapKV
from fusionkv.protos.runtime.errors import ResourceExhausted

_Answered = tuple[Answer, dict[Cell, dict[str, float]]]
_Scorings = dict[tuple[Any, Selector | None], Scored]
# Maximum concurrent groups of samples: enough rows for full steps of the engine.
_MAX_GROUPS = 8
# The same if neighbours come from a whole file, so that the pool has room to keep them for the next samples: all of
# them only if it holds the file's KV.
_MAX_GROUPS_WITH_LIBRARY = 2
_MAX_DEVIATIONS = 1024
log = logging.getLogger(__name__)


class Runner:
    """Measures with one model, pool and engine. Create and use it inside one event loop."""

    def __init__(
        self,
        model: Model,
        config: WorkerConfig,
        chunk_tokens: int,
        auxiliary: Model | None = None,
    ) -> None:
        self._model = model
        # No answers are streamed, so steps need not be shorter during decoding.
        config = replace(config, max_mixed_tokens=config.max_step_tokens)
        self._pool = KVPool.of(model.kv, pool_size(config.pool_bytes, model), config.page_tokens, model.device)
        self._engine = Engine(model, self._pool, config)
        self._loader = Loader(config, model, self._pool, self._engine, None)
        self._auxiliary = Auxiliary(config, model, auxiliary, None) if auxiliary is not None else None
        self._planner = Planner(model, self._engine, self._auxiliary)
        self._examiner = Examiner(model, self._pool, self._engine)
        self._prompter = Prompter(model, chunk_tokens)
        self._neighbours = Neighbours(model.max_tokens, self._prompter)
        self._deviations: dict[tuple[tuple[bytes, int], ...], dict[str, float]] = {}
        self._restored: dict[bytes, PooledChunk] = {}

    async def close(self) -> None:
        if self._auxiliary is not None:
            await self._auxiliary.close()
        await self._loader.close()
        self._engine.close()

    async def measure(self, block: Block, cells: Sequence[Cell], timed: bool, picture: bool) -> list[Measured]:
        """Measures cells over a block's samples. Returns the results in the order of `cells`.

        Args:
            timed: whether the first sample runs alone, one cell after another, and is timed; others run concurrently.
            picture: whether to keep the chosen tokens of the first sample, if it is timed.

        Raises:
            ResourceExhausted: a group of samples does not fit the pool.
            FailedPrecondition: the model can't follow a recipe.
        """
        task = block.task
        asked = [self._ask(task, sample) for sample in block.samples]
        described = self._model.described(self._auxiliary is not None)
        for cell in cells:
            check_usable(cell.recipe, max(len(a.prompt.chunks) for a in asked), described)
        groups = [asked[i : i + task.group] for i in range(0, len(asked), task.group)]
        slots = asyncio.Semaphore(self._at_once(task, groups, cells))

        async def one(group: list[Asked], alone: bool) -> list[list[Answer]]:
            async with slots:
                return await self._group(group, cells, alone, picture)

        # A timed sample runs without concurrent ones.
        first = [await one(groups.pop(0), True)] if timed else []
        others = await asyncio.gather(*(one(group, False) for group in groups))
        answers = [answer for group in (*first, *others) for answer in group]
        self._pool.check_integrity(idle=True)
        return [together([of_sample[i] for of_sample in answers]) for i in range(len(cells))]

    def _ask(self, task: Task, sample: Sample) -> Asked:
        expected = self._prompter.expected(sample, task.chat)
        prompt, left_out = self._prompter.prompt(sample, task.chat, max(task.max_tokens, len(expected) + 1))
        return Asked(task, sample, prompt, expected, left_out)

    def _at_once(self, task: Task, groups: Sequence[Sequence[Asked]], cells: Sequence[Cell]) -> int:
        """How many groups fit the pool, besides one request's own slots, so that no request waits forever."""
        prompts = [asked.prompt for group in groups for asked in group]
        # Each encoding, and the whole context for full attention.
        ways = 1 + len({*encodings(cells), Isolated()})
        held = ways * task.group * max(sum(map(self._pool.slots_for, map(len, p.parts))) for p in prompts)
        links = sum(map(len, self._model.links))
        spare = self._pool.slots_for(
            max(a.prompt.tokens + a.answer_tokens for group in groups for a in group) + links
        )
        spare += self._beside(task, encodings(cells))
        if held + spare > self._pool.capacity:
            raise ResourceExhausted(
                f"{task.name}: {task.group} samples need {held + spare} tokens of KV and the pool holds "
                f"{self._pool.capacity}: raise pool_bytes to {(held + spare) * self._model.kv.token_bytes}"
            )
        limit = _MAX_GROUPS if task.library is None else _MAX_GROUPS_WITH_LIBRARY
        return max(1, min(limit, (self._pool.capacity - spare) // held))

    def _beside(self, task: Task, encodes: Sequence[Encoding]) -> int:
        """Slots of the primers, and of the neighbours that a chunk is encoded after, if they are not in its group."""
        primers = 2 * self._pool.slots_for(TOKENS) if Primed() in encodes else 0
        count = max((encode.neighbours for encode in encodes if isinstance(encode, SimilarityGuided)), default=0)
        if task.library is None or not count:
            return primers
        sizes = (self._pool.slots_for(len(chunk)) for chunk in self._neighbours.among(task.library, ()).chunks)
        return primers + sum(sorted(sizes)[-count:])

    async def _group(
        self,
        group: Sequence[Asked],
        cells: Sequence[Cell],
        alone: bool,
        picture: bool,
    ) -> list[list[Answer]]:
        prompts = [asked.prompt for asked in group]
        library = group[0].task.library
        ways = encodings(cells)
        about = (self._loader, self._neighbours, library, prompts, ways, self._restored)
        async with hold(*about) as contexts:
            done = []
            if alone:
                done.append(await self._sample(group[0], cells, contexts, True, picture))
            rest = (self._sample(asked, cells, contexts, False, False) for asked in group[len(done) :])
            return [*done, *await asyncio.gather(*rest)]

    async def _sample(
        self, asked: Asked, cells: Sequence[Cell], contexts: Contexts, alone: bool, picture: bool
    ) -> list[Answer]:
        """Measures every cell of a sample; full attention first, with which the others are compared."""
        answering = self._plain(asked, cells, contexts) if alone else self._full_attention(asked, cells, contexts)
        full, away = await answering
        assert full.first is not None
        if asked.task.metrics:
            full.values["chunks_left_out"] = asked.left_out

        ratios: dict[Recipe, list[float]] = {}
        for cell in cells:
            if not cell.recipe.lossless:
                ratios.setdefault(cell.recipe, []).append(cell.ratio)
        answers = {cell: full for cell in cells if cell.recipe.lossless and cell != NO_CONTEXT}
        if alone:
            for cell in cells:
                if not cell.recipe.lossless:
                    answers[cell] = await self._alone(asked, cell, contexts, full.given, picture)
        else:
            scored = await self._scored(asked, ratios, contexts)
            about = (asked, contexts, full.given)
            recipes = (self._recipe(*about, r, ratios[r], scored.get((r.encode, r.select))) for r in ratios)
            for measured in await asyncio.gather(*recipes):
                answers |= measured
            full.seconds = {}
        for cell, answer in answers.items():
            assert answer.first is not None
            answer.values["agreement"] = float(answer.first.argmax() == full.first.argmax())
            answer.values["kl"] = float(metrics.kl(full.first, answer.first))
            answer.values |= self._encoded(asked, cell) | away.get(cell, {})
        if NO_CONTEXT in cells:
            answers[NO_CONTEXT] = await self._without_context(asked, full.given)
        for answer in answers.values():
            answer.first = answer.given = None  # logits
        return [answers[cell] for cell in cells]

    async def _plain(self, asked: Asked, cells: Sequence[Cell], contexts: Contexts) -> _Answered:
        """As `_full_attention`, but with every token a row, as in a worker."""
        prompt, answer = asked.prompt, Answer()
        async with self._loader.plain(prompt.tokens + asked.answer_tokens) as layout:
            await self._examiner.answer(asked, self._planner.plain(layout, prompt), answer)
            return answer, await self._away(asked, cells, contexts, slots_of(layout.fresh))

    async def _full_attention(self, asked: Asked, cells: Sequence[Cell], contexts: Contexts) -> _Answered:
        """Full attention's answer, and the KV deviation of cells that recompute nothing.

        The context's KV is computed once for all questions about it.
        """
        one, answer = whole(asked.prompt), Answer()
        async with contexts.whole(asked.prompt, len(one.question) + asked.answer_tokens) as layout:
            plan = await self._planner.fuse(layout, one, RECIPES["full_reuse"], 0.0)
            await self._examiner.answer(asked, plan, answer, timed=False)
            answer.values |= {"recomputed": one.context_tokens, "stored": 0}
            slots = [slots_of(part.pooled.runs)[: len(part.source.chunk)] for part in layout.parts]
            return answer, await self._away(asked, cells, contexts, torch.cat(slots))

    async def _away(
        self, asked: Asked, cells: Sequence[Cell], contexts: Contexts, full: torch.Tensor
    ) -> dict[Cell, dict[str, float]]:
        """The KV deviation of cells that recompute nothing. full: slots of full attention's KV."""
        away = {}
        for cell in cells:
            if not cell.recipe.lossless and cell.ratio == 0:
                async with contexts.placed(asked.prompt, encoding(cell.recipe), 0) as reused:
                    away[cell] = self._deviation(reused, full)
        return away

    def _deviation(self, reused: PromptLayout, full: torch.Tensor) -> dict[str, float]:
        """As `deviation`, cached for all questions about a context and all recipes with the same encoding."""
        parts = tuple((part.source.key, part.source.position) for part in reused.parts)
        if parts not in self._deviations:
            if len(self._deviations) >= _MAX_DEVIATIONS:
                self._deviations.clear()
            self._deviations[parts] = deviation(self._pool.kv, self._model.rotations, reused, full)
        return self._deviations[parts]

    def _encoded(self, asked: Asked, cell: Cell) -> dict[str, float]:
        """Tokens encoded ahead of time for the sample's chunks."""
        recipe = cell.recipe
        tokens = 0 if recipe.lossless else encoded_tokens(asked.prompt, encoding(recipe))
        return {"encoded_tokens": tokens, "encoded_tokens_per_chunk": tokens / len(asked.prompt.chunks)}

    async def _without_context(self, asked: Asked, given: Given | None) -> Answer:
        """Answers the question without its context; returns only the scores of its text."""
        bare, answer = replace(asked, prompt=replace(asked.prompt, chunks=())), Answer()
        async with self._loader.plain(bare.prompt.tokens + bare.answer_tokens) as layout:
            await self._examiner.answer(bare, self._planner.plain(layout, bare.prompt), answer, given, timed=False)
        names = ("gold_nll", *asked.task.metrics, *(f"{name}_full" for name in asked.task.compared))
        return Answer({name: answer.values[name] for name in names})

    async def _alone(
        self, asked: Asked, cell: Cell, contexts: Contexts, given: Given | None, picture: bool
    ) -> Answer:
        """Measures a cell with times, with the same steps as in a worker.

        picture: whether to keep the tokens of every chunk, the chosen ones, and scores as ranks from 0 to 1, for
        drawing (FusionRAG, fig. 8).
        """
        answer = Answer()
        async with self._placed(asked, cell.recipe, cell.ratio, contexts) as layout:
            with clock(answer, "select"):
                plan = await self._planner.fuse(layout, asked.prompt, cell.recipe, cell.ratio)
            await self._examiner.answer(asked, plan, answer, given, _keep(cell.recipe, asked.prompt))
        if picture:
            chosen = zip(asked.prompt.chunks, explain.chosen(asked.prompt, plan), strict=True)
            chunks = [
                {
                    "tokens": explain.texts(self._model.tokenizer, c.ids),
                    "chosen": marks,
                    "scores": s or [0.0] * len(c),
                }
                for c, (marks, s) in chosen
            ]
            sample = asked.sample
            answer.picture = {"question": sample.question.strip(), "answers": [*sample.answers], "chunks": chunks}
        return answer

    async def _scored(self, asked: Asked, recipes: Iterable[Recipe], contexts: Contexts) -> _Scorings:
        """Computes scores once for each encoding and selector of the recipes. Equal needs share a pass."""
        first = {(recipe.encode, recipe.select): recipe for recipe in recipes if recipe.select is not None}
        passes: dict[Any, list[Recipe]] = {}
        for recipe in first.values():
            passes.setdefault((recipe.encode, recipe.needs), []).append(recipe)

        async def one(together: Sequence[Recipe]) -> list[Scored]:
            selectors = [recipe.select for recipe in together if recipe.select is not None]
            async with self._placed(asked, together[0], 0, contexts) as layout:
                return await self._planner.score(layout, asked.prompt, selectors)

        by_pass = await asyncio.gather(*map(one, passes.values()))
        return {
            (recipe.encode, recipe.select): scored
            for together, all_scored in zip(passes.values(), by_pass, strict=True)
            for recipe, scored in zip(together, all_scored, strict=True)
        }

    async def _recipe(
        self,
        asked: Asked,
        contexts: Contexts,
        given: Given | None,
        recipe: Recipe,
        ratios: Sequence[float],
        scored: Scored | None,
    ) -> dict[Cell, Answer]:
        """Measures a recipe's cells, with shared scores."""

        prompt = asked.prompt

        async def one(ratio: float) -> Answer:
            answer = Answer()
            async with self._placed(asked, recipe, ratio, contexts) as layout:
                plan = await self._planner.fuse(layout, prompt, recipe, ratio, scored)
                await self._examiner.answer(asked, plan, answer, given, _keep(recipe, prompt), timed=False)
            return answer

        answers = await asyncio.gather(*map(one, ratios))
        return {Cell(recipe, ratio): answer for ratio, answer in zip(ratios, answers, strict=True)}

    def _placed(
        self, asked: Asked, recipe: Recipe, ratio: float, contexts: Contexts
    ) -> AbstractAsyncContextManager[PromptLayout]:
        prompt = asked.prompt
        computed = budget(ratio, prompt.context_tokens, prompt.context_tokens) + recipe.links * len(prompt.chunks)
        fresh = computed + len(prompt.question) + asked.answer_tokens + recipe.kept(prompt.context_tokens)
        return contexts.placed(prompt, encoding(recipe), fresh)


def _keep(recipe: Recipe, prompt: Prompt) -> SnapKV | None:
    """The recipe's eviction; None if the whole context is kept."""
    return recipe.keep if recipe.kept(prompt.context_tokens) else None
