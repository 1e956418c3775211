"""Answers that a worker prefills and another engine decodes; that one is transformers behind vLLM's HTTP API here.

vLLM itself is tested in tests/vllm.
"""

import asyncio
import contextlib
import itertools
import json
import mmap
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from aiohttp import web
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from transformers import AutoModelForCausalLM, DynamicCache

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Explanation, Passage, Token
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.workers.vllm import VLLMEngine
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.checksum import checksum
from fusionkv.protos.runtime.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted, Unavailable
from fusionkv.vllm_connector.fusing import FusedPrefill
from fusionkv.vllm_connector.spans import SpannedPrompt
from fusionkv.vllm_connector.steps import VLLMSteps
from tests.gateway.conftest import Start
from tests.http_server import serving
from tests.ports import free_port
from tests.services import Launch, start_gateway, start_worker
from tests.waiting import until

pytestmark = pytest.mark.system
PASSAGES = [Passage(text=f"Number {n} is the colour of {word}.") for n, word in enumerate(("milk", "grass", "coal"))]
OTHER = [PASSAGES[i] for i in (2, 0, 1)]


@dataclass
class Decoder:
    """Serves a model directory as vLLM's /v1/completions does, from KV as vLLM's connector would get it.

    bodies: what it was asked; loaded: of how many prompts it used the KV; left: streams that their caller left;
    status: what it answers in place of an answer; early: ends streams before their last token; refuses: why it
    computes prompts itself; pause: seconds before each token; cached: tokens that it says it had in a prefix cache.
    """

    model: Path
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loaded: int = 0
    status: int = 200
    early: bool = False
    refuses: str = ""
    left: int = 0
    pause: float = 0.0
    cached: int | None = None
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        self._network = AutoModelForCausalLM.from_pretrained(self.model, dtype="float32", use_safetensors=True).eval()
        chat = web.post("/v1/chat/completions", self._chat)
        async with serving(web.post("/v1/completions", self._complete), chat) as url:
            yield url

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """The last message's last words, a word for each token, or a call of the first tool."""
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        words = body["messages"][-1]["content"].split()[-3:]
        usage = {"prompt_tokens": 50, "completion_tokens": 3 * body.get("n", 1)}
        calls = [{"index": 0, "function": {"name": tool["function"]["name"]}} for tool in body.get("tools", ())]
        said = {"tool_calls": calls} if calls else {"content": " ".join(words)}
        ended = "tool_calls" if calls else "length"
        each: list[dict[str, Any]] = [{"index": i, "finish_reason": ended} for i in range(body.get("n", 1))]
        if not body.get("stream"):
            message = {"message": {"role": "assistant", **said}}
            choices = [{**choice, **message} for choice in each]
            return web.json_response({"id": "1", "model": "m", "choices": choices, "usage": usage})
        response = web.StreamResponse()
        await response.prepare(request)
        parts = [{"content": word} for word in words]
        chunks = [{"choices": [{"index": c["index"], "delta": part}]} for part in parts for c in each]
        last = [{"choices": [{**choice, "delta": {}} for choice in each]}] if not self.early else []
        for chunk in (*chunks, *last, {"usage": usage}):  # some servers omit the empty list of choices
            await response.write(f"data: {json.dumps({'id': '1', 'model': 'm', **chunk})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        try:
            return await self._stream(request, body)
        except (ConnectionResetError, asyncio.CancelledError):
            self.left += 1
            raise

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        cache, computed = DynamicCache(), 0
        if body.get("kv_transfer_params") is not None:
            computed = await self._load(body, cache)
        response = web.StreamResponse()
        await response.prepare(request)
        ids, count = body["prompt"][computed:], body["max_tokens"]
        for number in range(count):
            with torch.inference_mode():
                logits = self._network(torch.tensor([ids]), past_key_values=cache).logits
            ids = [int(logits[0, -1].argmax())]
            last = number == count - 1
            if last and self.early:
                break
            choice = {"index": 0, "token_ids": ids, "finish_reason": "length" if last else None}
            await asyncio.sleep(self.pause)
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        if self.cached is not None and body["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": self.cached}}
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _load(self, body: dict[str, Any], cache: DynamicCache) -> int:
        params = body["kv_transfer_params"]["fusionkv"]
        worker, handle = WorkerClient(params["worker"]), bytes.fromhex(params["handle"])
        try:
            if self.refuses:
                await worker.release_prefill(handle, error=self.refuses)
                return 0
            file = os.open(params["path"], os.O_RDONLY)
            data = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE)
            os.close(file)
            assert checksum(data).hex() == params["checksum"]
            shape = (params["layers"], 2, params["tokens"], params["kv_heads"], params["head_dim"])
            kv = torch.frombuffer(data, dtype=getattr(torch, params["dtype"])).view(shape)
            for layer, (keys, values) in enumerate(kv):
                cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
            await worker.release_prefill(handle)
        finally:
            await worker.close()
        self.loaded += 1
        return params["tokens"]


@dataclass
class FusingDecoder(Decoder):
    """A decoder with the engine of fused prefill, as vLLM with `listen` in its connector.

    fusing: the engine. told: whether its connector tells of requests that have ended.
    """

    fusing: FusedPrefill | None = None
    told: bool = True

    @property
    def address(self) -> str:
        return f"unix:{self.model}/fusing.sock"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        config = WorkerConfig(model=self.model, pool_bytes=1 << 24, listen=())
        steps = VLLMSteps(torch.device("cpu"))
        fusing = self.fusing = FusedPrefill(config, models.load(self.model, dtype="float32"), steps, self.address)
        ended = threading.Event()

        def run_steps() -> None:
            while not ended.is_set():
                fusing.run_steps(False, lambda: True)

        thread = threading.Thread(target=run_steps)
        thread.start()
        try:
            async with super().serving() as url:
                yield url
        finally:
            await fusing.close()
            fusing.pool.check_integrity(idle=True)
            ended.set()
            thread.join()

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.figures: dict[str, Any] = {}
        try:
            return await super()._stream(request, body)
        finally:
            if self.told and self.fusing is not None:
                ticket = body["kv_transfer_params"]["fusionkv"]["ticket"]
                await self.fusing.tell({ticket: self.figures, "unknown": {}})

    async def _load(self, body: dict[str, Any], cache: DynamicCache) -> int:
        asked = SpannedPrompt.of(body["kv_transfer_params"], body["prompt"], body["cache_salt"])
        assert self.fusing is not None
        assert asked is not None
        if not asked.reuses:
            self.figures = asked.figures(0)
            return 0

        async def write(layers: Any) -> None:
            for layer, both in enumerate(layers):
                cache.update(*(each[None].transpose(1, 2) for each in both), layer)

        self.figures = await self.fusing.fill(asked, write)
        self.loaded += 1
        return asked.tokens


@pytest.fixture(scope="module")
def worker(launch_module: Launch, tiny_model: Path) -> Any:
    return start_worker(launch_module, tiny_model, "--cache", "none", "--max-new-tokens", "12")


@pytest.fixture
async def decoder(tiny_model: Path) -> AsyncIterator[Decoder]:
    made = Decoder(tiny_model)
    async with made.serving() as made.url:
        yield made


@pytest.fixture
async def fusing(tiny_model: Path) -> AsyncIterator[FusingDecoder]:
    made = FusingDecoder(tiny_model)
    async with made.serving() as made.url:
        yield made


Open = Callable[..., AsyncClient]
HTTP = "fusionkv-gateway-http"


@pytest.fixture
async def chats(worker: Any, decoder: Decoder, launch: Launch, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of a gateway for which vLLM decodes."""
    flags = ("--decode", "vllm", "--vllm-url", decoder.url, "--http-listen", "127.0.0.1:0")
    gateway = start_gateway(launch, tmp_path, worker, *flags, services=2)
    url = f"http://{gateway.addresses[HTTP][0]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(*texts: str, **more: Any) -> dict[str, Any]:
    """A chat over passages."""
    messages = [{"role": "user", "content": "What is white?"}]
    body = {"documents": [{"text": text, "id": str(n)} for n, text in enumerate(texts)], **more.pop("body", {})}
    return {"model": "fusionkv", "messages": messages, "extra_body": body, "max_tokens": 3, **more}


@pytest.fixture
async def open_gateway(launch: Launch, tmp_path: Path) -> AsyncIterator[Open]:
    """A client of a gateway over a worker; it has `url` decode, if one is given."""
    numbers = itertools.count()
    async with AsyncExitStack() as stack:

        def make(worker: Any, url: str = "", *flags: str) -> AsyncClient:
            vllm = ("--decode", "vllm", "--vllm-url", url) if url else ()
            gateway = start_gateway(launch, tmp_path / str(next(numbers)), worker, *vllm, *flags)
            client = AsyncClient(gateway.address, timeout=60)
            stack.push_async_callback(client.close)
            return client

        yield make


async def ask(client: AsyncClient, passages: list[Passage], **more: Any) -> Any:
    return await client.ask("", "What is white?", passages=passages, max_tokens=8, **more)


async def test_answers_are_those_of_the_worker(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    alone, ours = open_gateway(worker), open_gateway(worker, f"{decoder.url}/v1")
    for passages in (PASSAGES, OTHER):
        for recipe in ("full_attention", "prophetkv"):
            told = await ask(alone, passages, recipe=recipe, ratio=None)
            answer = await ask(ours, passages, recipe=recipe, ratio=None)
            assert answer.text == told.text
            want, got = told.summary, answer.summary
            assert not got.degraded, got.degraded_reason
            assert got.finish_reason == "max_tokens"
            same = ("recipe", "ratio", "prompt_tokens", "context_tokens", "tokens_recomputed", "tokens_generated")
            assert [getattr(got, name) for name in same] == [getattr(want, name) for name in same]
            assert 0 < got.seconds.ttft < got.seconds.total
            assert got.seconds.decode > 0
    assert decoder.loaded == len(decoder.bodies) == 4


async def test_answers_without_a_worker(worker: Any, fusing: FusingDecoder, open_gateway: Open) -> None:
    """vLLM fuses the passages; tokens and figures are a worker's."""
    alone, ours = open_gateway(worker), open_gateway(fusing, fusing.url)
    new = [Passage(text=f"Letter {n} is on the door of house {n + 1}.") for n in range(3)]  # to both
    for passages in (new, new[::-1]):
        for recipe in ("full_attention", "prophetkv", "default"):
            told = await ask(alone, passages, recipe=recipe, ratio=None)
            answer = await ask(ours, passages, recipe=recipe, ratio=None)
            assert answer.text == told.text
            want, got = told.summary, answer.summary
            assert not got.degraded, got.degraded_reason
            same = ("recipe", "ratio", "prompt_tokens", "context_tokens", "tokens_lossless", "tokens_reused")
            same += ("tokens_recomputed", "tokens_generated", "chunks_missed", "hits", "model", "finish_reason")
            assert {name: getattr(got, name) for name in same} == {name: getattr(want, name) for name in same}
            assert 0 < got.seconds.ttft < got.seconds.total
    assert fusing.loaded == 4
    assert fusing.fusing is not None
    assert not fusing.fusing._promised


@pytest.mark.slow
async def test_what_vllm_does_not_do_without_a_worker(fusing: FusingDecoder, open_gateway: Open) -> None:
    client = open_gateway(fusing, fusing.url)
    with pytest.raises(FailedPrecondition, match="only a fusion worker can explain a prompt"):
        await ask(client, PASSAGES, explain=True)
    await client.ingest("c", "d.txt", b"Milk is white.")
    with pytest.raises(FailedPrecondition, match="not ahead of time"):
        _ = [progress async for progress in client.precompute("c")]
    await client.delete("c")
    direct = open_gateway(fusing)
    with pytest.raises(FailedPrecondition, match="set decode = vllm"):
        await ask(direct, PASSAGES)
    fusing.told = False
    answer = await ask(client, PASSAGES)
    assert answer.summary.degraded_reason == "vLLM did not fetch the prompt's KV"
    seconds = answer.summary.seconds
    assert seconds.total - seconds.decode > 1.9, "for which it was waited 2 s, behind the last token"
    assert fusing.fusing is not None
    await until(lambda: not fusing.fusing._promised)


async def test_fused_kv_is_nobody_elses(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    """vLLM files KV under token ids and a salt: KV that is no full attention's has a salt for each prompt."""
    client = open_gateway(worker, decoder.url)

    async def salt(passages: list[Passage], recipe: str, ratio: float | None = None) -> str:
        await ask(client, passages, recipe=recipe, ratio=ratio)
        return str(decoder.bodies[-1]["cache_salt"])

    exact = {await salt(passages, "full_attention") for passages in (PASSAGES, OTHER)}
    assert len(exact) == 1
    fused = {await salt(PASSAGES, "prophetkv"), await salt(OTHER, "prophetkv"), await salt(OTHER, "full_reuse")}
    fused.add(await salt(OTHER, "prophetkv", 0.5))
    assert len(fused) == 4
    assert not fused & exact


async def test_a_prompt_that_comes_again_needs_no_prefill(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    client = open_gateway(worker, decoder.url)
    first, again = [await ask(client, PASSAGES) for _ in range(2)]
    assert "kv_transfer_params" in decoder.bodies[0]
    assert "kv_transfer_params" not in decoder.bodies[1]
    assert decoder.bodies[0]["cache_salt"] == decoder.bodies[1]["cache_salt"]
    assert decoder.bodies[1]["max_tokens"] == 8
    assert again.summary.tokens_recomputed == first.summary.tokens_recomputed
    assert again.summary.seconds.prefill == 0
    decoder.cached = 4
    evicted = await ask(client, PASSAGES)
    assert evicted.summary.degraded_reason == "vLLM has evicted the prompt's KV"
    assert evicted.summary.tokens_recomputed == evicted.summary.context_tokens
    assert evicted.summary.recipe == first.summary.recipe == "deeplayer+primed"  # which `default` means
    assert not (await ask(client, PASSAGES)).summary.degraded
    assert "kv_transfer_params" in decoder.bodies[-1]
    events = [e async for e in client.stream("", "What is white?", passages=PASSAGES, max_tokens=2, explain=True)]
    assert any(isinstance(e, Explanation) for e in events)  # which only a worker can give


async def test_a_repeated_prompt_misses_nothing_anew(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    client, new = open_gateway(worker, decoder.url), [Passage(text=f"Bird {n} sings in tree {n}.") for n in range(3)]
    first, again = [(await ask(client, new, recipe="full_reuse", ratio=None)).summary for _ in range(2)]
    assert "kv_transfer_params" not in decoder.bodies[-1]
    assert (first.chunks_missed, first.tokens_encoded) == (3, first.context_tokens)
    assert (again.chunks_missed, again.tokens_encoded, again.bytes_fetched) == (0, 0, 0)
    assert again.tokens_reused == first.tokens_reused > 0


async def test_a_repeated_answer_without_a_limit_has_the_same(
    worker: Any, decoder: Decoder, open_gateway: Open
) -> None:
    """The worker's, or the end of the model's length, beyond which vLLM refuses the request."""
    client = open_gateway(worker, decoder.url)
    probe = await client.ask("", "?", passages=["x"], max_tokens=1)
    long = "x" * (2048 - 5 - probe.summary.prompt_tokens + 1)
    for text, limit in (("short", 12), (long, 5)):
        answers = [await client.ask("", "?", passages=[text]) for _ in range(2)]
        assert [answer.summary.tokens_generated for answer in answers] == [limit] * 2
        assert "kv_transfer_params" not in decoder.bodies[-1]


async def test_a_repeated_prompt_without_a_limit_has_the_workers(
    worker: Any, decoder: Decoder, open_gateway: Open
) -> None:
    """Also if all that it prefilled before had limits of their own."""
    client = open_gateway(worker, decoder.url)
    await ask(client, PASSAGES)
    again = await client.ask("", "What is white?", passages=PASSAGES)
    assert "kv_transfer_params" not in decoder.bodies[-1]
    assert again.summary.tokens_generated == 12


@pytest.mark.slow
async def test_sampling_and_stop_strings(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    alone, client = open_gateway(worker), open_gateway(worker, decoder.url)
    text = (await ask(alone, PASSAGES)).text
    told, answer = [await ask(each, PASSAGES, stop=[text[3:5]]) for each in (alone, client)]
    assert (answer.text, answer.summary.finish_reason) == (told.text, "stop_string")
    assert answer.summary.tokens_generated == told.summary.tokens_generated
    await ask(client, OTHER, temperature=0.7, top_p=0.9, sample_top_k=5, seed=2**63 + 3)
    body = decoder.bodies[-1]
    sent = [body[name] for name in ("temperature", "top_p", "top_k", "seed")]
    assert sent == [0.7, 0.9, 5, 3], "vLLM takes signed seeds only"


async def test_kv_that_can_not_be_used(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    client = open_gateway(worker, decoder.url)
    decoder.refuses = "the KV is of another prompt"
    answer = await ask(client, PASSAGES, recipe="full_attention")
    assert (answer.summary.degraded, answer.summary.degraded_reason) == (True, "the KV is of another prompt")
    decoder.refuses = ""
    again = await ask(client, PASSAGES, recipe="full_attention")
    assert (again.text, again.summary.degraded) == (answer.text, False)


@pytest.mark.slow
async def test_workers_that_are_away_or_late(start: Start, decoder: Decoder, open_gateway: Open) -> None:
    worker = start("--cache", "none")
    client = open_gateway(worker, decoder.url, "--vllm-prefill-seconds", "1.5")
    told = await ask(client, PASSAGES, recipe="full_attention")
    worker.process.send_signal(signal.SIGSTOP)
    late = await ask(client, OTHER, recipe="full_attention")
    assert late.summary.degraded_reason == "no worker prefilled the prompt in time"
    worker.process.send_signal(signal.SIGCONT)
    worker.kill9()
    again = await ask(client, PASSAGES, recipe="full_attention")  # vLLM has had its KV
    assert (again.text, again.summary.degraded) == (told.text, False)
    answer = await ask(client, PASSAGES[:2], recipe="full_attention")
    assert answer.summary.degraded
    assert "fusion worker" in answer.summary.degraded_reason
    assert answer.summary.tokens_recomputed == answer.summary.context_tokens > 0
    assert "kv_transfer_params" not in decoder.bodies[-1]


@pytest.mark.slow
async def test_a_worker_without_room(start: Start, decoder: Decoder, open_gateway: Open) -> None:
    worker = start("--cache", "none", "--prefill-bytes", "1000")
    answer = await ask(open_gateway(worker, decoder.url), PASSAGES)
    assert "raise prefill_bytes" in answer.summary.degraded_reason


async def test_vllm_goes_on_with_the_requests_trace() -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.json_response({"traceparent": request.headers.get("traceparent")})

    asking = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)))
    async with serving(web.post("/v1/chat/completions", complete)) as url:
        engine = VLLMEngine(WorkerPool(["127.0.0.1:1"]), GatewayConfig(decode="vllm", vllm_url=url))
        with use_span(asking):
            told = await anext(engine.chat({}, "", Deadline.after(60)))
        await engine.close()
    assert told["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"


async def test_a_vllm_that_accepts_no_connection_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not late: the caller has time left, and may try again."""
    monkeypatch.setattr("fusionkv.gateway.workers.vllm._CONNECT_SECONDS", 0.2)
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # the second waits for a place
            other = sockets.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        engine = VLLMEngine(WorkerPool(["127.0.0.1:1"]), GatewayConfig(decode="vllm", vllm_url=url))
        for deadline, error in ((Deadline.after(60), Unavailable), (Deadline.after(0.05), DeadlineExceeded)):
            with pytest.raises(error):
                await anext(engine.chat({}, "", deadline))
        await engine.close()


@pytest.mark.slow
async def test_what_vllm_answers_wrong(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    client = open_gateway(worker, decoder.url)
    for decoder.status, error in ((400, FailedPrecondition), (503, ResourceExhausted), (500, Unavailable)):
        with pytest.raises(error, match=f"vLLM at .* status {decoder.status}"):
            await ask(client, PASSAGES)
    decoder.status, decoder.early = 200, True
    with pytest.raises(Unavailable, match="ended the answer early"):
        await ask(client, PASSAGES)
    nobody = open_gateway(worker, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable, match="vLLM at http"):
        await ask(nobody, PASSAGES)


async def test_a_recipe_that_only_the_worker_decodes(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    client = open_gateway(worker, decoder.url)
    with pytest.raises(FailedPrecondition, match="only the fusion worker can decode an answer by ape"):
        await anext(client.stream("", "?", passages=PASSAGES, recipe="ape"))
    assert not decoder.bodies


@pytest.mark.slow
async def test_a_caller_that_leaves_ends_the_decoding(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    client = open_gateway(worker, decoder.url)
    decoder.pause = 0.2
    async with aclosing(client.stream("", "?", passages=PASSAGES, max_tokens=500)) as events:
        async for event in events:
            if isinstance(event, Token) and len(decoder.bodies) == 1:
                break
    await until(lambda: decoder.left == 1)


@pytest.mark.slow
async def test_requests_at_once(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    alone, client = open_gateway(worker), open_gateway(worker, decoder.url)
    prompts = [[*PASSAGES[:n], Passage(text=f"And {n}.")] for n in range(4)]
    want = [(await ask(alone, prompt, recipe="full_attention")).text for prompt in prompts]
    got = await asyncio.gather(*(ask(client, prompt, recipe="full_attention") for prompt in prompts))
    assert [answer.text for answer in got] == want


async def test_a_chat_that_only_vllm_can_answer_is_passed_on(decoder: Decoder, chats: openai.AsyncOpenAI) -> None:
    wanted = {"type": "json_object"}
    chat = await chats.chat.completions.create(
        **asked("Milk is white.", "Coal is black.", response_format=wanted, n=2, seed=2**63 + 3)
    )
    (body,) = decoder.bodies
    told = {"role": "user", "content": "Milk is white.\n\nCoal is black.\n\nWhat is white?"}
    assert body["messages"] == [told]
    assert (body["response_format"], body["n"], body["max_tokens"], body["temperature"]) == (wanted, 2, 3, 0)
    assert body["seed"] == 3, "vLLM takes signed seeds only"
    assert body["cache_salt"].startswith("fusionkv-")
    assert "kv_transfer_params" not in body
    assert [choice.message.content for choice in chat.choices] == ["What is white?"] * 2
    assert chat.model == "fusionkv"
    ours = chat.model_extra["fusionkv"]
    assert [source["id"] for source in ours["sources"]] == ["0", "1"]
    figures = ("recipe", "prompt_tokens", "tokens_generated", "finish_reason", "chunks_retrieved", "degraded")
    assert [ours["summary"][name] for name in figures] == ["full_attention", 50, 6, "max_tokens", 2, False]


@pytest.mark.parametrize("usage", [False, True])
async def test_a_chat_that_is_passed_on_is_streamed_back(
    decoder: Decoder, chats: openai.AsyncOpenAI, usage: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    stream = await chats.chat.completions.create(**asked("Milk.", logprobs=True, stream=True, **options))
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Whatiswhite?"
    assert [bool(c.usage) for c in chunks] == [False] * (len(chunks) - 1) + [usage]
    assert chunks[0].model_extra["fusionkv"]["sources"][0]["text"] == "Milk."
    assert chunks[-1].model_extra["fusionkv"]["summary"]["tokens_generated"] == 3
    assert chunks[-1].choices == []


async def test_tools_and_their_results(decoder: Decoder, chats: openai.AsyncOpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    chat = await chats.chat.completions.create(**asked("Milk.", tools=tools, tool_choice="auto"))
    assert chat.choices[0].finish_reason == "tool_calls"
    said = [
        {"role": "user", "content": "What is white?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look_up"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "it is snow"},
    ]
    chat = await chats.chat.completions.create(**{**asked("Milk."), "messages": said})
    assert chat.choices[0].message.content == "it is snow"
    assert decoder.bodies[-1]["messages"] == [{**said[0], "content": "Milk.\n\nWhat is white?"}, *said[1:]]


async def test_a_model_of_vllm_by_name(decoder: Decoder, chats: openai.AsyncOpenAI) -> None:
    await chats.chat.completions.create(**asked("Milk.", body={"fusionkv": {"vllm_model": "lora"}}))
    assert decoder.bodies[-1]["model"] == "lora"
    await chats.chat.completions.create(**asked("Milk.", n=2))
    assert "model" not in decoder.bodies[-1]


async def test_what_vllm_refuses_or_breaks_off(decoder: Decoder, chats: openai.AsyncOpenAI) -> None:
    decoder.status = 400
    with pytest.raises(openai.BadRequestError, match="status 400"):
        await chats.chat.completions.create(**asked("Milk.", n=2))
    decoder.status, decoder.early = 200, True
    stream = await chats.chat.completions.create(**asked("Milk.", n=2, stream=True))
    with pytest.raises(openai.APIError, match="ended the answer early"):
        async for _ in stream:
            pass
