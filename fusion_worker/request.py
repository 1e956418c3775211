"""Runs requests: queue, load, select, recompute, decode, stream. However a request ends, all it holds is freed."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from opentelemetry import trace

from fusionkv.fusion_worker import meters
from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.jobs import NextToken, Sampled
from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.compute.plan import PrefillPlan
from fusionkv.fusion_worker.compute.planner import Planner, Scored
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.eviction import evict
from fusionkv.fusion_worker.decode.sampling import NotFinite, Sampler, SamplingParams
from fusionkv.fusion_worker.decode.text import TextStream
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.load.lookup import CacheFault
from fusionkv.fusion_worker.meters import Stages, Summary
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Prompt, PromptLayout
from fusionkv.fusion_worker.quality.explain import explain
from fusionkv.fusion_worker.quality.ratio_guard import Allowed, RatioGuard
from fusionkv.fusion_worker.quality.shadow import Sample, Shadow
from fusionkv.fusion_worker.select.auxiliary import Auxiliary
from fusionkv.fusion_worker.select.base import budget
from fusionkv.fusion_worker.transfer.handover import Handover
from fusionkv.protos.answer.v1.answer_pb2 import Explanation, Token
from fusionkv.protos.contract.recipes import Recipe
from fusionkv.protos.deadline import NO_DEADLINE, Deadline
from fusionkv.protos.fusion.v1.fusion_pb2 import FirstToken, PrefilledKV
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import ResourceExhausted

_faults = logs.RateLimitedLog(logging.getLogger(__name__))
tracer = trace.get_tracer(__name__)
# Weight of the latest measurement in a moving average.
_SMOOTHING = 0.2
_MIN_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to answer.

    Attributes:
        recipe: how the context is reused and recomputed.
        ratio: share of context tokens to recompute, 0..1.
        explained: whether to yield an Explanation of the context first, as of the first token.
    """

    prompt: Prompt
    recipe: Recipe
    ratio: float
    params: SamplingParams
    explained: bool = False


class Admission:
    """Limits how many requests run and wait at once.

    Moving averages of the time that a request runs, and of its time to first token, predict the wait of the next one.
    """

    def __init__(self, places: int, queue: int) -> None:
        """places: maximum number of running requests. queue: maximum number of waiting requests."""
        self._places = places
        self._queue = queue
        self._free = asyncio.Semaphore(places)
        self._held: float | None = None
        self._first: float | None = None
        self.waiting = 0
        self.running = 0
        self.idle = asyncio.Event()
        """Set while no request runs or waits: work in the background may go on."""
        self.idle.set()

    @asynccontextmanager
    async def place(self, deadline: Deadline) -> AsyncIterator[None]:
        """Waits for a free place in order of arrival, and holds it while the context is open.

        Raises:
            ResourceExhausted: the queue is full, or the first token is not expected by the caller's deadline. Never
                raised while a place is free: a prediction that is too high is then corrected by running requests.
        """
        if self._free.locked():
            self._check(deadline)
        self.waiting += 1
        self.idle.clear()
        try:
            try:
                await self._free.acquire()
            finally:
                self.waiting -= 1
            self.running += 1
            began = time.perf_counter()
            try:
                yield
            finally:
                self._held = _averaged(self._held, time.perf_counter() - began)
                self.running -= 1
                self._free.release()
        finally:
            if self.waiting + self.running == 0:
                self.idle.set()

    def first_token(self, seconds: float) -> None:
        """Records the time from admission to the first token."""
        self._first = _averaged(self._first, seconds)

    def _check(self, deadline: Deadline) -> None:
        # Mean seconds until the next place becomes free.
        each = (self._held or 0.0) / self._places
        if self.waiting >= self._queue:
            meters.refused("queue")
            after = max(_MIN_RETRY_SECONDS, each)
            raise ResourceExhausted(
                f"{self.waiting} requests are already waiting: try again later", retry_after=after
            )
        expected = (self.waiting + 1) * each + (self._first or 0.0)
        remaining = deadline.remaining()
        if expected > remaining:
            meters.refused("deadline")
            raise ResourceExhausted(
                f"{self.waiting} requests are already waiting: the first token is expected in {expected:.1f} s, "
                f"and the deadline is in {remaining:.1f} s",
                retry_after=max(_MIN_RETRY_SECONDS, expected - remaining),
            )


class _Prefilled(NamedTuple):
    """A request after its prefill; `first` is the first token."""

    summary: Summary
    plan: PrefillPlan
    sampler: Sampler
    first: Sampled
    allowed: Allowed


class Answerer:
    """Answers prompts, up to `max_requests` at a time; further ones wait or are refused."""

    def __init__(
        self,
        config: WorkerConfig,
        model: Model,
        pool: KVPool,
        engine: Engine,
        loader: Loader,
        auxiliary: Auxiliary | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._pool = pool
        self._engine = engine
        self._loader = loader
        self._planner = Planner(model, engine, auxiliary)
        self.admission = Admission(config.max_requests, config.max_queue)
        self._ratio_guard = RatioGuard(config.shadow_floor)
        self.shadow = Shadow(
            config.shadow_share, self._ratio_guard, pool, engine, loader, self._planner, self.admission.idle
        )
        self.handover = Handover(pool, model, engine.tp, config.prefill_bytes, config.prefill_seconds)

    async def answer(
        self, request: Request, deadline: Deadline = NO_DEADLINE
    ) -> AsyncGenerator[Explanation | Token | Summary]:
        """Yields the answer's tokens as they are decoded, then one Summary. Closing the iterator frees everything.

        Raises:
            ResourceExhausted: the queue is full, the deadline can't be met, or the prompt does not fit the pool.
            FailedPrecondition: the model's logits are not finite.
        """
        answer: list[int] = []
        async with self._prefilled(request, deadline) as prefilled:
            summary = prefilled.summary
            if request.explained:
                yield self._explain(prefilled)
            async with aclosing(self._decode(prefilled, request.params)) as tokens:
                async for token in tokens:
                    answer.append(token.id)
                    yield token
        meters.answered(summary)
        if summary.first_logits is not None:
            self.shadow.offer(Sample(request.prompt, tuple(answer), summary.first_logits, prefilled.allowed))
        yield summary

    async def prefill(
        self, request: Request, deadline: Deadline = NO_DEADLINE
    ) -> AsyncGenerator[Explanation | FirstToken | PrefilledKV | Summary]:
        """Yields the first token of an answer, the KV of its prompt, and, once the KV is released, one Summary.

        The KV is freed when it is released or the iterator is closed. Parameters are those of `answer`.

        Raises:
            ResourceExhausted: as for `answer`, or there is no room for the KV.
            FailedPrecondition: as for `answer`.
        """
        prompt, max_tokens = request.prompt, request.params.max_tokens
        request = replace(request, params=replace(request.params, max_tokens=1))
        with self.handover.room(prompt.tokens) as held:
            async with self._prefilled(request, deadline) as prefilled:
                summary = prefilled.summary
                if request.explained:
                    yield self._explain(prefilled)
                text = TextStream(self._model.tokenizer, request.params.stop)
                token = self._next_token(prefilled.first.token, text, summary, request.params)
                more = summary.finish == "max_tokens" and max_tokens > 1
                finish, lossless = "" if more else summary.finish, not summary.reused
                yield FirstToken(token=token, finish_reason=finish, lossless=lossless, max_tokens=max_tokens)
                kv = await self.handover.fill(held, prefilled.plan, prompt) if more else None
            if kv is not None:
                yield kv
                unused = await self.handover.released(held)
                summary.degraded = summary.degraded or unused
            yield summary

    @asynccontextmanager
    async def _prefilled(self, request: Request, deadline: Deadline) -> AsyncIterator[_Prefilled]:
        """Computes an answer's first token; frees what the request holds on exit. Raises as `answer` does."""
        prompt, recipe, params = request.prompt, request.recipe, request.params
        arrived = time.perf_counter()
        summary = Summary(prompt, recipe, request.ratio)
        allowed = self._ratio_guard.ratio(recipe, prompt.corpus, request.ratio)
        summary.ratio, summary.raised = allowed.ratio, allowed.why
        stages, sampler = summary.stages, Sampler(params)
        async with AsyncExitStack() as stack:
            with tracer.start_as_current_span("fusionkv.queue"), stages.clock("queue"):
                await stack.enter_async_context(self.admission.place(deadline))
            held = await stack.enter_async_context(AsyncExitStack())
            plan = await self._prepare(held, summary, params)
            try:
                first = await self._first(plan, summary, sampler, params)
            except NotFinite as error:
                if not plan.layout.parts:
                    raise
                # Only reused KV may be to blame.
                await self._loader.discard(plan.layout.parts)
                await held.aclose()
                self._degrade(summary, CacheFault(f"with the reused KV, {error}"))
                plan = await self._plain(held, summary, params)
                first = await self._first(plan, summary, sampler, params)
            stages = summary.stages  # replaced if the cache failed
            stages.seconds["ttft"] = time.perf_counter() - arrived
            self.admission.first_token(stages.seconds["ttft"] - stages.seconds["queue"])
            meters.first_token(summary)
            yield _Prefilled(summary, plan, sampler, first, allowed)

    async def _first(self, plan: PrefillPlan, summary: Summary, sampler: Sampler, params: SamplingParams) -> Sampled:
        """Computes a plan's rows and the first token."""
        shadowed, votes = self._shadowed(summary, params), len(summary.prompt.question) if summary.kept else 0
        with tracer.start_as_current_span("fusionkv.prefill") as span, summary.stages.clock("prefill"):
            span.set_attribute("fusionkv.rows", len(plan.ids))
            first = await self._engine.run(plan.prefill(NextToken(sampler, shadowed, votes)))
            summary.recomputed = len(plan.chosen)
        if first.logits is not None:
            summary.first_logits = first.logits.clone()  # not a view of all rows of the step
        return first

    def _shadowed(self, summary: Summary, params: SamplingParams) -> bool:
        """Whether to repeat the answer with full attention: only a greedy answer that may differ from it."""
        may_differ = not summary.recipe.lossless and summary.ratio < 1.0 and not summary.degraded
        return may_differ and params.temperature == 0.0 and self.shadow.wants()

    async def _prepare(self, stack: AsyncExitStack, summary: Summary, params: SamplingParams) -> PrefillPlan:
        """Loads the context as the recipe says; plans a full prefill when the cache fails (fail open)."""
        prompt, recipe = summary.prompt, summary.recipe
        kept = summary.kept
        if recipe.encode is not None:

            def fresh(stale: int) -> int:
                chosen = budget(summary.ratio, prompt.context_tokens, stale)
                links = recipe.links * len(prompt.chunks)
                return chosen + links + len(prompt.question) + params.max_tokens + kept

            early = self._planner.score_early(prompt, recipe, summary.ratio)
            try:
                # Frees the slots before the plain prefill waits for room: the auxiliary model may fail after loading.
                async with AsyncExitStack() as held:
                    loading = self._loader.prompt(prompt, fresh, summary.stages, recipe.encode)
                    plan = await self._plan(await held.enter_async_context(loading), summary, early)
                    await stack.enter_async_context(held.pop_all())
                    return plan
            except CacheFault as fault:
                self._degrade(summary, fault)
            finally:
                if early is not None:
                    early.cancel()
        return await self._plain(stack, summary, params)

    def _degrade(self, summary: Summary, fault: CacheFault) -> None:
        """Notes that the prompt is prefilled in full."""
        _faults.warning("the cache failed; the prompt is prefilled in full", fault)
        summary.degraded, summary.ratio = str(fault), 1.0
        summary.lossless = 0
        # The hits were not used: keep only the seconds.
        summary.stages = Stages(seconds=summary.stages.seconds)
        meters.degraded(summary.recipe.name)
        trace.get_current_span().set_attribute("fusionkv.degraded", str(fault))

    async def _plain(self, stack: AsyncExitStack, summary: Summary, params: SamplingParams) -> PrefillPlan:
        """Plans a full prefill without reused KV."""
        prompt = summary.prompt
        with summary.stages.clock("load"):
            layout = await stack.enter_async_context(self._loader.plain(prompt.tokens + params.max_tokens))
        return self._planner.plain(layout, prompt)

    async def _plan(
        self, layout: PromptLayout, summary: Summary, early: "asyncio.Task[Scored] | None"
    ) -> PrefillPlan:
        """Selects the tokens to recompute, and fills in the summary's token counts."""
        prompt = summary.prompt
        with tracer.start_as_current_span("fusionkv.select") as span, summary.stages.clock("select"):
            scored = await early if early is not None else None
            plan = await self._planner.fuse(layout, prompt, summary.recipe, summary.ratio, scored)
            span.set_attributes({"fusionkv.rows": plan.scored_rows, "fusionkv.tokens": len(plan.chosen)})
        summary.lossless = prompt.context_tokens - int(plan.stale.sum())
        return plan

    def _explain(self, prefilled: _Prefilled) -> Explanation:
        summary = prefilled.summary
        return explain(summary.prompt, prefilled.plan, summary.stages, self._model.tokenizer)

    async def _decode(self, prefilled: _Prefilled, params: SamplingParams) -> AsyncGenerator[Token]:
        summary, plan, sampled = prefilled.summary, prefilled.plan, prefilled.first
        text = TextStream(self._model.tokenizer, params.stop)
        started = time.perf_counter()
        # Not made the current span: a generator runs in its caller's context.
        span = tracer.start_span("fusionkv.decode")
        try:
            with self._engine.streaming():
                while True:
                    token = self._next_token(sampled.token, text, summary, params)
                    yield token
                    if summary.finish:
                        break
                    if sampled.votes is not None:
                        assert summary.recipe.keep is not None
                        keep, tp = summary.recipe.keep, self._engine.tp
                        plan = await evict(plan, keep, sampled.votes, self._pool, self._model, tp)
                    sampled = await self._engine.run(plan.next([token.id], NextToken(prefilled.sampler)))
                    plan = plan.followed_by([token.id])
        finally:
            span.set_attribute("fusionkv.tokens", summary.generated)
            span.end()
        summary.stages.seconds["decode"] = time.perf_counter() - started

    def _next_token(self, token: int, text: TextStream, summary: Summary, params: SamplingParams) -> Token:
        """A token with the text that it completes; sets `summary.finish` at the last token."""
        summary.generated += 1
        if token in self._model.ends:
            summary.finish = "end"
            return Token(id=token, text=text.flush())
        piece = text.push(token)
        if text.stopped:
            summary.finish = "stop_string"
        elif summary.generated == params.max_tokens:
            summary.finish = "max_tokens"
            piece += text.flush()
        return Token(id=token, text=piece)


def _averaged(before: float | None, value: float) -> float:
    """An exponential moving average with another measurement; None before the first one."""
    return value if before is None else before + _SMOOTHING * (value - before)
