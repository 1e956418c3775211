"""Repeats a share of the answers with full attention while the worker is idle, and compares them."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import torch
from opentelemetry import metrics

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import Logits, Nothing
from fusionkv.fusion_worker.compute.planner import Planner
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.quality.ratio_guard import Allowed, RatioGuard
from fusionkv.protos.contract.names import recipe_label
from fusionkv.protos.observe import telemetry

log = logging.getLogger(__name__)
meter = metrics.get_meter(__name__)
_answers = meter.create_counter("fusionkv.worker.shadow.answers", description="Answers compared with full attention")
_kl = meter.create_histogram(
    "fusionkv.worker.shadow.kl",
    unit="nat",
    description="KL divergence of the first token's distribution from full attention",
    explicit_bucket_boundaries_advisory=telemetry.NATS,
)
_skipped = meter.create_counter("fusionkv.worker.shadow.skipped", description="Samples dropped, by reason")
# Samples are small (ids and one row of logits), but old ones are of little use.
_MAX_WAITING = 16
# Tokens of an answer that are computed at a time: with a vocabulary of 262,144, the logits of each take 1 MB.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """A greedy answer. logits: float32 [vocabulary], of its first token. allowed: its ratio."""

    prompt: Prompt
    tokens: tuple[int, ...]
    logits: torch.Tensor
    allowed: Allowed


class Shadow:
    """Samples a share of the answers, and repeats them one by one while the worker is idle."""

    def __init__(
        self,
        share: float,
        ratio_guard: RatioGuard,
        engine: Engine,
        loader: Loader,
        planner: Planner,
        idle: asyncio.Event,
    ) -> None:
        """idle: set while no request runs or waits."""
        self._share = share
        self._ratio_guard = ratio_guard
        self._engine = engine
        self._loader = loader
        self._planner = planner
        self._waiting: asyncio.Queue[Sample] = asyncio.Queue()
        self.idle = idle
        self._task = asyncio.create_task(self._loop()) if share else None

    def wants(self) -> bool:
        return random.random() < self._share

    def offer(self, sample: Sample) -> None:
        """Queues an answer, or drops it when the queue is full."""
        if self._waiting.qsize() >= _MAX_WAITING:
            _skipped.add(1, {"fusionkv.reason": "queue full"})
        else:
            self._waiting.put_nowait(sample)

    async def wait_idle(self) -> None:
        """Waits until all queued answers are compared or dropped."""
        await self._waiting.join()

    async def close(self) -> None:
        """Drops queued answers and waits until computation has stopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _loop(self) -> None:
        while True:
            sample = await self._waiting.get()
            try:
                await self.idle.wait()
                await self._compare(sample)
            except Exception:
                log.exception("an answer could not be repeated with full attention")
                _skipped.add(1, {"fusionkv.reason": "error"})
            finally:
                self._waiting.task_done()

    async def _compare(self, sample: Sample) -> None:
        if not self._loader.has_room(sample.prompt.tokens + len(sample.tokens)):
            _skipped.add(1, {"fusionkv.reason": "no room"})
            return
        likely, kl = list[int](), 0.0
        async with aclosing(self._again(sample)) as blocks:
            async for logits in blocks:
                if not likely:
                    kl = await asyncio.to_thread(_divergence, logits[0], sample.logits)
                likely += await asyncio.to_thread(_most_likely, logits)
        # Compares with full attention's own answer: both see the same tokens up to the first difference.
        first, same = likely[0] == sample.tokens[0], likely == list(sample.tokens)
        # Callers choose a recipe's numbers and the names of corpora: neither may become a label.
        attributes = {"fusionkv.recipe": recipe_label(sample.allowed.key[0])}
        _kl.record(kl, attributes)
        _answers.add(1, attributes | {"fusionkv.same_first_token": first, "fusionkv.same_answer": same})
        self._ratio_guard.record(sample.allowed, same)

    async def _again(self, sample: Sample) -> AsyncGenerator[torch.Tensor]:
        """Full attention's logits of every token of the answer, float32 [tokens, vocabulary], a block at a time."""
        prompt, answer = sample.prompt, sample.tokens
        # All but the question's last token first: a prefill without logits can be split, and yields to others.
        *question, last = prompt.question
        head = Prompt(prompt.system, prompt.chunks, tuple(question), prompt.tenant)
        async with self._loader.plain(prompt.tokens + len(answer)) as layout:
            plan = self._planner.plain(layout, head)
            if head.tokens:
                await self._engine.run(plan.prefill(Nothing()), background=True)
            rest = [last, *answer[:-1]]
            for start in range(0, len(rest), _BLOCK):
                block = rest[start : start + _BLOCK]
                yield await self._engine.run(plan.next(block, Logits(len(block))), background=True)
                plan = plan.followed_by(block)


def _most_likely(logits: torch.Tensor) -> list[int]:
    return logits.argmax(-1).tolist()


def _divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """The KL divergence of the second of two rows of logits from the first, in nats."""
    log_p, log_q = full.cpu().log_softmax(-1), other.cpu().log_softmax(-1)
    # For equal distributions, rounding may give a negative value, which a histogram drops.
    return max(0.0, float((log_p.exp() * (log_p - log_q)).sum()))
