"""What an answer in words is measured by: full attention's own answer and the expected one fed in, and one generated.

All three branch off behind one prefill, and use the same slots one after the other.
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
    """Full attention's greedy answer, which all recipes are fed.

    tokens: with the one that ended it (an end token, or a line's end), unless it was cut at the task's most tokens.
    logits: float32 [tokens, vocabulary], that each was the most likely by.
    """

    tokens: tuple[int, ...]
    logits: np.ndarray


class Yardstick:
    """Measures a prompt that is ready to be answered."""

    def __init__(self, model: Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine

    async def feed(
        self, fused: PrefillPlan, first: torch.Tensor | None, answer: Sequence[int]
    ) -> tuple[PrefillPlan, torch.Tensor]:
        """Logits of an answer's tokens and of what follows, float32 [len(answer) + 1, vocabulary], and their context.

        first: those of the first token when the prompt is prefilled already; otherwise that is done together.
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
        """The greedy answer behind a prefilled prompt, and the context that it came from."""
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
        """The greedy answer of a prompt that was fed another one last, and the context that it came from.

        As long as the given tokens are the most likely ones it is that answer; from the first that is not, it is
        decoded.
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
        """An answer as it is scored."""
        said = self._model.tokenizer.decode([*tokens[:-1], *(t for t in tokens[-1:] if t not in self._model.ends)])
        return said.lstrip("\n").split("\n")[0] if task.first_line else said

    def _over(self, task: Task, tokens: Sequence[int]) -> bool:
        if tokens[-1] in self._model.ends or len(tokens) >= task.max_tokens:
            return True
        return task.first_line and "\n" in self._model.tokenizer.decode(tokens).lstrip("\n")


def compared(given: Given, logits: np.ndarray) -> dict[str, float]:
    """How far a recipe's distributions are from full attention's over its answer, the mean over the tokens."""
    agree = logits.argmax(-1) == np.array(given.tokens)
    return {
        "answer_kl": float(metrics.kl(given.logits, logits).mean()),
        "answer_agreement": float(agree.mean()),
    }
