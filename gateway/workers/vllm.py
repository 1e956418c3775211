"""vLLM as the decoder: a worker prefills the prompt, vLLM fetches its KV and goes on from there."""

import asyncio
import contextlib
import hashlib
import json
import logging
import ssl
import struct
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from fusionkv.fusion_worker.decode.text import TextStream
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.answer.v1 import answer_pb2
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)

_faults = logs.RateLimitedLog(logging.getLogger(__name__))
_CONNECT_SECONDS = 5.0
# Behind the answer's last token, for a summary that is there as soon as vLLM has loaded the KV.
_SUMMARY_SECONDS = 2.0
# Of an answer to a request that sets no limit, when no worker says its own.
_MAX_TOKENS = 256
# Of prompts: 300 bytes each, and a summary.
_MOST_KNOWN = 4096
_BUSY = (429, 503)
_FINISHED = {"stop": "end", "length": "max_tokens"}
# What makes vLLM compute the prompt itself. All else is the request's own fault.
_ABSENT = (Unavailable, ResourceExhausted, DeadlineExceeded)


_Stream = AsyncGenerator[tuple[str, pb.PrefillResponse]]


async def _next(stream: _Stream, until: float) -> tuple[str, pb.PrefillResponse]:
    """What a worker says next. Raises as `WorkerPool.prefill` does, and DeadlineExceeded."""
    try:
        async with asyncio.timeout(until - time.monotonic()):
            return await anext(stream)
    except TimeoutError as error:
        raise DeadlineExceeded("no worker has prefilled the prompt in time") from error
    except StopAsyncIteration as error:
        raise Unavailable("a worker ended its prefill early") from error


@dataclass(slots=True)
class _Prefilled:
    """What a worker made of a prompt, and its address; the stream of its call ends with the summary."""

    worker: str
    kv: pb.PrefilledKV
    stream: _Stream

    def parameters(self) -> dict[str, Any]:
        """As vLLM's connector reads them (vllm_connector/prompts.py)."""
        kv = self.kv
        names = ("handle", "prompt_digest", "model_fingerprint", "checksum")
        numbers = {name: getattr(kv, name) for name in ("tokens", "layers", "kv_heads", "head_dim", "dtype", "path")}
        return {"worker": self.worker, **{name: getattr(kv, name).hex() for name in names}, **numbers}

    async def summary(self) -> answer_pb2.Summary:
        """Of the prefill, once vLLM has released the KV."""
        try:
            async with asyncio.timeout(_SUMMARY_SECONDS):
                async for _, response in self.stream:
                    if response.HasField("summary"):
                        return response.summary
            return _unaided("a worker ended its prefill early")
        except TimeoutError:
            return _unaided("vLLM has not fetched the prompt's KV")
        except ServiceError as error:
            return _unaided(str(error))


class _Answer:
    """Tokens as they come, from both engines: their text, and how they end."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.tokens = 0
        self.finish = ""

    def token(self, token: int, finish: str) -> pb.GenerateResponse:
        """The next one; finish: why it is the last, as its engine says."""
        self.tokens += 1
        text = self._text.push(token)
        self.finish = "stop_string" if self._text.stopped else finish
        if self.finish:
            text += self._text.flush()
        return pb.GenerateResponse(token=answer_pb2.Token(id=token, text=text))


class VLLMEngine:
    """Answers by a vLLM server, which computes the prompt itself when no worker can, or when it can't use its KV."""

    def __init__(
        self,
        workers: WorkerPool,
        url: str,
        model: str = "",
        token: Path | None = None,
        ca: Path | None = None,
        prefill_seconds: float = 30.0,
    ) -> None:
        """url: without /v1. ca: whom to trust at an https URL, in place of the system's CAs.

        Made in a running event loop. Raises OSError when token or CA can't be read.
        """
        self._workers = workers
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1/completions"
        self._model = {"model": model} if model else {}
        self._prefill_seconds = prefill_seconds
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"} if token else {}
        trusted = ssl.create_default_context(cafile=ca) if ca else True
        self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=trusted))
        self._vocabulary: Vocabulary | None = None
        # Prompts whose KV vLLM was given, and has in its own prefix cache as long as nothing else needs the room. One
        # that comes again costs no prefill; if vLLM has evicted it, vLLM computes it, as any server would.
        self._known: OrderedDict[_Same, _Known] = OrderedDict()

    async def model(self, timeout: float | None = None) -> Vocabulary:
        """As of the workers; the last one known while none of them answers."""
        try:
            self._vocabulary = await self._workers.model(timeout)
        except Unavailable:
            if self._vocabulary is None:
                raise
        return self._vocabulary

    async def generate(
        self, request: pb.GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Streams one answer, the worker's first token before vLLM's. Closing the iterator cancels both.

        Raises:
            Unavailable, ResourceExhausted, FailedPrecondition: of vLLM, or of the worker, which can't serve this.
            DeadlineExceeded: the deadline passed.
        """
        began = time.monotonic()
        answer = _Answer((self._vocabulary or await self.model(timeout)).text(tuple(request.sampling.stop)))
        prompt = [*request.system.ids, *(i for c in request.chunks for i in c.ids), *request.question.ids]
        context = sum(len(chunk.ids) for chunk in request.chunks)
        same = _Same.of(request, prompt)
        prefilled, why, most = None, "", request.sampling.max_tokens or _MAX_TOKENS
        known = None if request.explain else self._known.get(same)
        salt = known.salt if known else same.exact
        async with contextlib.AsyncExitStack() as stack:
            try:
                if known is None:
                    stream = self._workers.prefill(request, timeout)
                    await stack.enter_async_context(contextlib.aclosing(stream))
                    until = time.monotonic() + self._prefill_seconds
                    worker, response = await _next(stream, until)
                    if response.HasField("explanation"):
                        yield pb.GenerateResponse(explanation=response.explanation)
                        worker, response = await _next(stream, until)
                    first, most = response.first, response.first.max_tokens
                    yield answer.token(first.token.id, first.finish_reason)
                    prompt.append(first.token.id)
                    salt = same.exact if first.lossless else same.fused
                    if not answer.finish:
                        worker, response = await _next(stream, until)
                    prefilled = _Prefilled(worker, response.kv, stream)
            except _ABSENT as error:
                why = str(error)
                _faults.warning("vLLM computes a prompt itself", error)
            decoding, usage = time.monotonic(), _Usage()
            if not answer.finish and answer.tokens < most:
                left = None if timeout is None else max(0.001, timeout - (decoding - began))
                body = self._body(request, prompt, most - answer.tokens, salt, prefilled)
                tokens = await stack.enter_async_context(contextlib.aclosing(self._tokens(body, left, usage)))
                async for token, finish in tokens:
                    yield answer.token(token, finish)
                    if answer.finish:
                        break
            summary = answer_pb2.Summary(degraded=True, degraded_reason=why)
            if prefilled is not None:
                summary = await prefilled.summary()
                if answer.tokens > 1 and not summary.degraded:
                    self._remember(same, _Known(salt, summary))
            elif known is not None:
                if usage.evicted:
                    self._known.pop(same, None)
                    summary.degraded_reason = "vLLM has evicted the prompt's KV"
                else:
                    summary.CopyFrom(known.summary)
                    summary.ClearField("seconds")
            if not summary.recipe:  # nobody says what became of the prompt
                summary.recipe, summary.ratio, summary.context_tokens = request.recipe, 1.0, context
                summary.prompt_tokens = context + len(request.system.ids) + len(request.question.ids)
                summary.tokens_recomputed = context
            summary.finish_reason, summary.tokens_generated = answer.finish or "max_tokens", answer.tokens
            summary.seconds.decode = time.monotonic() - decoding
            yield pb.GenerateResponse(summary=summary)

    async def close(self) -> None:
        """Ends the connections to vLLM."""
        await self._session.close()

    def _remember(self, same: "_Same", known: "_Known") -> None:
        self._known[same] = known
        self._known.move_to_end(same)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def _body(
        self, request: pb.GenerateRequest, prompt: list[int], tokens: int, salt: str, prefilled: _Prefilled | None
    ) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1.0,
            "top_k": sampling.top_k,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": salt,
            **self._model,
        }
        if sampling.HasField("seed"):
            body["seed"] = sampling.seed
        if prefilled is not None:
            body["kv_transfer_params"] = {"fusionkv": prefilled.parameters()}
        return body

    async def _tokens(
        self, body: dict[str, Any], timeout: float | None, usage: "_Usage"
    ) -> AsyncGenerator[tuple[int, str]]:
        """Ids as they come, with what ended the answer beside the last. Fills usage. Raises as `generate` does."""
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.post(self._url, json=body, timeout=limits) as response:
                if response.status != 200:
                    _refuse(self._url, response.status, (await response.text(errors="replace"))[:300])
                last: tuple[int, str] | None = None
                async for event in _events(self._url, response.content):
                    usage.read(event)
                    for choice in event.get("choices", ()):
                        ids, ended = choice.get("token_ids") or [], choice.get("finish_reason") or ""
                        for token in ids[:-1] if ended else ids:
                            yield token, ""
                        if ids and ended:
                            last = ids[-1], _FINISHED.get(ended, ended)
                if last is not None:
                    yield last  # behind the usage, so that it is known with the answer
                    return
        except TimeoutError as error:
            raise DeadlineExceeded(f"vLLM at {self._url} took longer than the time that was left") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"vLLM at {self._url}: {error or type(error).__name__}") from error
        raise Unavailable(f"vLLM at {self._url} ended an answer early")


async def _events(url: str, lines: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events. Raises Unavailable, and ValueError for what is none."""
    async for line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len("data: ") :])
        if "error" in event:
            raise Unavailable(f"vLLM at {url}: {str(event['error'])[:300]}")
        yield event


@dataclass(slots=True)
class _Usage:
    """What vLLM says of a prompt, where it was started with --enable-prompt-tokens-details.

    evicted: whether it had less than half of it in its prefix cache.
    """

    evicted: bool = False

    def read(self, event: dict[str, Any]) -> None:
        said = event.get("usage") or {}
        if (details := said.get("prompt_tokens_details")) is not None:
            self.evicted = 2 * (details.get("cached_tokens") or 0) < said.get("prompt_tokens", 0)


class _Same(NamedTuple):
    """What makes two requests one prompt to vLLM's prefix cache, as its `cache_salt`.

    exact: for KV that is full attention's: of one tenant. fused: for all other KV: of one prompt and recipe.
    """

    exact: str
    fused: str

    @classmethod
    def of(cls, request: pb.GenerateRequest, prompt: list[int]) -> "_Same":
        ratio = repr(request.ratio) if request.HasField("ratio") else ""
        how = json.dumps([request.tenant, request.corpus, request.recipe, ratio]).encode()
        tenant = hashlib.sha256(b"exact" + request.tenant.encode())
        fused = hashlib.sha256(how + struct.pack(f"<{len(prompt)}I", *prompt))
        return cls(f"fusionkv-{tenant.hexdigest()}", f"fusionkv-{fused.hexdigest()}")


class _Known(NamedTuple):
    """A prompt that was answered before: what its KV is filed under, and what became of it."""

    salt: str
    summary: answer_pb2.Summary


def _unaided(why: str) -> answer_pb2.Summary:
    """Of an answer whose prompt vLLM computed."""
    return answer_pb2.Summary(degraded=True, degraded_reason=why)


def _refuse(url: str, status: int, said: str) -> None:
    message = f"vLLM at {url}: status {status}: {said}"
    if status in _BUSY:
        raise ResourceExhausted(message, retry_after=1.0)
    raise Unavailable(message) if status >= 500 else FailedPrecondition(message)
