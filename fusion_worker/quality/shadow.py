"""Repeats a share of the answers with full attention while the worker is idle; raises ratios when too few match."""

import asyncio
import logging
import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch
from opentelemetry import metrics

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.compute.planner import Planner
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.recipes.recipes import Recipe
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
# Number of latest answers that decide. With 20, a true share of 95% falls below 80% once in 400 decisions.
SAMPLES = 20
_MIN_RAISED = 0.15  # minimum of a raised ratio
_MAX_KEYS = 1024
# A recipe, a corpus, and whether the request's ratio was below the recipe's: low ratios are raised separately.
_Key = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class Allowed:
    """The ratio of a request.

    why: why it was raised; empty if it is the requested one. key, level: the key that the answer is recorded for, and
    its level at the time.
    """

    ratio: float
    why: str
    key: _Key
    level: int


@dataclass(slots=True)
class _Record:
    """The latest answers of a key at its current level, and whether each matched full attention."""

    same: "deque[bool]" = field(default_factory=lambda: deque(maxlen=SAMPLES))
    level: int = 0
    why: str = ""


class Fallback:
    """Raises ratios by recipe and corpus, and never lowers them. Only the 1,024 keys used last are remembered."""

    def __init__(self, floor: float) -> None:
        """floor: minimum share of answers that match full attention; 0 never raises a ratio."""
        self._floor = floor
        self._records: OrderedDict[_Key, _Record] = OrderedDict()

    def ratio(self, recipe: Recipe, corpus: str, requested: float) -> Allowed:
        """The ratio to use for a request that asks for `requested`."""
        key = (recipe.name, corpus, requested < recipe.ratio)
        record = self._records.get(key)
        if record is None or record.level == 0 or recipe.lossless:
            return Allowed(requested, "", key, 0)
        self._records.move_to_end(key)
        if record.level == 1 and not recipe.fixed:
            raised = max(2 * requested, _MIN_RAISED)
            if raised < 1.0:
                return Allowed(raised, record.why, key, record.level)
        return Allowed(1.0, record.why, key, record.level)

    def record(self, allowed: Allowed, same: bool) -> None:
        """Records whether an answer matched full attention; ignored if the ratio has been raised since."""
        record = self._records.setdefault(allowed.key, _Record())
        self._records.move_to_end(allowed.key)
        if len(self._records) > _MAX_KEYS:
            self._records.popitem(last=False)
        if allowed.level != record.level:
            return
        record.same.append(same)
        share = sum(record.same) / SAMPLES
        if len(record.same) == SAMPLES and share < self._floor:
            record.level += 1
            record.why = (
                f"{share:.0%} of {SAMPLES} answers matched full attention, below the floor of {self._floor:.0%}"
            )
            record.same.clear()


@dataclass(frozen=True, slots=True)
class Sample:
    """A greedy answer. logits: float32 [vocabulary], of its first token. allowed: its ratio."""

    prompt: Prompt
    recipe: Recipe
    corpus: str
    tokens: tuple[int, ...]
    logits: torch.Tensor
    allowed: Allowed


class Shadow:
    """Samples a share of the answers, and repeats them one by one while the worker is idle."""

    def __init__(
        self,
        share: float,
        guard: Fallback,
        pool: KVPool,
        engine: Engine,
        loader: Loader,
        fuser: Planner,
        idle: asyncio.Event,
    ) -> None:
        """idle: set while no request runs or waits."""
        self._share = share
        self._guard = guard
        self._pool = pool
        self._engine = engine
        self._loader = loader
        self._fuser = fuser
        self._random = random.Random()
        self._waiting: asyncio.Queue[Sample] = asyncio.Queue()
        self.idle = idle
        self._task = asyncio.create_task(self._loop()) if share else None

    def wants(self) -> bool:
        return self._random.random() < self._share

    def offer(self, sample: Sample) -> None:
        """Queues an answer, or drops it when the queue is full."""
        if self._waiting.qsize() >= _MAX_WAITING:
            _skipped.add(1, {"fusionkv.reason": "queue full"})
        else:
            self._waiting.put_nowait(sample)

    async def settle(self) -> None:
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
        tokens = sample.prompt.tokens + len(sample.tokens)
        if self._pool.slots_for(tokens) > self._pool.free + self._pool.idle:
            _skipped.add(1, {"fusionkv.reason": "no room"})
            return
        logits = (await self._again(sample)).cpu()
        # Compares with full attention's own answer: both see the same tokens up to the first difference.
        same = logits.argmax(-1).tolist() == list(sample.tokens)
        first = int(logits[0].argmax()) == sample.tokens[0]
        log_p, log_q = logits[0].log_softmax(-1), sample.logits.cpu().log_softmax(-1)
        attributes = {"fusionkv.recipe": sample.recipe.name, "fusionkv.corpus": sample.corpus}
        # For equal distributions, rounding may give a negative value, which a histogram drops.
        _kl.record(max(0.0, float((log_p.exp() * (log_p - log_q)).sum())), attributes)
        _answers.add(1, attributes | {"fusionkv.same_first_token": first, "fusionkv.same_answer": same})
        self._guard.record(sample.allowed, same)

    async def _again(self, sample: Sample) -> torch.Tensor:
        """float32 [answer tokens, vocabulary]: full attention's logits of every token of the answer."""
        prompt, answer = sample.prompt, sample.tokens
        # All but the question's last token first: a prefill without logits can be split, and yields to others.
        *question, last = prompt.question
        head = Prompt(prompt.system, prompt.chunks, tuple(question), prompt.tenant)
        async with self._loader.plain(prompt.tokens + len(answer)) as placement:
            fused = self._fuser.plain(placement, head)
            if head.tokens:
                work = fused.prefill()
                work.background = True
                await self._engine.run(work)
            result = await self._engine.run(fused.next([last, *answer[:-1]], logits=len(answer)))
        assert result.logits is not None
        return result.logits
