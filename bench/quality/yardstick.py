"""Measures textual answers: feeds in full attention's answer and the expected one, and generates an answer.

All three start from the same prefill, and use the same slots one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fusionkv.bench.quality import metrics
from fusionkv.bench.quality.data.samples import Task
from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.prefill_plan import PrefillPlan
from fusionkv.fusion_worker.decode.adaptive_ratio import fed, step
from fusionkv.fusion_worker.decode.sampling import Sampler, SamplingParams
from fusionkv.fusion_worker.models import Model

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


class Yardstick:
    """Measures answers to a planned prompt."""

    def __init__(self, model: Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine

    async def feed(
        self, fused: PrefillPlan, first: torch.Tensor | None, answer: Sequence[int]
    ) -> tuple[PrefillPlan, torch.Tensor]:
        """Feeds in an answer.

        Args:
            fused: the plan.
            first: logits of the first token if the prompt is prefilled already; None prefills it in the same pass.
            answer: the answer's tokens.

        Returns:
            The plan that the last row was computed with, and float32 [len(answer) + 1, vocabulary]: logits of the
            answer's tokens and of the one after them.
        """
        if first is None or fused.doubt is not None:
            return await fed(self._engine, fused, answer)
        if not answer:
            return fused, first
        work = replace(fused).next(answer, logits=len(answer))
        more = (await self._engine.run(work)).logits
        assert more is not None
        return fused, torch.cat([first, more.cpu()])

    async def give(self, task: Task, fused: PrefillPlan, first: torch.Tensor) -> tuple[PrefillPlan, Given]:
        """Generates the greedy answer of a prefilled prompt. first: logits of the first token."""
        tokens, rows = [int(first.argmax())], [first]
        while not self._over(task, tokens):
            fused, result = await step(self._engine, fused, tokens, GREEDY, logits=1)
            assert result.token is not None
            assert result.logits is not None
            tokens.append(result.token)
            rows.append(result.logits.cpu())
        return fused, Given(tuple(tokens), torch.cat(rows).numpy())

    async def follow(
        self, task: Task, fused: PrefillPlan, given: Given, logits: torch.Tensor
    ) -> tuple[PrefillPlan, tuple[int, ...]]:
        """Generates the greedy answer of a prompt after feeding in the given one.

        The given tokens are kept while they are the most likely ones; the rest is decoded.

        Args:
            task: limits the answer.
            fused: the plan.
            given: the given answer.
            logits: those of the given answer's tokens.
        """
        found = logits.argmax(-1).tolist()
        same = next((i for i, pair in enumerate(zip(found, given.tokens, strict=True)) if len({*pair}) > 1), None)
        if same is None:
            return fused, given.tokens
        fused, tokens = fused.behind(given.tokens[:same]), [*given.tokens[:same], found[same]]
        while not self._over(task, tokens):
            fused, result = await step(self._engine, fused, tokens, GREEDY)
            assert result.token is not None
            tokens.append(result.token)
        return fused, tuple(tokens)

    def text(self, task: Task, tokens: Sequence[int]) -> str:
        """An answer's text for scoring."""
        text = self._model.tokenizer.decode([*tokens[:-1], *(t for t in tokens[-1:] if t not in self._model.ends)])
        return text.lstrip("\n").split("\n")[0] if task.first_line else text

    def _over(self, task: Task, tokens: Sequence[int]) -> bool:
        if tokens[-1] in self._model.ends or len(tokens) >= task.max_tokens:
            return True
        return task.first_line and "\n" in self._model.tokenizer.decode(tokens).lstrip("\n")


def compared(given: Given, logits: np.ndarray) -> dict[str, float]:
    """Mean KL divergence and agreement of a recipe with full attention, over the tokens of the given answer."""
    agree = logits.argmax(-1) == np.array(given.tokens)
    return {
        "answer_kl": float(metrics.kl(given.logits, logits).mean()),
        "answer_agreement": float(agree.mean()),
    }
