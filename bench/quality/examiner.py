"""Has a fused prompt answered, by feeding in the expected answer or by generating one, and scores the answer."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusionkv.bench.quality import metrics
from fusionkv.bench.quality.data.samples import Sample, Task
from fusionkv.bench.quality.report.cells import Measured
from fusionkv.bench.quality.yardstick import GREEDY, Given, Yardstick, compared
from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.compute.prefill_plan import PrefillPlan
from fusionkv.fusion_worker.decode.adaptive_ratio import step
from fusionkv.fusion_worker.decode.eviction import evict
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.recipes.keep import SnapKV


@dataclass(slots=True)
class Answer:
    """What one sample gave in one cell. given: of full attention, where answers are generated."""

    values: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first: np.ndarray | None = None
    given: Given | None = None
    picture: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A sample as tokens.

    expected: the first expected answer. left_out: chunks of the context that did not fit the model.
    """

    task: Task
    sample: Sample
    prompt: Prompt
    expected: tuple[int, ...]
    left_out: int

    @property
    def answer_tokens(self) -> int:
        """The longest answer, generated or fed in."""
        return max(self.task.max_tokens, len(self.expected) + 1)


class Examiner:
    """Asks one model."""

    def __init__(self, model: Model, pool: KVPool, engine: Engine) -> None:
        self._model = model
        self._pool = pool
        self._engine = engine
        self._yardstick = Yardstick(model, engine)

    async def answer(
        self,
        asked: Asked,
        fused: PrefillPlan,
        answer: Answer,
        given: Given | None = None,
        keep: SnapKV | None = None,
        timed: bool = True,
    ) -> PrefillPlan:
        """Prefills, then feeds in the expected answer or generates one, and scores it. Gives the context that it came
        from in the end.

        given: full attention's answer; without it this one is given to others. keep: what stays of the context behind
        the prefill. timed: whether the prefill is a step of its own; otherwise an answer is fed in with the question
        where that comes to the same.
        """
        first = None
        if keep is not None or timed:
            fused, first = await self._prefill(asked, fused, answer, keep)
        if asked.task.metrics:
            fused = await self._measure(asked, fused, first, answer, given)
        else:
            expected = asked.expected
            fused, logits = await self._yardstick.feed(fused, first, expected)
            answer.first = logits[0].cpu().numpy()
            found = logits.argmax(-1).tolist()
            # Up to the first wrong token this sees what generating would see, so all right equals generated right.
            right = tuple(found[:-1]) == expected and found[-1] in self._model.ends
            answer.values["exact_match"] = float(right)
        answer.values |= {"recomputed": len(fused.chosen) + fused.links, "scored_rows": fused.scored_rows}
        answer.values["stored"] = fused.context_tokens
        return fused

    async def _measure(
        self, asked: Asked, fused: PrefillPlan, first: torch.Tensor | None, answer: Answer, given: Given | None
    ) -> PrefillPlan:
        """Feeds in the expected answer and the given one, then generates; what each says goes into `answer`.

        Where the task is not graded, the given answer alone is fed in.
        """
        task, measure = asked.task, self._yardstick
        if task.graded or given is None:
            expected = asked.expected if task.graded else ()
            _, logits = await measure.feed(fused, first, expected[:-1])
            if expected:
                answer.values["gold_nll"] = metrics.nll(logits.cpu().numpy(), expected)
            first = logits[:1].cpu() if first is None else first
        if given is None:
            assert first is not None
            fused, answer.given = await measure.give(task, fused, first)
            given, tokens, found = answer.given, answer.given.tokens, answer.given.logits
        else:
            fused, logits = await measure.feed(fused, first, given.tokens[:-1])
            found, tokens = logits.cpu().numpy(), given.tokens
            if task.graded:
                fused, tokens = await measure.follow(task, fused, given, logits)
        answer.first = found[0]
        answer.values |= compared(given, found)
        if not task.graded:
            return fused
        text, known = measure.text(task, tokens), (asked.sample.answers, task.classes)
        answer.values |= {name: metrics.text_score(name, text, *known) for name in task.metrics}
        return fused

    async def _prefill(
        self, asked: Asked, fused: PrefillPlan, answer: Answer, keep: SnapKV | None
    ) -> tuple[PrefillPlan, torch.Tensor]:
        """Logits of the first answer token, float32 [1, vocabulary], and the context that it came from."""
        with clock(answer, "prefill"):
            votes = len(asked.prompt.question) if keep else 0
            fused, result = await step(self._engine, fused, (), GREEDY, logits=1, votes=votes)
            assert result.logits is not None
            logits = result.logits.cpu()  # waits for the device
        if keep is not None:
            assert result.votes is not None
            await evict(fused, keep, result.votes, self._pool, self._model, self._engine.tp)
        return fused, logits


@contextmanager
def clock(answer: Answer, name: str) -> Iterator[None]:
    """Keeps the seconds spent inside."""
    started = time.perf_counter()
    yield
    answer.seconds[name] = time.perf_counter() - started


def together(answers: Sequence[Answer]) -> Measured:
    """One cell's samples in order."""
    values = {name: [a.values[name] for a in answers] for name in answers[0].values}
    seconds: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.seconds.items():
            seconds.setdefault(name, []).append(value)
    return Measured(values, seconds, answers[0].picture)
