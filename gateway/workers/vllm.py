"""vLLM as the decoder: a worker prefills the prompt, and vLLM fetches its KV; or vLLM has the worker's engine."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import ssl
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from opentelemetry import propagate

from fusionkv.gateway.config import GatewayConfig, secret
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.gateway.workers.workers import Check, WorkerPool
from fusionkv.protos.answer.v1 import answer_pb2
from fusionkv.protos.contract.length import prompt_tokens
from fusionkv.protos.contract.names import full_name
from fusionkv.protos.contract.requests import signed_seed
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import errors
from fusionkv.protos.runtime.errors import DeadlineExceeded, ResourceExhausted, ServiceError, Unavailable

_faults = logs.RateLimitedLog(logging.getLogger(__name__))
_CONNECT_SECONDS = 5.0
# Wait for the worker's summary after the last token; the summary is sent as soon as vLLM has loaded the KV.
_SUMMARY_SECONDS = 2.0
# Wait for a worker to describe its model, once that is known: a hung worker must not use up the caller's deadline.
_MODEL_SECONDS = 2.0
# Prompts remembered, of 300 bytes and a summary each.
_MAX_REMEMBERED = 4096
_FINISHED = {"stop": "end", "length": "max_tokens"}
# Errors of a worker after which vLLM computes the prompt itself; other errors are the request's fault.
_NO_PREFILL = (Unavailable, ResourceExhausted, DeadlineExceeded)


_Stream = AsyncGenerator[tuple[str, pb.PrefillResponse]]


async def _next(stream: _Stream, deadline: Deadline) -> tuple[str, pb.PrefillResponse]:
    """The next response of a worker. Raises as `WorkerPool.prefill`, and DeadlineExceeded."""
    try:
        async with asyncio.timeout(deadline.remaining()):
            return await anext(stream)
    except TimeoutError as error:
        raise DeadlineExceeded("no worker prefilled the prompt in time") from error
    except StopAsyncIteration as error:
        raise Unavailable("a worker ended its prefill early") from error


@dataclass(slots=True)
class _Prefilled:
    """How vLLM gets a prompt's KV, and the stream of the worker's call, which ends with a summary.

    Attributes:
        parameters: those that vLLM's connector reads.
        promised: whether vLLM computes the KV, each time that its prefix cache has lost it.
    """

    parameters: dict[str, Any]
    stream: _Stream
    promised: bool = False

    async def summary(self) -> answer_pb2.Summary:
        """The summary of the prefill, sent once vLLM has released the KV, or ended the request."""
        try:
            async with asyncio.timeout(_SUMMARY_SECONDS):
                async for _, response in self.stream:
                    if response.HasField("summary"):
                        return response.summary
            return _degraded("a worker ended its prefill early")
        except TimeoutError:
            return _degraded("vLLM did not fetch the prompt's KV")
        except ServiceError as error:
            return _degraded(str(error))


def _handed(worker: str, kv: pb.PrefilledKV) -> dict[str, Any]:
    """The parameters of KV that a worker holds (vllm_connector/prompts.py)."""
    names = ("handle", "prompt_digest", "model_fingerprint", "checksum")
    numbers = {name: getattr(kv, name) for name in ("tokens", "layers", "kv_heads", "head_dim", "dtype", "path")}
    return {"worker": worker, **{name: getattr(kv, name).hex() for name in names}, **numbers}


def _promised(request: pb.GenerateRequest, ticket: bytes) -> dict[str, Any]:
    """The parameters of KV that vLLM computes (vllm_connector/spans.py)."""
    ends = itertools.accumulate((len(chunk.ids) for chunk in request.chunks), initial=len(request.system.ids))
    ratio = {"ratio": request.ratio} if request.HasField("ratio") else {}
    labels = {name: getattr(request, name) for name in ("recipe", "tenant", "corpus")}
    return {"spans": list(itertools.pairwise(ends)), **labels, **ratio, "ticket": ticket.hex()}


class _Answer:
    """One answer: its prompt and how vLLM gets the prompt's KV, its text so far, and how it ends.

    Attributes:
        default: the recipe that `default` means.
        limit: the most tokens of the answer.
        remembered: salt and summary of an earlier prefill of this prompt, whose KV vLLM may still have.
        salt: vLLM's `cache_salt` for the prompt.
        prefilled: the KV that a worker made; None if vLLM has it already, or prefills the prompt itself.
        reason: why no worker prefilled the prompt.
        usage: vLLM's figures, set with the last token.
    """

    def __init__(self, request: pb.GenerateRequest, vocabulary: Vocabulary) -> None:
        self.request = request
        self.prompt = [*request.system.ids, *(i for c in request.chunks for i in c.ids), *request.question.ids]
        model = vocabulary.model
        self.default = model.default_recipe
        # As a worker sets it: vLLM refuses what exceeds the model's length.
        room = min(model.max_tokens - len(self.prompt), model.max_new_tokens)
        self.limit = request.sampling.max_tokens or max(1, room)
        self.exact_salt, self.fused_salt = _cache_salts(request, self.prompt)
        self.salt = self.exact_salt
        self.remembered: tuple[str, answer_pb2.Summary] | None = None
        self.prefilled: _Prefilled | None = None
        self.reason = ""
        self.usage: dict[str, Any] = {}
        self.tokens = 0
        self.finish = ""
        self._text = vocabulary.text(tuple(request.sampling.stop))

    def token(self, token: int, finish: str) -> pb.GenerateResponse:
        """Adds a token; `finish` is the engine's finish reason if it is the last."""
        self.tokens += 1
        text = self._text.push(token)
        self.finish = "stop_string" if self._text.stopped else finish
        if self.finish:
            text += self._text.flush()
        return pb.GenerateResponse(token=answer_pb2.Token(id=token, text=text))

    @property
    def evicted(self) -> bool:
        """Whether vLLM computed most of the prompt, which it tells with --enable-prompt-tokens-details alone."""
        details = self.usage.get("prompt_tokens_details")
        return details is not None and 2 * (details.get("cached_tokens") or 0) < self.usage.get("prompt_tokens", 0)


class VLLMEngine:
    """Decodes with a vLLM server, which prefills the prompt itself if no worker can, or if the KV can't be used."""

    def __init__(self, workers: WorkerPool, config: GatewayConfig) -> None:
        """Needs a running event loop. Raises OSError if the token or the CA can't be read."""
        self._workers = workers
        base = config.vllm_url.rstrip("/").removesuffix("/v1")
        self._url, self._health = f"{base}/v1/completions", f"{base}/health"
        self._chat_url = f"{base}/v1/chat/completions"
        self._model = {"model": config.vllm_model} if config.vllm_model else {}
        self._prefill_seconds = config.vllm_prefill_seconds
        headers = {"Authorization": f"Bearer {secret(config.vllm_token)}"} if config.vllm_token else {}
        ca = config.tls_ca if config.vllm_url.startswith("https://") else None
        trusted = ssl.create_default_context(cafile=ca) if ca else True
        # A connection for each answer, which max_requests limits, and for health checks: the default is 100 in all.
        self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=trusted, limit=0))
        self._vocabulary: Vocabulary | None = None
        # The last prompts whose KV vLLM received, and keeps in its prefix cache until it needs the room, by fused
        # salt: the salt of their KV, and the summary of their prefill. A repeated prompt needs no prefill by a
        # worker; if vLLM has evicted its KV, vLLM computes it.
        self._remembered: dict[str, tuple[str, answer_pb2.Summary]] = {}

    async def model(self, deadline: Deadline, check: Check = lambda _: None) -> Vocabulary:
        """The workers' model; the last known one while no worker describes its own."""
        known = self._vocabulary
        if known is not None:
            deadline = min(deadline, Deadline.after(_MODEL_SECONDS))
        try:
            self._vocabulary = await self._workers.model(deadline, check)
        except (Unavailable, DeadlineExceeded):
            if known is None:
                raise
            return known
        return self._vocabulary

    async def rendered(self, vocabulary: Vocabulary, values: Mapping[str, str], deadline: Deadline) -> Vocabulary:
        """As the workers'."""
        return await self._workers.rendered(vocabulary, values, deadline)

    async def ready(self, timeout: float) -> bool:
        """Whether vLLM is up, and a worker has described the model or can."""
        if self._vocabulary is None and not await self._workers.ready(timeout / 2):
            return False
        limits = aiohttp.ClientTimeout(total=timeout / 2)
        try:
            async with self._session.get(self._health, timeout=limits) as response:
                return response.status < 500
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def generate(self, request: pb.GenerateRequest, deadline: Deadline) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams one answer: the worker's first token, then vLLM's. Closing the iterator cancels both.

        Raises:
            Unavailable: vLLM can't be reached, or failed.
            ResourceExhausted: vLLM is busy.
            FailedPrecondition: vLLM, or the worker, can't serve this request.
            DeadlineExceeded: the deadline passed.
        """
        answer = _Answer(request, self._vocabulary or await self.model(deadline))
        if not request.explain and (remembered := self._remembered.get(answer.fused_salt)):
            answer.remembered, answer.salt = remembered, remembered[0]
        async with contextlib.AsyncExitStack() as stack:
            if answer.remembered is None:
                stream = await stack.enter_async_context(
                    contextlib.aclosing(self._workers.prefill(request, deadline))
                )
                try:
                    async with contextlib.aclosing(self._prefill(answer, stream)) as responses:
                        async for response in responses:
                            yield response
                except _NO_PREFILL as error:
                    answer.reason = str(error)
                    _faults.warning("vLLM prefills a prompt itself", error)
            decoding = time.monotonic()
            if not answer.finish and answer.tokens < answer.limit:
                # Closed before the summary, which may wait for the end of vLLM's request.
                async with contextlib.aclosing(self._tokens(answer, deadline)) as tokens:
                    async for token, finish in tokens:
                        if answer.tokens == 0:
                            decoding = time.monotonic()
                        yield answer.token(token, finish)
                        if answer.finish:
                            break
            decoded = time.monotonic() - decoding  # without the wait for the summary
            summary = await self._summary(answer)
            summary.seconds.decode = decoded
            yield pb.GenerateResponse(summary=summary)

    async def chat(self, body: Mapping[str, Any], tenant: str, deadline: Deadline) -> AsyncGenerator[dict[str, Any]]:
        """Yields vLLM's reply to a chat completion, or the chunks of its stream. Closing the iterator cancels it.

        Args:
            body: the request.
            tenant: salt of the tenant; vLLM's prefix cache is not shared with others.

        Raises as `generate`.
        """
        asked = {**self._model, **body, "cache_salt": _exact_salt(tenant)}
        async with self._posted(self._chat_url, asked, deadline) as response:
            if not body.get("stream"):
                yield await response.json()
                return
            async for event in _events(self._chat_url, response.content):
                yield event

    async def close(self) -> None:
        await self._session.close()
        await self._workers.close()

    async def _prefill(self, answer: _Answer, stream: _Stream) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams a worker's first token, if it prefilled the prompt, behind an explanation if requested.

        Raises as `_next`.
        """
        deadline = Deadline.after(self._prefill_seconds)
        worker, response = await _next(stream, deadline)
        if response.HasField("explanation"):
            yield pb.GenerateResponse(explanation=response.explanation)
            worker, response = await _next(stream, deadline)
        if response.HasField("promise"):
            promise = response.promise
            answer.limit = promise.max_tokens
            answer.salt = answer.exact_salt if promise.lossless else answer.fused_salt
            answer.prefilled = _Prefilled(_promised(answer.request, promise.ticket), stream, promised=True)
            return
        first = response.first
        answer.limit = first.max_tokens
        yield answer.token(first.token.id, first.finish_reason)
        answer.prompt.append(first.token.id)
        answer.salt = answer.exact_salt if first.lossless else answer.fused_salt
        if not answer.finish:
            worker, response = await _next(stream, deadline)
        answer.prefilled = _Prefilled(_handed(worker, response.kv), stream)

    async def _summary(self, answer: _Answer) -> answer_pb2.Summary:
        """The worker's summary of the prefill, or of an earlier one; a degraded one if vLLM prefilled the prompt."""
        request, summary = answer.request, _degraded(answer.reason)
        if answer.prefilled is not None:
            summary = await answer.prefilled.summary()
            if answer.tokens > 1 and not (summary.degraded or answer.prefilled.promised):
                self._remembered[answer.fused_salt] = answer.salt, summary
                if len(self._remembered) > _MAX_REMEMBERED:
                    del self._remembered[next(iter(self._remembered))]
        elif answer.remembered is not None:
            if answer.evicted:
                self._remembered.pop(answer.fused_salt, None)
                summary.degraded_reason = "vLLM has evicted the prompt's KV"
            else:
                summary.CopyFrom(answer.remembered[1])
                # What that prefill took, and had to do, is not done again.
                for once in ("seconds", "chunks_missed", "tokens_encoded", "bytes_fetched", "entries_rejected"):
                    summary.ClearField(once)
        if not summary.recipe:  # no worker has reported on the prompt
            context = sum(len(chunk.ids) for chunk in request.chunks)
            summary.recipe, summary.ratio, summary.context_tokens = request.recipe, 1.0, context
            summary.prompt_tokens = prompt_tokens(request)
            summary.tokens_recomputed = context
        # vLLM doesn't know what it means.
        summary.recipe = full_name(summary.recipe, answer.default)
        summary.finish_reason, summary.tokens_generated = answer.finish or "max_tokens", answer.tokens
        return summary

    def _body(self, answer: _Answer) -> dict[str, Any]:
        sampling = answer.request.sampling
        body: dict[str, Any] = {
            "prompt": answer.prompt,
            "max_tokens": answer.limit - answer.tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1.0,
            "top_k": sampling.top_k,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": answer.salt,
            **self._model,
        }
        if sampling.HasField("seed"):
            body["seed"] = signed_seed(sampling.seed)
        if answer.prefilled is not None:
            body["kv_transfer_params"] = {"fusionkv": answer.prefilled.parameters}
        return body

    async def _tokens(self, answer: _Answer, deadline: Deadline) -> AsyncGenerator[tuple[int, str]]:
        """Streams token ids, the last with its finish reason, and fills `answer.usage`. Raises as `generate`."""
        last: tuple[int, str] | None = None
        async with self._posted(self._url, self._body(answer), deadline) as response:
            async for event in _events(self._url, response.content):
                answer.usage |= event.get("usage") or {}
                for choice in event.get("choices", ()):
                    ids, ended = choice.get("token_ids") or [], choice.get("finish_reason") or ""
                    for token in ids[:-1] if ended else ids:
                        yield token, ""
                    if ids and ended:
                        last = ids[-1], _FINISHED.get(ended, ended)
        if last is None:
            raise Unavailable(f"vLLM at {self._url} ended the answer early")
        yield last  # after the usage, which the caller reads with the last token

    @contextlib.asynccontextmanager
    async def _posted(
        self, url: str, body: Mapping[str, Any], deadline: Deadline
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """vLLM's response with status 200. Errors of it, and of reading it, are raised as `generate` does."""
        limits = aiohttp.ClientTimeout(total=deadline.remaining(), sock_connect=_CONNECT_SECONDS)
        headers: dict[str, str] = {}
        propagate.inject(headers)  # vLLM's own spans belong to the request's trace
        try:
            async with self._session.post(url, json=body, timeout=limits, headers=headers) as response:
                if response.status != 200:
                    text = (await response.text(errors="replace"))[:300]
                    raise errors.from_http(response.status, f"vLLM at {url}: status {response.status}: {text}")
                yield response
        except aiohttp.ConnectionTimeoutError as error:  # a TimeoutError too, but of _CONNECT_SECONDS
            raise Unavailable(f"vLLM at {url} accepted no connection in {_CONNECT_SECONDS:g} s") from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"vLLM at {url} took longer than the remaining time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"vLLM at {url}: {error or type(error).__name__}") from error


async def _events(url: str, lines: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Parses server-sent events. Raises Unavailable for an error event, and ValueError for malformed JSON."""
    async for line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len("data: ") :])
        if "error" in event:
            raise Unavailable(f"vLLM at {url}: {str(event['error'])[:300]}")
        yield event


def _cache_salts(request: pb.GenerateRequest, prompt: list[int]) -> tuple[str, str]:
    """Values of vLLM's `cache_salt`, which separates prompts in its prefix cache.

    Returns:
        One for KV identical to full attention's, shared within a tenant; and one for all other KV, shared by equal
        prompts with the same recipe.
    """
    ratio = repr(request.ratio) if request.HasField("ratio") else ""
    key = json.dumps([request.tenant, request.corpus, request.recipe, ratio]).encode()
    fused = hashlib.sha256(key + struct.pack(f"<{len(prompt)}I", *prompt))
    return _exact_salt(request.tenant), f"fusionkv-{fused.hexdigest()}"


def _exact_salt(tenant: str) -> str:
    return f"fusionkv-{hashlib.sha256(b'exact' + tenant.encode()).hexdigest()}"


def _degraded(reason: str) -> answer_pb2.Summary:
    """The summary of an answer whose prompt vLLM prefilled."""
    return answer_pb2.Summary(degraded=True, degraded_reason=reason)
