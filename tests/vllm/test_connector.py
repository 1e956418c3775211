"""vLLM itself with our connector: what it loads, what it computes instead, and what instances of it share."""

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from fusionkv.bench.services.vllm import VLLM, Servers, servers
from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Passage
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from tests.ports import free_port
from tests.system.prompts import request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed: scripts/setup.sh vllm"),
]
# As the worker computes the reference model.
DTYPE = ("--dtype", "float32")
# The reference model has none of its own.
CHAT = ("--chat-template", "{% for message in messages %}{{ message.content }} {% endfor %}")
SYSTEM, QUESTION = [1, 5, 6, 7], [9, 8, 7, 6, 5]


def chunk(seed: int, tokens: int = 150) -> list[int]:
    return [10 + (seed * 7919 + i * i * 31 + i * 7) % 400 for i in range(tokens)]


@dataclass
class Stack:
    """A worker, its cache service, and a vLLM server of the same model."""

    started: Servers
    worker: str
    cache: str
    url: str

    def ask(self, prompt: list[int], tokens: int = 8, **more: Any) -> list[int]:
        """What vLLM says, greedily."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True, **more}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=120) as response:
            return list(json.load(response)["choices"][0]["token_ids"])

    def loaded(self) -> int:
        """Tokens that vLLM had from its connector so far."""
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            lines = response.read().decode().splitlines()
        name = "vllm:external_prefix_cache_hits_total"
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def stack(reference_model: Path) -> Iterator[Stack]:
    with servers(reference_model) as started:
        worker, cache = started.worker()
        yield Stack(started, worker, cache, started.vllm(started.fusionkv(cache), *DTYPE, *CHAT))


@pytest.fixture(scope="module")
def gateway(stack: Stack) -> tuple[str, str]:
    """The addresses of a gateway, gRPC's and HTTP's, for which vLLM decodes."""
    flags, at = ("--decode", "vllm", "--vllm-url", stack.url), f"127.0.0.1:{free_port()}"
    return stack.started.gateway(stack.worker, *flags, "--http-listen", at), at


@dataclass
class Handed:
    """A prompt that a worker prefilled: its ids with the first token, and what vLLM is told of it."""

    prompt: list[int]
    params: dict[str, Any]
    events: Any

    async def summary(self) -> Any:
        async with asyncio.timeout(60):
            return (await anext(self.events)).summary


@asynccontextmanager
async def prefilled(stack: Stack, *chunks: list[int], recipe: str = "full_attention") -> AsyncIterator[Handed]:
    client = WorkerClient(stack.worker)
    ids = [*SYSTEM, *(i for c in chunks for i in c), *QUESTION]
    prompt = request(SYSTEM, chunks, QUESTION, 8, recipe=recipe)
    try:
        async with aclosing(client.prefill(pb.PrefillRequest(prompt=prompt))) as events:
            first, kv = (await anext(events)).first, (await anext(events)).kv
            names = ("handle", "prompt_digest", "model_fingerprint", "checksum")
            params = {name: getattr(kv, name).hex() for name in names}
            params |= {n: getattr(kv, n) for n in ("tokens", "layers", "kv_heads", "head_dim", "dtype", "path")}
            yield Handed([*ids, first.token.id], {"worker": stack.worker, **params}, events)
    finally:
        await client.close()


async def answer(stack: Stack, handed: Handed, salt: str, **more: Any) -> list[int]:
    told = {"fusionkv": {**handed.params, **more}}
    return await asyncio.to_thread(stack.ask, handed.prompt, 7, kv_transfer_params=told, cache_salt=salt)


@pytest.mark.parametrize("path", [None, "/proc/1/fd/999999", ""])
async def test_loaded_kv_gives_the_answer_of_vllm_itself(stack: Stack, path: str | None) -> None:
    """Streamed where it can't be mapped."""
    async with prefilled(stack, chunk(1), chunk(2)) as handed:
        plain = stack.ask(handed.prompt, 7, cache_salt="plain-1")
        before = stack.loaded()
        more = {} if path is None else {"path": path}
        assert await answer(stack, handed, f"loaded from {path}".replace("/", "-"), **more) == plain
        assert not (await handed.summary()).degraded
        assert stack.loaded() - before == len(handed.prompt) - 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"prompt_digest": "00" * 32}, "the KV is of another prompt"),
        ({"model_fingerprint": "00" * 32}, "the KV is of model 0000000000000000"),
        ({"dtype": "float64"}, "the KV's layout is KVLayout"),
        ({"tokens": 10**6}, "the KV has 1000000 tokens"),
    ],
)
async def test_what_does_not_fit_is_computed(stack: Stack, wrong: dict[str, Any], why: str) -> None:
    async with prefilled(stack, chunk(5)) as handed:
        plain = stack.ask(handed.prompt, 7, cache_salt="plain-3")
        before = stack.loaded()
        assert await answer(stack, handed, f"wrong {wrong}", **wrong) == plain
        assert (await handed.summary()).degraded_reason.startswith(why)
        assert stack.loaded() == before


async def test_what_is_gone_or_nonsense_is_computed(stack: Stack) -> None:
    async with prefilled(stack, chunk(6)) as handed:
        plain = stack.ask(handed.prompt, 7, cache_salt="plain-4")
        unlike = ({"handle": "00" * 16}, {"handle": "x"}, {"path": "/etc/passwd"}, {"layers": "3"})
        for number, wrong in enumerate((*unlike, {"worker": "127.0.0.1:1"})):
            assert await answer(stack, handed, f"nonsense-{number}", **wrong) == plain


async def test_damaged_kv_is_computed_and_told_of(stack: Stack) -> None:
    async with prefilled(stack, chunk(7), chunk(8)) as handed:
        plain = stack.ask(handed.prompt, 7, cache_salt="plain-5")
        file = os.open(handed.params["path"], os.O_RDWR)
        os.pwrite(file, b"\x55" * 4096, 8192)
        os.close(file)
        assert await answer(stack, handed, "damaged") == plain
        assert (await handed.summary()).degraded_reason == "the KV of a prompt failed its checksum"
    assert stack.ask(handed.prompt, 7, cache_salt="damaged") == plain  # nothing of it stays


async def test_a_caller_that_leaves_while_its_kv_is_loaded(stack: Stack) -> None:
    for number in range(4):
        async with prefilled(stack, chunk(20 + number), chunk(21)) as handed:
            told = {"kv_transfer_params": {"fusionkv": handed.params}, "cache_salt": f"l{number}"}
            data = json.dumps({"prompt": handed.prompt, "max_tokens": 200, **told}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
            await writer.drain()
            await asyncio.sleep(0.01 * number)
            writer.close()
            async with asyncio.timeout(60):
                await anext(handed.events)  # its KV was released, used or not
    assert stack.ask([*SYSTEM, *chunk(30)])


async def test_many_at_once(stack: Stack) -> None:
    chunks = [[chunk(40 + n), chunk(50 + n)] for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        prompts = [[*SYSTEM, *a, *b, *QUESTION] for a, b in chunks]
        plain = list(pool.map(lambda p: stack.ask(p, cache_salt="plain-6"), prompts))

    async def one(number: int) -> list[int]:
        async with prefilled(stack, *chunks[number]) as handed:
            return [handed.prompt[-1], *await answer(stack, handed, f"many-{number}")]

    assert await asyncio.gather(*(one(n) for n in range(6))) == plain


async def test_through_the_gateway(gateway: tuple[str, str]) -> None:
    client = AsyncClient(gateway[0], timeout=120)
    try:
        passages = [Passage(text=f"The town of Number {n} has {n} bridges.") for n in range(6)]
        for recipe in ("full_attention", "prophetkv"):
            for shown in (passages, passages[::-1]):
                found = await client.ask("", "How many?", passages=shown, recipe=recipe, max_tokens=6)
                assert found.summary.degraded_reason == ""
    finally:
        await client.close()


def test_chats_that_only_vllm_can_answer(gateway: tuple[str, str]) -> None:
    asked: dict[str, Any] = {
        "model": "fusionkv",
        "messages": [{"role": "user", "content": "Report Fenhinzu: items of Knut?"}],
        "max_tokens": 4,
    }
    passages = {"documents": ["Report Fenhinzu: Knut has an easel."]}
    with openai.OpenAI(base_url=f"http://{gateway[1]}/v1", api_key="none", timeout=120) as client:
        create = client.chat.completions.create
        several = create(**asked, extra_body=passages, n=2, temperature=0.9, seed=1, logprobs=True, top_logprobs=2)
        assert [choice.index for choice in several.choices] == [0, 1]
        assert all(len(token.top_logprobs) == 2 for c in several.choices for token in c.logprobs.content)
        summary = several.model_extra["fusionkv"]["summary"]
        assert (summary["tokens_generated"], summary["prompt_tokens"]) == (8, several.usage.prompt_tokens)
        body = {**passages, "structured_outputs": {"choice": ["easel", "coin"]}}
        chunks = list(create(**{**asked, "max_tokens": 16}, extra_body=body, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) in ("easel", "coin")
        with pytest.raises(openai.BadRequestError, match="status 4"):
            create(**asked, extra_body={"fusionkv": {"vllm_model": "unknown"}})


def test_instances_share_prefixes(reference_model: Path) -> None:
    """What one vLLM computed, another one finds in the cache service; one tenant's not by another."""
    prompt = [*SYSTEM, *chunk(60, 700), *QUESTION]
    with servers(reference_model) as started:
        cache = started.ours("kvcache_service", "--data-dir", str(Path(started.folder) / "kvcache"))
        said = []
        for number in range(2):
            with servers(reference_model) as inner:
                stack = Stack(inner, "", cache, inner.vllm(inner.fusionkv(cache), *DTYPE))
                before = stack.loaded()
                said.append(stack.ask(prompt, cache_salt="tenant"))
                shared = stack.loaded() - before
                assert stack.ask(prompt, cache_salt=f"another {number}") == said[0]
                assert stack.loaded() - before == shared
                stack.ask(SYSTEM)  # a step in which what was saved is told of
        assert said[0] == said[1]
        assert shared == 512  # two chunks of 256


async def test_two_ranks(reference_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loads its own heads, mapped or streamed; all are needed for vLLM's own answer."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with servers(reference_model) as started:
        worker, cache = started.worker()
        flags = (*DTYPE, "--tensor-parallel-size", "2")
        stack = Stack(started, worker, cache, started.vllm(started.fusionkv(cache), *flags))
        for number, more in enumerate(({}, {"path": ""})):
            async with prefilled(stack, chunk(1 + number), chunk(2)) as handed:
                plain = stack.ask(handed.prompt, 7, cache_salt="plain")
                before = stack.loaded()
                assert await answer(stack, handed, f"loaded-{number}", **more) == plain
                assert not (await handed.summary()).degraded
                assert stack.loaded() - before == len(handed.prompt) - 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy = recompute"),
        ({"kv_connector_extra_config": {"cash": "x"}}, "cash is not one of cache, chunk_tokens"),
    ],
)
def test_a_configuration_that_is_refused(reference_model: Path, wrong: dict[str, Any], why: str) -> None:
    with servers(reference_model) as started, pytest.raises(OSError, match=why):
        started.vllm({**started.fusionkv(""), **wrong})
