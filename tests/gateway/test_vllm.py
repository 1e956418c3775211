"""Answers that a worker prefills and another engine decodes; that one is transformers behind vLLM's HTTP API here.

vLLM itself is tested in tests/vllm.
"""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Explanation, Passage, Token
from fusionkv.protos.runtime.errors import FailedPrecondition, ResourceExhausted, Unavailable
from tests.commands import run_python
from tests.gateway.conftest import Start
from tests.gateway.decoder import Decoder
from tests.ports import free_port
from tests.services import Launch, start_gateway, start_worker
from tests.waiting import until

pytestmark = pytest.mark.system
PASSAGES = [Passage(text=f"Number {n} is the colour of {word}.") for n, word in enumerate(("milk", "grass", "coal"))]
OTHER = [PASSAGES[i] for i in (2, 0, 1)]


@pytest.fixture(scope="module")
def worker(launch_module: Launch, tiny_model: Path) -> Any:
    return start_worker(launch_module, tiny_model, "--cache", "none")


@pytest.fixture
async def decoder(tiny_model: Path) -> AsyncIterator[Decoder]:
    made = Decoder(tiny_model)
    async with made.serving() as made.url:
        yield made


Open = Callable[..., AsyncClient]


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
            same = ("recipe", "ratio", "prompt_tokens", "context_tokens", "tokens_recomputed", "tokens_generated")
            assert [getattr(got, name) for name in same] == [getattr(want, name) for name in same]
            assert got.finish_reason == "max_tokens"
            assert 0 < got.seconds.ttft < got.seconds.total
            assert got.seconds.decode > 0
    assert decoder.loaded == len(decoder.bodies) == 4


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
    assert not (await ask(client, PASSAGES)).summary.degraded
    assert "kv_transfer_params" in decoder.bodies[-1]
    events = [e async for e in client.stream("", "What is white?", passages=PASSAGES, max_tokens=2, explain=True)]
    assert any(isinstance(e, Explanation) for e in events)  # which only a worker can give


@pytest.mark.slow
async def test_sampling_and_stop_strings(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    alone, client = open_gateway(worker), open_gateway(worker, decoder.url)
    text = (await ask(alone, PASSAGES)).text
    stop = text[3:5]
    told, answer = await ask(alone, PASSAGES, stop=[stop]), await ask(client, PASSAGES, stop=[stop])
    assert (answer.text, answer.summary.finish_reason) == (told.text, "stop_string")
    assert answer.summary.tokens_generated == told.summary.tokens_generated
    await ask(client, OTHER, temperature=0.7, top_p=0.9, sample_top_k=5, seed=3)
    body = decoder.bodies[-1]
    assert [body[name] for name in ("temperature", "top_p", "top_k", "seed")] == [0.7, 0.9, 5, 3]


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


@pytest.mark.slow
async def test_what_vllm_answers_wrong(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    client = open_gateway(worker, decoder.url)
    for status, error in ((400, FailedPrecondition), (503, ResourceExhausted), (500, Unavailable)):
        decoder.status = status
        with pytest.raises(error, match=f"vLLM at .* status {status}"):
            await ask(client, PASSAGES)
    decoder.status, decoder.early = 200, True
    with pytest.raises(Unavailable, match="ended the answer early"):
        await ask(client, PASSAGES)
    nobody = open_gateway(worker, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable, match="vLLM at http"):
        await ask(nobody, PASSAGES)


async def test_a_recipe_that_only_the_worker_decodes(worker: Any, decoder: Decoder, open_gateway: Open) -> None:
    with pytest.raises(FailedPrecondition, match="only the fusion worker can decode an answer by"):
        await ask(open_gateway(worker, decoder.url), PASSAGES, recipe="ape")
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


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--decode", "sglang"), "decode must be worker or vllm"),
        (("--decode", "vllm"), "decode = vllm needs vllm_url"),
    ],
)
def test_settings(flags: tuple[str, ...], why: str) -> None:
    assert why in run_python("-m", "fusionkv.gateway", *flags, status=1).stderr
