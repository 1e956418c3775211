"""Measures cells over a block of samples, in process and on the real engine: many samples at once."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.engine.embedder import Embedder
from fusionkv.fusion_worker.engine.engine import Engine
from fusionkv.fusion_worker.engine.fused import Fused
from fusionkv.fusion_worker.engine.fuser import Fuser
from fusionkv.fusion_worker.engine.kv_pool import KVPool
from fusionkv.fusion_worker.engine.loader import Loader
from fusionkv.fusion_worker.engine.placement import Placement
from fusionkv.fusion_worker.engine.prompt import Prompt
from fusionkv.fusion_worker.engine.sampling import Sampler, SamplingParams
from fusionkv.fusion_worker.evaluation import metrics
from fusionkv.fusion_worker.evaluation.cells import Cell, Measured
from fusionkv.fusion_worker.evaluation.contexts import Contexts, hold
from fusionkv.fusion_worker.evaluation.deviation import deviation
from fusionkv.fusion_worker.evaluation.prompts import Prompter
from fusionkv.fusion_worker.evaluation.samples import Block, Sample, Task
from fusionkv.fusion_worker.methods.choose import budget
from fusionkv.fusion_worker.methods.recipes import Isolated, Recipe
from fusionkv.fusion_worker.models import Model
from fusionkv.protos.errors import ResourceExhausted

# Groups of samples at once: enough rows for full steps of the engine.
_MOST_GROUPS = 8


@dataclass(slots=True)
class _Answer:
    """What one sample gave in one cell."""

    values: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first: np.ndarray | None = None
    picture: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A sample as tokens. expected: the first expected answer, which is fed in when nothing is generated."""

    sample: Sample
    prompt: Prompt
    expected: tuple[int, ...]


class Runner:
    """One model, one pool, one engine. Made and used inside one event loop."""

    def __init__(self, model: Model, config: WorkerConfig, chunk_tokens: int) -> None:
        self._model = model
        self._pool = KVPool.of(model.kv, config.pool_bytes, config.page_tokens, model.device)
        self._engine = Engine(model, self._pool, config.max_step_tokens)
        self._loader = Loader(config, model, self._pool, self._engine, None)
        self._embedder = Embedder(model, self._engine, self._loader)
        self._fuser = Fuser(model, self._engine)
        self._prompter = Prompter(model, chunk_tokens, min(model.max_tokens, self._pool.capacity // 3))
        self._cut = 0

    async def close(self) -> None:
        await self._loader.close()
        self._engine.close()

    async def measure(self, block: Block, cells: Sequence[Cell], picture: bool) -> list[Measured]:
        """The cells over the block's samples, in the order of `cells`.

        The first sample runs alone, one cell after the other, and is timed; the others run together.
        picture: whether to keep what was chosen in the first sample.

        Raises:
            ResourceExhausted: a group of samples does not fit the pool.
        """
        task = block.task
        asked = [self._ask(task, sample) for sample in block.samples]
        groups = [asked[i : i + task.group] for i in range(0, len(asked), task.group)]
        slots = asyncio.Semaphore(self._at_once(task, groups, cells))

        async def one(group: list[_Asked], alone: bool) -> list[list[_Answer]]:
            async with slots:
                return await self._group(task, group, cells, alone, picture)

        first = await one(groups[0], True)
        others = await asyncio.gather(*(one(group, False) for group in groups[1:]))
        answers = [answer for group in (first, *others) for answer in group]
        self._pool.check_integrity(idle=True)
        return [_together([of_sample[i] for of_sample in answers]) for i in range(len(cells))]

    def _ask(self, task: Task, sample: Sample) -> _Asked:
        expected = () if task.metrics else self._prompter.ids(sample.answers[0])
        prompt, cut = self._prompter.prompt(sample, task.chat, task.max_tokens or len(expected) + 1)
        self._cut += cut > 0
        return _Asked(sample, prompt, expected)

    def _at_once(self, task: Task, groups: Sequence[Sequence[_Asked]], cells: Sequence[Cell]) -> int:
        """How many groups fit the pool together with one request's own slots, so that nobody waits for ever."""
        prompts = [asked.prompt for group in groups for asked in group]
        ways = len({cell.recipe.encode for cell in cells if cell.recipe.encode is not None} | {Isolated()})
        held = ways * task.group * max(sum(map(self._pool.slots_for, map(len, p.parts))) for p in prompts)
        answer = task.max_tokens or max(len(asked.expected) for group in groups for asked in group) + 1
        own = self._pool.slots_for(max(p.tokens for p in prompts) + answer)
        if held + own > self._pool.capacity:
            raise ResourceExhausted(
                f"{task.name}: {task.group} samples need {held + own} tokens of KV and the pool holds "
                f"{self._pool.capacity}: raise pool_bytes to {(held + own) * self._model.kv.token_bytes}"
            )
        return max(1, min(_MOST_GROUPS, (self._pool.capacity - own) // held))

    async def _group(
        self, task: Task, group: Sequence[_Asked], cells: Sequence[Cell], alone: bool, picture: bool
    ) -> list[list[_Answer]]:
        encodes = list({cell.recipe.encode: None for cell in cells if cell.recipe.encode is not None})
        prompts = [asked.prompt for asked in group]
        async with hold(self._model, self._loader, self._embedder, prompts, encodes) as contexts:
            done = []
            if alone:
                done.append(await self._sample(task, group[0], cells, contexts, True, picture))
            rest = (self._sample(task, asked, cells, contexts, False, False) for asked in group[len(done) :])
            return [*done, *await asyncio.gather(*rest)]

    async def _sample(
        self, task: Task, asked: _Asked, cells: Sequence[Cell], contexts: Contexts, alone: bool, picture: bool
    ) -> list[_Answer]:
        """Every cell of one sample; full attention first, since the others are held against it."""
        full, away = await self._full_attention(task, asked, cells, contexts)
        assert full.first is not None

        ratios: dict[Recipe, list[float]] = {}
        for cell in cells:
            if cell.recipe.encode is not None:
                ratios.setdefault(cell.recipe, []).append(cell.ratio)
        answers = {cell: full for cell in cells if cell.recipe.encode is None}
        if alone:
            for cell in cells:
                if cell not in answers:
                    answers[cell] = await self._alone(task, asked, cell, contexts, picture)
        else:
            recipes = (self._recipe(task, asked, recipe, contexts, ratios[recipe]) for recipe in ratios)
            for found in await asyncio.gather(*recipes):
                answers |= found
            full.seconds = {}
        for cell, answer in answers.items():
            assert answer.first is not None
            answer.values["agreement"] = float(answer.first.argmax() == full.first.argmax())
            answer.values["kl"] = metrics.kl(full.first, answer.first)
            answer.values |= away.get(cell, {})
        return [answers[cell] for cell in cells]

    async def _full_attention(
        self, task: Task, asked: _Asked, cells: Sequence[Cell], contexts: Contexts
    ) -> tuple[_Answer, dict[Cell, dict[str, float]]]:
        """The answer of full attention, and how far the reused KV of cells that recompute nothing is away from it."""
        prompt = asked.prompt
        async with self._loader.plain(prompt.tokens + self._answer_tokens(task, asked)) as placement:
            answer = _Answer()
            await self._answer(task, asked, self._fuser.plain(placement, prompt), answer)
            answer.values |= {"recomputed": prompt.context_tokens, "scored_rows": 0}
            away = {}
            for cell in cells:
                if cell.recipe.encode is not None and cell.ratio == 0:
                    async with contexts.placed(prompt, cell.recipe.encode, 0) as reused:
                        away[cell] = deviation(self._pool.kv, self._model.rotation, reused, placement.fresh)
            return answer, away

    async def _alone(self, task: Task, asked: _Asked, cell: Cell, contexts: Contexts, picture: bool) -> _Answer:
        """One cell, timed, each step as a worker would take it."""
        answer = _Answer()
        async with self._placed(task, asked, cell.recipe, cell.ratio, contexts) as placement:
            with _clock(answer, "select"):
                fused = await self._fuser.fuse(placement, asked.prompt, cell.recipe, cell.ratio)
            await self._answer(task, asked, fused, answer)
        answer.values |= {"recomputed": len(fused.chosen), "scored_rows": fused.scored_rows}
        if picture:
            answer.picture = self._picture(asked, fused)
        return answer

    async def _recipe(
        self, task: Task, asked: _Asked, recipe: Recipe, contexts: Contexts, ratios: Sequence[float]
    ) -> dict[Cell, _Answer]:
        """A recipe's cells, from one scoring."""
        scored = None
        if recipe.score is not None:
            async with self._placed(task, asked, recipe, 0, contexts) as placement:
                scored = await self._fuser.score(placement, asked.prompt, recipe)

        async def one(ratio: float) -> _Answer:
            answer = _Answer()
            async with self._placed(task, asked, recipe, ratio, contexts) as placement:
                fused = await self._fuser.fuse(placement, asked.prompt, recipe, ratio, scored)
                # Layer 0's KV is exact in the cache: going through it again gives the same, and in full steps.
                fused.ahead = None
                await self._answer(task, asked, fused, answer, at_once=True)
            answer.values |= {"recomputed": len(fused.chosen), "scored_rows": fused.scored_rows}
            return answer

        answers = await asyncio.gather(*map(one, ratios))
        return {Cell(recipe, ratio): answer for ratio, answer in zip(ratios, answers, strict=True)}

    def _placed(
        self, task: Task, asked: _Asked, recipe: Recipe, ratio: float, contexts: Contexts
    ) -> AbstractAsyncContextManager[Placement]:
        assert recipe.encode is not None
        prompt = asked.prompt
        chosen = budget(ratio, prompt.context_tokens, prompt.context_tokens)
        fresh = chosen + len(prompt.question) + self._answer_tokens(task, asked)
        return contexts.placed(prompt, recipe.encode, fresh)

    @staticmethod
    def _answer_tokens(task: Task, asked: _Asked) -> int:
        return task.max_tokens or len(asked.expected) + 1

    async def _answer(self, task: Task, asked: _Asked, fused: Fused, answer: _Answer, at_once: bool = False) -> None:
        """Prefills, then feeds in the expected answer or generates one, and scores it.

        at_once: the expected answer is fed in with the question, which saves a step and times nothing.
        """
        expected = asked.expected
        if at_once and expected:
            logits = (await self._engine.run(_behind(fused, expected).prefill(logits=len(expected) + 1))).logits
        else:
            with _clock(answer, "prefill"):
                logits = (await self._engine.run(fused.prefill(logits=1))).logits
            if expected:
                more = (await self._engine.run(fused.next(expected, logits=len(expected)))).logits
                assert logits is not None
                assert more is not None
                logits = torch.cat([logits, more])
        assert logits is not None
        answer.first = logits[0].float().cpu().numpy()
        found = logits.argmax(-1).tolist()
        if task.metrics:
            text = await self._generate(task, fused, found[0])
            answer.values |= {name: metrics.TEXT_METRICS[name](text, asked.sample.answers) for name in task.metrics}
        else:
            # Up to the first wrong token this sees what generating would see, so all right equals generated right.
            right = tuple(found[:-1]) == expected and found[-1] in self._model.ends
            answer.values["exact_match"] = float(right)

    async def _generate(self, task: Task, fused: Fused, token: int) -> str:
        """The greedy answer's text, from its first token on."""
        greedy = Sampler(SamplingParams(task.max_tokens))
        tokens: list[int] = []
        while token not in self._model.ends and len(tokens) < task.max_tokens:
            tokens.append(token)
            if task.first_line and "\n" in self._model.tokenizer.decode(tokens).lstrip("\n"):
                break
            following = (await self._engine.run(fused.next([token], sampler=greedy))).token
            assert following is not None
            token = following
        text = self._model.tokenizer.decode(tokens)
        return text.lstrip("\n").split("\n")[0] if task.first_line else text

    def _picture(self, asked: _Asked, fused: Fused) -> dict[str, Any]:
        """Tokens of every chunk, which of them were chosen and by what score; scores as ranks from 0 to 1."""
        prompt, tokenizer = asked.prompt, self._model.tokenizer
        chosen = torch.zeros(prompt.question_start, dtype=torch.bool)
        chosen[fused.chosen] = True
        ranks = torch.zeros(prompt.question_start)
        if fused.scores is not None and (stale := fused.stale).any():
            order = fused.scores[stale].argsort().argsort().float()
            ranks[stale] = order / max(1, len(order) - 1)
        chunks = []
        for start, chunk in zip(prompt.starts[1:], prompt.chunks, strict=True):
            inside = slice(start, start + len(chunk))
            chunks.append(
                {
                    "tokens": [tokenizer.decode([i], skip_special_tokens=False) for i in chunk.ids],
                    "chosen": chosen[inside].nonzero()[:, 0].tolist(),
                    "scores": [round(s, 2) for s in ranks[inside].tolist()],
                }
            )
        answers = list(asked.sample.answers)
        return {"question": asked.sample.question.strip(), "answers": answers, "chunks": chunks}


def _behind(fused: Fused, tokens: Sequence[int]) -> Fused:
    """The same with more tokens behind the question."""
    first = int(fused.positions[-1]) + 1
    positions = torch.cat([fused.positions, torch.arange(first, first + len(tokens))])
    return replace(fused, ids=torch.cat([fused.ids, torch.tensor(tokens)]), positions=positions)


@contextmanager
def _clock(answer: _Answer, name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    answer.seconds[name] = time.perf_counter() - started


def _together(answers: Sequence[_Answer]) -> Measured:
    """One cell's samples in order."""
    values = {name: [a.values[name] for a in answers] for name in answers[0].values}
    seconds: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.seconds.items():
            seconds.setdefault(name, []).append(value)
    return Measured(values, seconds, answers[0].picture)
