"""The life of a request: queue, load, select, recompute, decode, stream; whatever happens, everything is freed."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from opentelemetry import trace

from fusionkv.fusion_worker import meters
from fusionkv.fusion_worker.admission import Admission
from fusionkv.fusion_worker.auxiliary.auxiliary import Auxiliary
from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.forward_job import Result
from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.compute.planner import Planner, Scored
from fusionkv.fusion_worker.compute.prefill_plan import PrefillPlan
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.correct.corrector import Corrector
from fusionkv.fusion_worker.decode.adaptive_ratio import step
from fusionkv.fusion_worker.decode.eviction import evict
from fusionkv.fusion_worker.decode.sampling import Sampler, SamplingParams
from fusionkv.fusion_worker.decode.text import TextStream
from fusionkv.fusion_worker.load.loader import Loader
from fusionkv.fusion_worker.load.lookup import CacheFault
from fusionkv.fusion_worker.load.placement import PromptLayout, Stages
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.quality.explain import explain
from fusionkv.fusion_worker.quality.fallback import Allowed, Fallback
from fusionkv.fusion_worker.quality.shadow import Sample, Shadow
from fusionkv.fusion_worker.recipes.recipes import Recipe
from fusionkv.fusion_worker.select.choose import budget
from fusionkv.fusion_worker.summary import Summary
from fusionkv.fusion_worker.transfer.handover import Handover
from fusionkv.protos.answer.v1.answer_pb2 import Explanation
from fusionkv.protos.fusion.v1.fusion_pb2 import PrefilledKV
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import FailedPrecondition

_faults = logs.RateLimitedLog(logging.getLogger(__name__))
tracer = trace.get_tracer(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token and the text it completes."""

    token: int
    text: str


@dataclass(frozen=True, slots=True)
class FirstPiece:
    """The first token of an answer.

    finish: as in Summary, empty if others may follow. lossless: whether the prompt's KV is full attention's.
    """

    piece: Piece
    finish: str
    lossless: bool


class _Begun(NamedTuple):
    """An answer up to its first token, which `result` has."""

    summary: Summary
    plan: PrefillPlan
    sampler: Sampler
    result: Result
    allowed: Allowed


class Answerer:
    """Answers prompts: as many at once as the configuration says, the rest wait or are refused."""

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
        self._fuser = Planner(model, engine, auxiliary)
        self.corrector = Corrector(model, pool, engine, loader)
        self._guard = Fallback(config.shadow_floor)
        self.shadow = Shadow(config.shadow_share, self._guard, pool, engine, loader, self._fuser)
        self._active = 0
        self.handover = Handover(pool, model, engine.tp, config.prefill_bytes, config.prefill_seconds)
        self.admission = Admission(config.max_requests, config.max_queue)
        meters.observe(self.admission.load, pool)

    def unusable(self, recipe: Recipe) -> str:
        """Why the model can't follow a recipe; empty: it can."""
        try:
            self._fuser.check(recipe, 0)
        except FailedPrecondition as error:
            return str(error)
        return ""

    async def answer(
        self,
        prompt: Prompt,
        recipe: Recipe,
        ratio: float,
        params: SamplingParams,
        corpus: str = "",
        explained: bool = False,
        left: float | None = None,
    ) -> AsyncGenerator[Explanation | Piece | Summary]:
        """Pieces of the answer as they come, then one Summary. Closing the iterator frees everything.

        corpus: where the chunks come from; quality is watched for each apart. explained: an Explanation comes first,
        of the context that the first token came from. left: seconds until the caller's deadline, None without one.

        Raises:
            ResourceExhausted: too many wait, or too many for the deadline, or the prompt does not fit the pool.
            FailedPrecondition: the model can't follow the recipe.
        """
        answer: list[int] = []
        async with self._begun(prompt, recipe, ratio, params, corpus, left) as begun:
            summary = begun.summary
            if explained:
                yield self._explain(begun)
            async with aclosing(self._decode(begun, params)) as pieces:
                async for piece in pieces:
                    answer.append(piece.token)
                    yield piece
        meters.answered(summary)
        if recipe.encode is not None and recipe.encode.corrected:
            self.corrector.offer(prompt, corpus)
        if summary.first_logits is not None:
            sample = Sample(prompt, recipe, corpus, tuple(answer), summary.first_logits, begun.allowed)
            self.shadow.offer(sample)
        yield summary

    async def prefill(
        self,
        prompt: Prompt,
        recipe: Recipe,
        ratio: float,
        params: SamplingParams,
        corpus: str = "",
        explained: bool = False,
        left: float | None = None,
    ) -> AsyncGenerator[Explanation | FirstPiece | PrefilledKV | Summary]:
        """The first piece of an answer, the KV of its prompt, then, once that was released, one Summary.

        The KV is there until then, and no longer than the iterator is open. Parameters as for `answer`.

        Raises:
            ResourceExhausted: as for `answer`, or there is no room for the KV.
            FailedPrecondition: as for `answer`, or no other engine can go on from what the recipe makes.
        """
        if not recipe.portable:
            raise FailedPrecondition(f"an answer by {recipe.name} is decoded by the fusion worker alone")
        most, params = params.max_tokens, replace(params, max_tokens=1)
        with self.handover.room(prompt.tokens) as held:
            async with self._begun(prompt, recipe, ratio, params, corpus, left) as begun:
                summary = begun.summary
                if explained:
                    yield self._explain(begun)
                text = TextStream(self._model.tokenizer, params.stop)
                piece = self._read(begun.result, text, summary, params)
                more = summary.finish == "max_tokens" and most > 1
                yield FirstPiece(piece, "" if more else summary.finish, lossless=not summary.reused)
                kv = await self.handover.fill(held, begun.plan, prompt) if more else None
            meters.context(summary)
            if recipe.encode is not None and recipe.encode.corrected:
                self.corrector.offer(prompt, corpus)
            if kv is not None:
                yield kv
                unused = await self.handover.released(held)
                summary.degraded = summary.degraded or unused
            yield summary

    @asynccontextmanager
    async def _begun(
        self,
        prompt: Prompt,
        recipe: Recipe,
        ratio: float,
        params: SamplingParams,
        corpus: str,
        left: float | None,
    ) -> AsyncIterator[_Begun]:
        """An answer up to its first token. What it holds is given back on leaving. Raises as `answer` does."""
        self._fuser.check(recipe, len(prompt.chunks))
        arrived = time.perf_counter()
        summary = Summary(prompt, self._loader.laid(prompt, recipe.encode), recipe, ratio)
        allowed = self._guard.ratio(recipe, corpus, ratio)
        summary.ratio, summary.raised = allowed.ratio, allowed.why
        stages, sampler = summary.stages, Sampler(params)
        async with AsyncExitStack() as stack:
            with tracer.start_as_current_span("fusionkv.queue"), stages.clock("queue"):
                self._enter(stack)
                await stack.enter_async_context(self.admission.place(left))
            plan = await self._prepare(stack, summary, params, corpus)
            stages = summary.stages  # others, if the cache failed
            watched = self._watched(summary, params)
            with tracer.start_as_current_span("fusionkv.prefill") as span, stages.clock("prefill"):
                span.set_attribute("fusionkv.rows", len(plan.ids))
                votes = len(prompt.question) if summary.kept else 0
                plan, result = await step(self._engine, plan, (), sampler, int(watched), votes)
                summary.recomputed = len(plan.chosen)
            if watched and result.logits is not None:
                summary.first_logits = result.logits[0]
            stages.seconds["ttft"] = time.perf_counter() - arrived
            self.admission.first_token(stages.seconds["ttft"] - stages.seconds["queue"])
            meters.first_token(summary)
            yield _Begun(summary, plan, sampler, result, allowed)

    def _watched(self, summary: Summary, params: SamplingParams) -> bool:
        """Whether the answer is to be made again by full attention: a greedy one that may differ from it."""
        may_differ = not summary.recipe.lossless and summary.ratio < 1.0 and not summary.degraded
        return may_differ and params.temperature == 0.0 and self.shadow.wants()

    def _enter(self, stack: AsyncExitStack) -> None:
        self._active += 1
        self.shadow.idle.clear()
        self.corrector.idle.clear()
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._active -= 1
        if self._active == 0:
            self.shadow.idle.set()
            self.corrector.idle.set()

    async def _prepare(
        self, stack: AsyncExitStack, summary: Summary, params: SamplingParams, corpus: str
    ) -> PrefillPlan:
        """The prompt's context, reused as the recipe says; by plain prefill when the cache fails (fail open)."""
        prompt, recipe = summary.laid, summary.recipe
        kept = summary.kept
        # Where a chunk's text is gone, all of it recomputed is a prompt without anything reused.
        if recipe.encode is not None and not (recipe.anchored and summary.ratio == 1.0):

            def fresh(stale: int) -> int:
                chosen = budget(summary.ratio, prompt.context_tokens, stale)
                links = recipe.links * len(prompt.chunks)
                return chosen + links + len(prompt.question) + params.max_tokens + kept

            corrects = recipe.encode.corrected
            correction = await self.corrector.find(prompt.tenant, corpus) if corrects else None
            early = self._fuser.score_early(prompt, recipe, summary.ratio)
            try:
                # Let go before the plain prefill waits for room: the fault may come from the second model, later.
                async with AsyncExitStack() as held:
                    loading = self._loader.prompt(prompt, fresh, summary.stages, recipe.encode, correction)
                    fused = await self._fuse(await held.enter_async_context(loading), summary, early)
                    await stack.enter_async_context(held.pop_all())
                    return fused
            except CacheFault as fault:
                _faults.warning("answered by plain prefill", fault)
                summary.degraded, summary.ratio = str(fault), 1.0
                # What was found served no one: only the time it took counts.
                summary.stages = Stages(seconds=summary.stages.seconds)
                meters.degraded(recipe.name)
                trace.get_current_span().set_attribute("fusionkv.degraded", str(fault))
            finally:
                if early is not None:
                    early.cancel()
        prompt = summary.prompt
        with summary.stages.clock("load"):
            placement = await stack.enter_async_context(self._loader.plain(prompt.tokens + params.max_tokens))
        summary.recomputed = prompt.context_tokens
        return self._fuser.plain(placement, prompt)

    async def _fuse(
        self, placement: PromptLayout, summary: Summary, early: "asyncio.Task[Scored] | None"
    ) -> PrefillPlan:
        prompt = summary.laid
        with tracer.start_as_current_span("fusionkv.select") as span, summary.stages.clock("select"):
            scored = await early if early is not None else None
            fused = await self._fuser.fuse(placement, prompt, summary.recipe, summary.ratio, scored)
            span.set_attributes({"fusionkv.rows": fused.scored_rows, "fusionkv.tokens": len(fused.chosen)})
        summary.lossless = prompt.context_tokens - int(fused.stale.sum())
        summary.recomputed = len(fused.chosen)
        summary.corrected = sum(part.wanted.correction is not None for part in placement.parts)
        return fused

    def _explain(self, begun: _Begun) -> Explanation:
        summary = begun.summary
        return explain(summary.prompt, begun.plan, summary.stages, self._model.tokenizer)

    async def _decode(self, begun: _Begun, params: SamplingParams) -> AsyncGenerator[Piece]:
        """Draws tokens until the answer ends."""
        summary, plan, result = begun.summary, begun.plan, begun.result
        text, answer = TextStream(self._model.tokenizer, params.stop), list[int]()
        started = time.perf_counter()
        # Not made current: this generator is left and entered again by its caller's context.
        span = tracer.start_span("fusionkv.decode")
        try:
            with self._engine.streaming():
                while True:
                    piece = self._read(result, text, summary, params)
                    yield piece
                    if summary.finish:
                        break
                    if result.votes is not None:
                        assert summary.recipe.keep is not None
                        keep, tp = summary.recipe.keep, self._engine.tp
                        await evict(plan, keep, result.votes, self._pool, self._model, tp)
                    answer.append(piece.token)
                    plan, result = await step(self._engine, plan, answer, begun.sampler)
                    summary.recomputed = len(plan.chosen)
        finally:
            span.set_attribute("fusionkv.tokens", summary.generated)
            span.end()
            meters.context(summary)
        summary.stages.seconds["decode"] = time.perf_counter() - started

    def _read(self, result: Result, text: TextStream, summary: Summary, params: SamplingParams) -> Piece:
        """The token of a step with the text that it completes; sets `summary.finish` when it is the last."""
        token = result.token
        assert token is not None
        summary.generated += 1
        if token in self._model.ends:
            summary.finish = "end"
            return Piece(token, text.flush())
        piece = text.push(token)
        if text.stopped:
            summary.finish = "stop_string"
        elif summary.generated == params.max_tokens:
            summary.finish = "max_tokens"
            piece += text.flush()
        return Piece(token, piece)
