"""Answers a planned prompt, by feeding in the expected answer or by generating one, and scores the answer.

Textual answers are measured in three ways, which start from the same prefill and use the same slots one after
another: full attention's answer and the expected one are fed in, and an answer is generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import Logits, NextToken
from fusionkv.fusion_worker.compute.plan import PrefillPlan
from fusionkv.fusion_worker.decode.eviction import evict
from fusionkv.fusion_worker.decode.sampling import Sampler, SamplingParams
from fusionkv.fusion_worker.evaluate import metrics
from fusionkv.fusion_worker.evaluate.data.samples import Sample, Task
from fusionkv.fusion_worker.evaluate.report.cells import Measured
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.protos.contract.selectors import SnapKV

GREEDY = Sampler(SamplingParams(max_tokens=1))


@dataclass(frozen=True, slots=True)
class Given:
    """Full attention's greedy answer, which is fed to all recipes.

    Attributes:
        tokens: with the token that ended it (an end token, or the end of a line), unless it was cut at the task's
            limit.
        logits: float32 [tokens, vocabulary], which predict each token.
    """

    tokens: tuple[int, ...]
    logits: np.ndarray


@dataclass(slots=True)
class Answer:
    """The results of a sample in a cell. given: full attention's answer, where answers are generated."""

    values: dict[str, float] = field(default_factory=dict)
    first: np.ndarray | None = None
    given: Given | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A tokenised sample.

    expected: tokens of the first expected answer. left_out: number of chunks that did not fit the model's length.
    """

    task: Task
    sample: Sample
    prompt: Prompt
    expected: tuple[int, ...]
    left_out: int

    @property
    def answer_tokens(self) -> int:
        """Maximum tokens of an answer, generated or fed in."""
        return max(self.task.max_tokens, len(self.expected) + 1)


class Examiner:
    """Answers prompts with one model, and scores the answers."""

    def __init__(self, model: Model, pool: KVPool, engine: Engine) -> None:
        self._model = model
        self._pool = pool
        self._engine = engine

    async def answer(
        self,
        asked: Asked,
        plan: PrefillPlan,
        answer: Answer,
        given: Given | None = None,
        keep: SnapKV | None = None,
    ) -> None:
        """Prefills, feeds in the expected answer or generates one, and scores it.

        Args:
            answer: receives the results.
            given: full attention's answer; None for full attention itself, whose answer is stored in `answer`.
            keep: the context to keep after the prefill; None keeps all, and an answer is fed in together with the
                question where the result is the same.
        """
        first = None
        if keep is not None:
            first, plan = await self._prefill(asked, plan, keep)
        if asked.task.metrics:
            await self._measure(asked, plan, first, answer, given)
        else:
            expected = asked.expected
            logits = await self._feed(plan, first, expected)
            answer.first = logits[0].cpu().numpy()
            likely = logits.argmax(-1).tolist()
            # Up to the first wrong token this sees the same as generation, so an exact match here is one there.
            right = tuple(likely[:-1]) == expected and likely[-1] in self._model.ends
            answer.values["exact_match"] = float(right)
        answer.values |= {"recomputed": len(plan.chosen) + plan.links, "scored_rows": plan.scored_rows}
        answer.values["stored"] = plan.context_tokens

    async def _measure(
        self, asked: Asked, plan: PrefillPlan, first: torch.Tensor | None, answer: Answer, given: Given | None
    ) -> None:
        """Feeds in the expected answer and the given one, then generates an answer; adds the results to `answer`.

        If the task is not graded, only the given answer is fed in.
        """
        task = asked.task
        if task.graded or given is None:
            expected = asked.expected if task.graded else ()
            logits = await self._feed(plan, first, expected[:-1])
            if expected:
                answer.values["gold_nll"] = metrics.nll(logits.cpu().numpy(), expected)
            first = logits[:1].cpu() if first is None else first
        if given is None:
            assert first is not None
            given = await self._give(task, plan, first)
            answer.given, rows, likely = given, given.logits, [*given.tokens]
        else:
            logits = await self._feed(plan, first, given.tokens[:-1])
            rows, likely = logits.cpu().numpy(), logits.argmax(-1).tolist()
            del logits
        answer.first = rows[0].copy()
        answer.values |= compared(given, rows)
        if not task.graded:
            return
        del rows  # 20 MB with Gemma 3, of each cell whose own answer is being generated
        tokens = await self._follow(task, plan, given.tokens, likely)
        text, full = self._text(task, tokens), self._text(task, given.tokens)
        answer.values |= {name: metrics.SCORES[name](text, asked.sample.answers) for name in task.metrics}
        answer.values |= {f"{name}_full": metrics.SCORES[name](text, [full]) for name in task.compared}

    async def _prefill(self, asked: Asked, plan: PrefillPlan, keep: SnapKV) -> tuple[torch.Tensor, PrefillPlan]:
        """Returns the logits of the first answer token, float32 [1, vocabulary], and the plan to decode with."""
        output = NextToken(GREEDY, logits=True, votes=len(asked.prompt.question))
        first = await self._engine.run(plan.prefill(output))
        assert first.logits is not None
        assert first.votes is not None
        plan = await evict(plan, keep, first.votes, self._pool, self._model, self._engine.tp)
        return first.logits[None].cpu(), plan

    async def _feed(self, plan: PrefillPlan, first: torch.Tensor | None, answer: Sequence[int]) -> torch.Tensor:
        """Feeds in an answer.

        first: logits of the first token if the prompt is prefilled already; None prefills it in the same pass.
        Returns float32 [len(answer) + 1, vocabulary]: logits of the answer's tokens and of the one after them.
        """
        if first is not None and not answer:
            return first
        if first is None:
            job = plan.followed_by(answer).prefill(Logits(len(answer) + 1))
        else:
            job = plan.next(answer, Logits(len(answer)))
        logits = await self._engine.run(job)
        return logits if first is None else torch.cat([first, logits.cpu()])

    async def _give(self, task: Task, plan: PrefillPlan, first: torch.Tensor) -> Given:
        """Generates the greedy answer of a prefilled prompt. first: logits of the first token."""
        tokens, rows = [int(first.argmax())], [first]
        while not self._over(task, tokens):
            sampled = await self._engine.run(plan.next(tokens[-1:], NextToken(GREEDY, logits=True)))
            assert sampled.logits is not None
            plan = plan.followed_by(tokens[-1:])
            tokens.append(sampled.token)
            rows.append(sampled.logits[None].cpu())
        return Given(tuple(tokens), torch.cat(rows).numpy())

    async def _follow(
        self, task: Task, plan: PrefillPlan, given: tuple[int, ...], likely: Sequence[int]
    ) -> tuple[int, ...]:
        """Generates the greedy answer of a prompt after feeding in the given one.

        The given tokens are kept while they are the most likely ones; the rest is decoded. likely: the most likely
        token in place of each given one.
        """
        same = next((i for i, pair in enumerate(zip(likely, given, strict=True)) if len({*pair}) > 1), None)
        if same is None:
            return given
        plan, tokens = plan.followed_by(given[:same]), [*given[:same], likely[same]]
        while not self._over(task, tokens):
            sampled = await self._engine.run(plan.next(tokens[-1:], NextToken(GREEDY)))
            plan = plan.followed_by(tokens[-1:])
            tokens.append(sampled.token)
        return tuple(tokens)

    def _text(self, task: Task, tokens: Sequence[int]) -> str:
        """An answer's text for scoring."""
        text = self._model.tokenizer.decode([*tokens[:-1], *(t for t in tokens[-1:] if t not in self._model.ends)])
        return text.lstrip("\n").split("\n")[0] if task.first_line else text

    def _over(self, task: Task, tokens: Sequence[int]) -> bool:
        if tokens[-1] in self._model.ends or len(tokens) >= task.max_tokens:
            return True
        return task.first_line and "\n" in self._model.tokenizer.decode(tokens).lstrip("\n")


def together(answers: Sequence[Answer]) -> Measured:
    """Joins the results of a cell's samples, in order."""
    return Measured({name: [a.values[name] for a in answers] for name in answers[0].values})


def compared(given: Given, logits: np.ndarray) -> dict[str, float]:
    """Mean KL divergence and agreement of a recipe with full attention, over the tokens of the given answer."""
    agree = logits.argmax(-1) == np.array(given.tokens)
    return {
        # By token: float64 arrays of a whole answer are mapped and unmapped each, which can take ten times as long.
        "answer_kl": float(np.mean([metrics.kl(p, q) for p, q in zip(given.logits, logits, strict=True)])),
        "answer_agreement": float(agree.mean()),
    }
