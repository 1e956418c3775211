"""The path of a question through the gateway: retrieve, plan, generate; and its spans and metrics.

They follow OpenTelemetry's GenAI conventions, and never contain the text of a question, a chunk or an answer.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from opentelemetry import metrics, trace
from opentelemetry.trace import SpanKind

from fusionkv.gateway import plan
from fusionkv.gateway.auth.tenants import Tenant
from fusionkv.gateway.client import results
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest.text import normal
from fusionkv.gateway.plan import Conversation, Passage, check_question
from fusionkv.gateway.prefixes import Prefixes
from fusionkv.gateway.retrieval.base import PROVIDER, HybridSearch, Query, check_corpus, check_worker, step, within
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.gateway.workers.workers import Check
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.contract.length import TooLong, prompt_tokens
from fusionkv.protos.contract.names import DEFAULT, full_name, recipe_label
from fusionkv.protos.contract.requests import RequestedRecipe
from fusionkv.protos.contract.template import check_variables
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.observe import telemetry
from fusionkv.protos.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    error_type,
)

tracer = trace.get_tracer(__name__)
_meter = metrics.get_meter(__name__)
_ttft = _meter.create_histogram(
    "fusionkv.gateway.ttft",
    unit="s",
    description="time from the arrival of a question to its first token",
    explicit_bucket_boundaries_advisory=telemetry.SECONDS,
)
_per_token = _meter.create_histogram(
    "fusionkv.gateway.time_per_token",
    unit="s",
    description="mean time between the tokens of an answer",
    explicit_bucket_boundaries_advisory=telemetry.SECONDS,
)
_chunks = _meter.create_counter("fusionkv.gateway.chunks", description="chunks in prompts, by the source of their KV")
Attributes = Mapping[str, str | bool | int | float | list[str]]
# Errors of a worker that computed nothing, because it is busy or its checks refused the request: the tokens of the
# prompt are given back.
_UNSERVED = (ResourceExhausted, Unavailable, InvalidArgument, FailedPrecondition)


class AnswerEngine(Protocol):
    """What answers prompts: the fusion workers, or vLLM behind them."""

    async def model(self, deadline: Deadline, check: Check = ...) -> Vocabulary:
        """Tokenizer and prompt template of the model, from a worker that passes `check`. Raises Unavailable."""

    async def rendered(self, vocabulary: Vocabulary, values: Mapping[str, str], deadline: Deadline) -> Vocabulary:
        """A vocabulary with values for variables of the chat template. Raises InvalidArgument and Unavailable."""

    async def ready(self, timeout: float) -> bool:
        """Whether prompts would be answered now, found out within `timeout` seconds."""

    def generate(
        self, request: fusion_pb2.GenerateRequest, deadline: Deadline
    ) -> AsyncGenerator[fusion_pb2.GenerateResponse]:
        """Streams the answer to one request."""

    async def close(self) -> None:
        """Closes all connections, those to the workers too."""


@dataclass(frozen=True, slots=True)
class _PlannedPrompt:
    """A worker's request for a prompt, the prompt's passages in order, and the name of the model."""

    request: fusion_pb2.GenerateRequest
    passages: Sequence[Passage]
    model: str
    retrieve_seconds: float
    plan_seconds: float


class Pipeline:
    """Answers questions over given passages, over the corpora in the retrieval engine, or without passages."""

    def __init__(self, config: GatewayConfig, engine: AnswerEngine, search: HybridSearch) -> None:
        self._config = config
        self._engine = engine
        self._search = search
        self._prefixes = Prefixes()

    async def retrieve(
        self, tenant: Tenant, query: Query, top_k: int, deadline: Deadline, vocabulary: Vocabulary | None = None
    ) -> list[Passage]:
        """The best passages for a question, best first; `top_k` 0 uses the configured number.

        Raises:
            InvalidArgument: the question, the corpus's name, top_k or the filter is invalid.
            DeadlineExceeded: retrieval did not end in time.
        """
        check_question(query.question)
        plan.check_filter(query.where)
        check_corpus(query.corpus)
        query = replace(query, question=normal(query.question))
        count = top_k or self._config.top_k
        if count > self._config.max_top_k:
            raise InvalidArgument(f"top_k is {count}: the maximum is {self._config.max_top_k}")
        attributes: dict[str, str | int] = {
            "gen_ai.data_source.id": query.corpus,
            "fusionkv.corpus": query.corpus,
            "fusionkv.top_k": count,
        }
        seconds = deadline.remaining()
        with within(deadline), step("gateway.retrieve", "retrieval", attributes):
            vocabulary = vocabulary or await self._model(tenant, query.corpus, deadline)
            # Embedders and rerankers do not know the caller's deadline.
            try:
                async with asyncio.timeout(deadline.remaining()):
                    results = await self._search.search(
                        tenant.retrieval, query, count, vocabulary.identity, tenant.salt
                    )
            except TimeoutError as error:
                raise DeadlineExceeded(f"retrieval took longer than the remaining {seconds:.1f} s") from error
            return [plan.retrieved(*best) for best in results]

    async def _model(
        self, tenant: Tenant, corpus: str, deadline: Deadline, check: Check = lambda _: None
    ) -> Vocabulary:
        """The model of a worker that passes `check`, and has the one that the corpus, if any, was built with."""
        if not corpus:
            return await self._engine.model(deadline, check)
        check_corpus(corpus)
        # Before the worker is called: an unknown corpus is reported as such even if no worker runs.
        with within(deadline):
            made_with = await tenant.retrieval.check(corpus)

        def check_both(model: fusion_pb2.GetModelResponse) -> None:
            check_worker(corpus, made_with, model)
            check(model)

        return await self._engine.model(deadline, check_both)

    def _recipe(self, request: pb.GenerateRequest, model: fusion_pb2.GetModelResponse) -> RequestedRecipe:
        """The recipe of a request, which a worker can follow. Raises InvalidArgument and FailedPrecondition."""
        recipe = RequestedRecipe.of(full_name(request.recipe or DEFAULT, self._config.recipe), model)
        recipe.check(request.ratio if request.HasField("ratio") else None, len(request.passages), model)
        if self._config.decode == "vllm":
            recipe.check_portable()
        return recipe

    async def answer(
        self, tenant: Tenant, request: pb.GenerateRequest, deadline: Deadline
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Answers a request: Sources, an Explanation if requested, tokens, a Summary."""
        began, seconds_given = time.perf_counter(), deadline.remaining()
        prompt = await self._planned(tenant, request, deadline)
        # Only after planning: a prompt over the model's length is an error, not half an answer.
        yield pb.GenerateResponse(sources=pb.Sources(passages=[source for _, source in prompt.passages]))
        tokens = prompt_tokens(prompt.request)
        tenant.meter.spend(tokens)
        ttft, finished = 0.0, False
        asked = prompt.request
        span = chat_span(prompt.model, asked.sampling, asked.recipe, len(asked.chunks))
        try:
            async with contextlib.aclosing(self._engine.generate(prompt.request, deadline)) as responses:
                async for response in _within(span, responses):
                    if deadline.passed:  # the tokens that it waited for are there
                        raise DeadlineExceeded(f"the answer was not read within {seconds_given:.1f} s")
                    if response.HasField("token"):
                        tenant.meter.spend(1)
                        if not ttft:
                            ttft = time.perf_counter() - began
                            record_first_token(ttft, prompt.request.recipe)
                        yield pb.GenerateResponse(token=response.token)
                    elif response.HasField("explanation"):
                        yield pb.GenerateResponse(explanation=response.explanation)
                    else:
                        _complete(response.summary, prompt, ttft, time.perf_counter() - began)
                        span.set_attributes(answer_attributes(response.summary, prompt.model))
                        _record_answer(response.summary, tenant.label)
                        finished = True
                        yield pb.GenerateResponse(summary=response.summary)
        except Exception as error:
            finished = True  # with an error, which the span records
            if not ttft and isinstance(error, _UNSERVED):
                tenant.meter.give_back(tokens)
            raise
        finally:
            if not finished:
                span.set_attribute("fusionkv.cancelled", True)
            span.end()

    async def _planned(self, tenant: Tenant, request: pb.GenerateRequest, deadline: Deadline) -> _PlannedPrompt:
        """Checks a request, and retrieves and orders its passages. Raises as `retrieve` and `plan.build`."""
        began = time.perf_counter()
        conversation = Conversation.of(request)
        plan.check(request, self._config.max_top_k)
        resolve = partial(self._recipe, request)
        vocabulary = await self._model(tenant, request.corpus, deadline, resolve)
        recipe = resolve(vocabulary.model)
        if values := dict(request.chat_template_kwargs):
            check_variables(values, vocabulary.model.template_variables)
            vocabulary = await self._engine.rendered(vocabulary, values, deadline)
        passages = await self._passages(tenant, request, conversation, vocabulary, deadline)
        if request.recipe in ("", DEFAULT):
            recipe = plan.as_encoded(recipe, passages, vocabulary)
        retrieved = time.perf_counter()
        with tracer.start_as_current_span("gateway.plan") as span:
            passages = self._ordered(tenant, request, conversation, vocabulary, passages)
            # Tokenising a long question takes up to 0.1 s, which must not block other requests.
            parts = request, conversation, recipe, passages, vocabulary, tenant.salt
            with _charged(tenant):
                worker_request = await asyncio.to_thread(plan.build, *parts)
            span.set_attributes({"fusionkv.chunks": len(passages), "fusionkv.recipe": recipe.name})
        seconds = retrieved - began, time.perf_counter() - retrieved
        return _PlannedPrompt(worker_request, passages, vocabulary.model.name, *seconds)

    async def sources(
        self, tenant: Tenant, request: pb.GenerateRequest, deadline: Deadline
    ) -> tuple[Vocabulary, list[Passage]]:
        """Checks a request; returns the model, and its passages in the order of the prompt. Raises as `answer`."""
        conversation = Conversation.of(request)
        plan.check(request, self._config.max_top_k)
        vocabulary = await self._model(tenant, request.corpus, deadline)
        check_variables(dict(request.chat_template_kwargs), vocabulary.model.template_variables)
        passages = await self._passages(tenant, request, conversation, vocabulary, deadline)
        return vocabulary, self._ordered(tenant, request, conversation, vocabulary, passages)

    async def _passages(
        self,
        tenant: Tenant,
        request: pb.GenerateRequest,
        conversation: Conversation,
        vocabulary: Vocabulary,
        deadline: Deadline,
    ) -> list[Passage]:
        """The passages of a request, or those that are retrieved, best first."""
        if not request.corpus:
            with _charged(tenant):
                return await asyncio.to_thread(plan.given, request.passages, vocabulary)
        query = Query(request.corpus, request.query or conversation.question, request.filter)
        return await self.retrieve(tenant, query, request.top_k, deadline, vocabulary)

    def _ordered(
        self,
        tenant: Tenant,
        request: pb.GenerateRequest,
        conversation: Conversation,
        vocabulary: Vocabulary,
        passages: list[Passage],
    ) -> list[Passage]:
        if request.order != pb.ORDER_PREFIX:
            return plan.order(passages, request.order or pb.ORDER_ENDS)
        begins = tenant.salt, vocabulary.model.fingerprint, conversation.system, request.prompt_template
        return self._prefixes.order((*begins, *sorted(request.chat_template_kwargs.items())), passages)


def _complete(summary: Summary, prompt: _PlannedPrompt, ttft: float, total: float) -> None:
    """Sets what the gateway knows of an answer in the worker's summary; `ttft` and `total` are seconds."""
    seconds = summary.seconds
    seconds.retrieve, seconds.plan, seconds.ttft, seconds.total = (
        prompt.retrieve_seconds, prompt.plan_seconds, ttft, total,
    )  # fmt: skip
    summary.chunks_retrieved, summary.model = len(prompt.passages), prompt.model
    summary.trace_id = telemetry.trace_id()


@contextlib.contextmanager
def _charged(tenant: Tenant) -> Iterator[None]:
    """A prompt that turns out to be too long costs the tokens that were made of it."""
    try:
        yield
    except TooLong as error:
        tenant.meter.spend(error.tokens)
        raise


async def _within(
    span: trace.Span, responses: AsyncIterator[fusion_pb2.GenerateResponse]
) -> AsyncGenerator[fusion_pb2.GenerateResponse]:
    """Makes `span` current while the next response is awaited, but not while the consumer handles it."""
    while True:
        with trace.use_span(span):
            try:
                response = await anext(responses, None)
            except Exception as error:
                span.set_attribute("error.type", error_type(error))
                raise
        if response is None:
            return
        yield response


def chat_span(model: str, sampling: fusion_pb2.Sampling, recipe: str, chunks: int) -> trace.Span:
    """Starts the span `chat <model>`."""
    sampled = {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    attributes: Attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.output.type": "text",
        # 0 means that the request did not set the field.
        **{f"gen_ai.request.{name}": value for name, value in sampled.items() if value},
        "fusionkv.recipe": recipe,
        "fusionkv.chunks": chunks,
    }
    return tracer.start_span(f"chat {model}", kind=SpanKind.CLIENT, attributes=attributes)


def record_first_token(seconds: float, recipe: str) -> None:
    """Records the time to a first token, within the request's span, which becomes the exemplar."""
    _ttft.record(seconds, {"fusionkv.recipe": recipe_label(recipe)})


def answer_attributes(summary: Summary, model: str) -> Attributes:
    """Attributes of the span `chat <model>` at its end."""
    attributes: dict[str, str | bool | int | float | list[str]] = {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [summary.finish_reason],
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.output_tokens": summary.tokens_generated,
        "gen_ai.usage.cache_read.input_tokens": results.cached_tokens(summary),
        "fusionkv.ratio": summary.ratio,
        "fusionkv.ttft": summary.seconds.ttft,
        "fusionkv.tokens.lossless": summary.tokens_lossless,
        "fusionkv.tokens.reused": summary.tokens_reused,
        "fusionkv.tokens.recomputed": summary.tokens_recomputed,
        "fusionkv.tokens.encoded": summary.tokens_encoded,
    }
    if summary.degraded:
        attributes["fusionkv.degraded"] = summary.degraded_reason
    if summary.ratio_raised:
        attributes["fusionkv.ratio.raised"] = summary.ratio_raised
    if summary.recipe_replaced:
        attributes["fusionkv.recipe.replaced"] = summary.recipe_replaced
    return attributes


def _record_answer(summary: Summary, tenant: str) -> None:
    """Records a finished answer. `tenant` is the tenant's label in telemetry."""
    seconds, generated = summary.seconds, summary.tokens_generated
    if generated > 1:
        _per_token.record(seconds.decode / (generated - 1), {"fusionkv.recipe": recipe_label(summary.recipe)})
    hits = [(hit.kind, hit.tier, hit.chunks) for hit in summary.hits]
    for kind, tier, chunks in (*hits, ("miss", "none", summary.chunks_missed)):
        if chunks:
            _chunks.add(chunks, {"fusionkv.kind": kind, "fusionkv.tier": tier, "fusionkv.tenant": tenant})
