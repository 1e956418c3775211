"""Has a fused prompt answered, by feeding in the expected answer or by generating one, and scores the answer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusionkv.fusion_worker.engine.doubt import fed, step
from fusionkv.fusion_worker.engine.engine import Engine
from fusionkv.fusion_worker.engine.eviction import evict
from fusionkv.fusion_worker.engine.fused import Fused
from fusionkv.fusion_worker.engine.kv_pool import KVPool
from fusionkv.fusion_worker.engine.prompt import Prompt
from fusionkv.fusion_worker.engine.sampling import Sampler, SamplingParams
from fusionkv.fusion_worker.evaluation import metrics
from fusionkv.fusion_worker.evaluation.samples import Sample, Task
from fusionkv.fusion_worker.methods.keep import SnapKV
from fusionkv.fusion_worker.models import Model

_GREEDY = Sampler(SamplingParams(max_tokens=1))


@dataclass(slots=True)
class Answer:
    """What one sample gave in one cell."""

    values: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first: np.ndarray | None = None
    picture: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A sample as tokens.

    expected: the first expected answer, which is fed in when nothing is generated. left_out: chunks of the context
    that did not fit the model.
    """

    task: Task
    sample: Sample
    prompt: Prompt
    expected: tuple[int, ...]
    left_out: int

    @property
    def answer_tokens(self) -> int:
        """The longest answer."""
        return self.task.max_tokens or len(self.expected) + 1


class Examiner:
    """Asks one model."""

    def __init__(self, model: Model, pool: KVPool, engine: Engine) -> None:
        self._model = model
        self._pool = pool
        self._engine = engine

    async def answer(
        self, asked: Asked, fused: Fused, answer: Answer, keep: SnapKV | None = None, timed: bool = True
    ) -> Fused:
        """Prefills, then feeds in the expected answer or generates one, and scores it. Gives the context that it came
        from in the end.

        keep: what stays of the context behind the prefill. timed: whether the prefill is a step of its own; otherwise
        the expected answer is fed in with the question where that comes to the same.
        """
        task, expected = asked.task, asked.expected
        if expected and keep is None and not timed:
            fused, logits = await fed(self._engine, fused, expected)
        else:
            fused, logits = await self._prefill(asked, fused, answer, keep)
            if expected and fused.doubt is not None:
                fused, logits = await fed(self._engine, fused, expected)
            elif expected:
                more = (await self._engine.run(fused.next(expected, logits=len(expected)))).logits
                assert more is not None
                logits = torch.cat([logits, more.cpu()])
        answer.first = logits[0].float().cpu().numpy()
        found = logits.argmax(-1).tolist()
        if task.metrics:
            fused, text = await self._generate(task, fused, found[0])
            known = (asked.sample.answers, task.classes)
            answer.values |= {name: metrics.text_score(name, text, *known) for name in task.metrics}
        else:
            # Up to the first wrong token this sees what generating would see, so all right equals generated right.
            right = tuple(found[:-1]) == expected and found[-1] in self._model.ends
            answer.values["exact_match"] = float(right)
        answer.values |= {"recomputed": len(fused.chosen) + fused.links, "scored_rows": fused.scored_rows}
        answer.values["stored"] = fused.context_tokens
        return fused

    async def _prefill(
        self, asked: Asked, fused: Fused, answer: Answer, keep: SnapKV | None
    ) -> tuple[Fused, torch.Tensor]:
        """Logits of the first answer token, float32 [1, vocabulary], and the context that it came from."""
        with clock(answer, "prefill"):
            votes = len(asked.prompt.question) if keep else 0
            fused, result = await step(self._engine, fused, (), _GREEDY, logits=1, votes=votes)
            assert result.logits is not None
            logits = result.logits.cpu()  # waits for the device
        if keep is not None:
            assert result.votes is not None
            await evict(fused, keep, result.votes, self._pool, self._model, self._engine.crew)
        return fused, logits

    async def _generate(self, task: Task, fused: Fused, token: int) -> tuple[Fused, str]:
        """The greedy answer's text, from its first token on, and the context that it came from."""
        tokens: list[int] = []
        while token not in self._model.ends and len(tokens) < task.max_tokens:
            tokens.append(token)
            if task.first_line and "\n" in self._model.tokenizer.decode(tokens).lstrip("\n"):
                break
            fused, result = await step(self._engine, fused, tokens, _GREEDY)
            assert result.token is not None
            token = result.token
        text = self._model.tokenizer.decode(tokens)
        return fused, text.lstrip("\n").split("\n")[0] if task.first_line else text


@contextmanager
def clock(answer: Answer, name: str) -> Iterator[None]:
    """Keeps the seconds spent inside."""
    started = time.perf_counter()
    yield
    answer.seconds[name] = time.perf_counter() - started
