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
from fusionkv.fusion_worker.compute.plan import PrefillPlan
from fusionkv.fusion_worker.compute.planner import Planner
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.eviction import evict
from fusionkv.fusion_worker.decode.sampling import NotFinite, Sampler, SamplingParams
from fusionkv.fusion_worker.decode.text import TextStream
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.load.lookup import CacheFault
from fusionkv.fusion_worker.meters import LoadFigures, PrefillFigures, Stopwatch, Summary
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.prompt import Prompt
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

        Raises ResourceExhausted if the queue is full, or the first token is not expected by the caller's deadline;
        never while a place is free: a prediction that is too high is then corrected by running requests.
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


class _Planned(NamedTuple):
    """A plan of a prompt's prefill.

    loaded: figures of the chunks that it uses. kept: context tokens to keep after the first token; 0 keeps all.
    degraded: why the cache is not used; empty if it is.
    """

    plan: PrefillPlan
    loaded: LoadFigures = LoadFigures()
    kept: int = 0
    degraded: str = ""


class _Prefilled(NamedTuple):
    """A request after its prefill. stopwatch: goes on. first: the first token."""

    figures: PrefillFigures
    stopwatch: Stopwatch
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
            config.shadow_share, self._ratio_guard, engine, loader, self._planner, self.admission.idle
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
        answer, finish = list[int](), ""
        async with self._prefilled(request, deadline) as prefilled:
            if request.explained:
                yield await self._explain(prefilled)
            async with aclosing(self._decode(prefilled, request)) as tokens:
                async for token, ending in tokens:
                    answer.append(token.id)
                    finish = ending
                    yield token
        summary = Summary(prefilled.figures, finish, len(answer), dict(prefilled.stopwatch.seconds))
        meters.answered(summary)
        if (logits := prefilled.first.logits) is not None:
            self.shadow.offer(Sample(request.prompt, tuple(answer), logits, prefilled.allowed))
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
                if request.explained:
                    yield await self._explain(prefilled)
                text = TextStream(self._model.tokenizer, request.params.stop)
                token, finish = self._next_token(prefilled.first.token, text, last=True)
                more = finish == "max_tokens" and max_tokens > 1
                yield FirstToken(
                    token=token,
                    finish_reason="" if more else finish,
                    lossless=not prefilled.figures.reused,
                    max_tokens=max_tokens,
                )
                kv = await self.handover.fill(held, prefilled.plan, prompt) if more else None
            unused = ""
            if kv is not None:
                yield kv
                unused = await self.handover.released(held)
            yield Summary(prefilled.figures, finish, 1, dict(prefilled.stopwatch.seconds), unused)

    @asynccontextmanager
    async def _prefilled(self, request: Request, deadline: Deadline) -> AsyncIterator[_Prefilled]:
        """Computes an answer's first token; frees what the request holds on exit. Raises as `answer` does."""
        prompt, recipe = request.prompt, request.recipe
        arrived = time.perf_counter()
        allowed = self._ratio_guard.ratio(recipe, prompt.corpus, request.ratio)
        request = replace(request, ratio=allowed.ratio)
        stopwatch, sampler = Stopwatch(), Sampler(request.params)
        async with AsyncExitStack() as stack:
            with tracer.start_as_current_span("fusionkv.queue"), stopwatch.clock("queue"):
                await stack.enter_async_context(self.admission.place(deadline))
            held = await stack.enter_async_context(AsyncExitStack())
            planned = await self._prepare(held, request, stopwatch, raised=bool(allowed.why))
            try:
                first = await self._first(planned, request, sampler, stopwatch)
            except NotFinite as error:
                if not planned.plan.layout.parts:
                    raise
                # Only reused KV may be to blame.
                await self._loader.loads.discard(planned.plan.layout.parts)
                await held.aclose()
                planned = await self._fall_back(held, request, stopwatch, CacheFault(f"with the reused KV, {error}"))
                first = await self._first(planned, request, sampler, stopwatch)
            stopwatch.seconds["ttft"] = time.perf_counter() - arrived
            self.admission.first_token(stopwatch.seconds["ttft"] - stopwatch.seconds["queue"])
            plan = planned.plan
            figures = PrefillFigures(
                prompt,
                recipe,
                ratio=1.0 if planned.degraded else request.ratio,
                loaded=planned.loaded,
                lossless=plan.lossless_tokens,
                recomputed=len(plan.chosen),
                raised=allowed.why,
                degraded=planned.degraded,
            )
            meters.first_token(figures, stopwatch.seconds)
            yield _Prefilled(figures, stopwatch, plan, sampler, first, allowed)

    async def _first(self, planned: _Planned, request: Request, sampler: Sampler, stopwatch: Stopwatch) -> Sampled:
        """Computes a plan's rows and the first token; with its logits, if the answer is to be repeated."""
        votes = len(request.prompt.question) if planned.kept else 0
        output = NextToken(sampler, self._shadowed(request, planned), votes)
        with tracer.start_as_current_span("fusionkv.prefill") as span, stopwatch.clock("prefill"):
            span.set_attribute("fusionkv.rows", len(planned.plan.ids))
            first = await self._engine.run(planned.plan.prefill(output))
        if first.logits is None:
            return first
        return replace(first, logits=first.logits.clone())  # not a view of all rows of the step

    def _shadowed(self, request: Request, planned: _Planned) -> bool:
        """Whether to repeat the answer with full attention: only a greedy answer that may differ from it."""
        approximate = not request.recipe.lossless and (request.ratio < 1.0 or planned.kept > 0)
        may_differ = approximate and not planned.degraded
        return may_differ and request.params.temperature == 0.0 and self.shadow.wants()

    async def _prepare(self, stack: AsyncExitStack, request: Request, stopwatch: Stopwatch, raised: bool) -> _Planned:
        """Loads the context as the recipe says; plans a full prefill when the cache fails (fail open).

        raised: whether the ratio is higher than the requested one.
        """
        recipe, ratio, max_tokens = request.recipe, request.ratio, request.params.max_tokens
        if recipe.encode is None:
            return _Planned(await self._plain(stack, request, stopwatch))
        prompt = request.prompt
        kept = 0 if raised and ratio == 1.0 else recipe.kept(prompt.context_tokens)

        def fresh(stale: int) -> int:
            chosen = budget(ratio, prompt.context_tokens, stale)
            links = recipe.links * len(prompt.chunks)
            return chosen + links + len(prompt.question) + max_tokens + kept

        early = self._planner.score_early(prompt, recipe, ratio)
        try:
            # Frees the slots before the plain prefill waits for room: the auxiliary model may fail after loading.
            async with AsyncExitStack() as held:
                loading = self._loader.prompt(prompt, fresh, stopwatch, recipe.encode)
                loaded = await held.enter_async_context(loading)
                with tracer.start_as_current_span("fusionkv.select") as span, stopwatch.clock("select"):
                    scored = await early if early is not None else None
                    plan = await self._planner.fuse(loaded.layout, prompt, recipe, ratio, scored)
                    span.set_attributes({"fusionkv.rows": plan.scored_rows, "fusionkv.tokens": len(plan.chosen)})
                await stack.enter_async_context(held.pop_all())
                return _Planned(plan, loaded.figures, kept)
        except CacheFault as error:
            fault = error
        finally:
            if early is not None:
                early.cancel()
        return await self._fall_back(stack, request, stopwatch, fault)

    async def _fall_back(
        self, stack: AsyncExitStack, request: Request, stopwatch: Stopwatch, fault: CacheFault
    ) -> _Planned:
        """Plans a full prefill because the cache failed, and reports that."""
        _faults.warning("the cache failed; the prompt is prefilled in full", fault)
        meters.degraded(request.recipe.name)
        trace.get_current_span().set_attribute("fusionkv.degraded", str(fault))
        return _Planned(await self._plain(stack, request, stopwatch), degraded=str(fault))

    async def _plain(self, stack: AsyncExitStack, request: Request, stopwatch: Stopwatch) -> PrefillPlan:
        """Plans a full prefill without reused KV."""
        prompt = request.prompt
        with stopwatch.clock("load"):
            loading = self._loader.plain(prompt.tokens + request.params.max_tokens)
            layout = await stack.enter_async_context(loading)
        return self._planner.plain(layout, prompt)

    async def _explain(self, prefilled: _Prefilled) -> Explanation:
        figures, tokenizer = prefilled.figures, self._model.tokenizer
        # In a thread: 32,000 tokens take 0.2 s.
        return await asyncio.to_thread(explain, figures.prompt, prefilled.plan, figures.loaded.origins, tokenizer)

    async def _decode(self, prefilled: _Prefilled, request: Request) -> AsyncGenerator[tuple[Token, str]]:
        """Yields the answer's tokens, each with why it is the last one; empty if it is not."""
        plan, sampled, output = prefilled.plan, prefilled.first, NextToken(prefilled.sampler)
        text = TextStream(self._model.tokenizer, request.params.stop)
        started, generated = time.perf_counter(), 0
        # Not made the current span: a generator runs in its caller's context.
        span = tracer.start_span("fusionkv.decode")
        try:
            with self._engine.streaming():
                while True:
                    generated += 1
                    last = generated == request.params.max_tokens
                    token, finish = self._next_token(sampled.token, text, last)
                    yield token, finish
                    if finish:
                        break
                    if sampled.votes is not None:
                        assert request.recipe.keep is not None
                        keep, tp = request.recipe.keep, self._engine.tp
                        plan = await evict(plan, keep, sampled.votes, self._pool, self._model, tp)
                    sampled = await self._engine.run(plan.next([token.id], output))
                    plan = plan.followed_by([token.id])
        finally:
            span.set_attribute("fusionkv.tokens", generated)
            span.end()
        prefilled.stopwatch.seconds["decode"] = time.perf_counter() - started

    def _next_token(self, token: int, text: TextStream, last: bool) -> tuple[Token, str]:
        """A token with the text that it completes, and why the answer ends with it; empty if it goes on.

        last: whether it is the last token that the request allows.
        """
        if token in self._model.ends:
            return Token(id=token, text=text.flush()), "end"
        piece = text.push(token)
        if text.stopped:
            return Token(id=token, text=piece), "stop_string"
        if last:
            return Token(id=token, text=piece + text.flush()), "max_tokens"
        return Token(id=token, text=piece), ""


def _averaged(before: float | None, value: float) -> float:
    """An exponential moving average with another measurement; None before the first one."""
    return value if before is None else before + _SMOOTHING * (value - before)
