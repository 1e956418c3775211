"""Fused prefill inside vLLM, on vLLM's own weights: checks that run in vLLM's process, and what is refused."""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusionkv.bench.cache.peers import Process
from fusionkv.bench.services.vllm import VLLM, Servers, servers
from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.kernels.segments import KVSegment
from fusionkv.vllm_connector.fusing import FusedPrefill
from fusionkv.vllm_connector.spans import SpannedPrompt
from tests.fusion_worker import oracle
from tests.kernels.inputs import rotary
from tests.system.prompts import request

ROOT = Path(__file__).parent.parent.parent
needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed: scripts/setup.sh vllm")
SYSTEM, QUESTION = [1, 5, 6, 7], [9, 8, 7, 6, 5]
PAGE = 128  # tokens of a block of vLLM on a CPU
# A name of a recipe, and its ratio.
RECIPES = ("full_reuse@", "prophetkv@0", "prophetkv@0.2", "epic@", "cacheblend@", "kvshare@", "cache_craft@", "a3@")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
RECIPES += ("fusionrag@", "deeplayer@0.1", "default@", "epic+primed@0.3", "prefix_cache@")


def chunk(seed: int, tokens: int = 150) -> list[int]:
    return [10 + (seed * 7919 + i * i * 31 + i * 7) % 240 for i in range(tokens)]


async def answers(worker: str) -> dict[str, list[int]]:
    """A fusion worker's answers, by recipe, to the prompt that the checks ask."""
    client, found = WorkerClient(worker), dict[str, list[int]]()
    try:
        for name in RECIPES:
            recipe, _, ratio = name.partition("@")
            more = {"ratio": float(ratio)} if ratio else {}
            chunks = [chunk(3), chunk(1), chunk(2)]
            # For each recipe a tenant: none finds exactly this prompt, as another recipe stored it.
            asked = request(SYSTEM, chunks, QUESTION, 8, recipe=recipe, corpus="c", tenant=name, **more)
            responses = [response async for response in client.generate(asked)]
            found[name] = [response.token.id for response in responses if response.HasField("token")]
    finally:
        await client.close()
    return found


def check(model: Path, *arguments: str) -> None:
    """Runs checks in vLLM's process, which imports this clone's package."""
    command = (str(VLLM), "-P", "tests/vllm/fusing.py", str(model), *arguments)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "build/types")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "all passed" in done.stdout


@pytest.mark.slow
@pytest.mark.system
@needs_vllm
def test_the_checks_in_vllm_pass(reference_model: Path) -> None:
    with servers(reference_model) as started:
        folder = ("--data-dir", str(started.folder / "kvcache"), "--memory-bytes", "1MiB")
        service = started.start(sys.executable, "-P", "-m", "fusionkv.kvcache_service", *listening(started), *folder)
        (cache,) = service.addresses
        worker = started.ours("fusion_worker", "--model", str(reference_model), "--cache", cache)
        check(reference_model, cache, str(service.pid), json.dumps(asyncio.run(answers(worker))))


@pytest.mark.slow
@pytest.mark.system
@needs_vllm
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "glm4"])
def test_families(family: str, tmp_path: Path) -> None:
    """Besides the reference model's, Qwen2."""
    check(oracle.saved(tmp_path, family), "", "", "{}", "model", "all_recomputed", "other_order")


def listening(started: Any) -> tuple[str, str]:
    return "--listen", f"unix:{started.folder}/kvcache_service.sock"


@dataclass
class Inside:
    """A vLLM server that fuses passages, in a process of its own, beside a cache service."""

    started: Servers
    cache: Process
    url: str
    listen: str


@pytest.fixture(scope="module")
def inside(reference_model: Path) -> Iterator[Inside]:
    with servers(reference_model) as started:
        folder = ("--data-dir", str(started.folder / "kvcache"))
        cache = started.start(sys.executable, "-P", "-m", "fusionkv.kvcache_service", *listening(started), *folder)
        listen = f"unix:{started.folder}/vllm.sock"
        connector = started.fusionkv(cache.addresses[0], 1 << 26, listen=listen)
        yield Inside(started, cache, started.vllm(connector, "--dtype", "float32"), listen)


@pytest.mark.slow
@pytest.mark.system
@needs_vllm
def test_over_http(inside: Inside) -> None:
    def ask(chunks: list[list[int]], **fused: Any) -> Any:
        ends = list(itertools.accumulate(map(len, chunks), initial=len(SYSTEM)))
        prompt = [*SYSTEM, *itertools.chain(*chunks), *QUESTION]
        more = {"kv_transfer_params": {"fusionkv": {"spans": list(itertools.pairwise(ends)), **fused}}}
        salt = {"cache_salt": "fused", **more} if fused else {}
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **salt}
        head = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{inside.url}/v1/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(asked, timeout=120) as response:
            found = json.load(response)
        return found["choices"][0]["token_ids"], found["kv_transfer_params"]

    for chunks in ([chunk(1), chunk(2), chunk(3)], [chunk(2), chunk(3), chunk(1)]):
        tokens, told = ask(chunks, recipe="prophetkv", ratio=1)
        assert (tokens, None) == ask(chunks)
        assert told["fusionkv"]["recipe"] == "prophetkv"
        assert "degraded" not in told["fusionkv"]
    assert "chunks_missed" not in told["fusionkv"]


@pytest.mark.slow
@pytest.mark.system
@needs_vllm
async def test_through_a_gateway_without_a_worker(inside: Inside) -> None:
    """Retrieval and plan by the gateway, streams and the whole summary by vLLM with its connector."""
    flags = ("--decode", "vllm", "--vllm-url", inside.url)
    client = AsyncClient(inside.started.gateway(inside.listen, *flags), timeout=120)
    texts = [f"The town of Number {n} has {n} bridges over the river and {n + 1} mills." for n in range(6)]

    async def ask(shown: list[str], **more: Any) -> Any:
        return await client.ask("", "How many?", passages=shown, order="rank", max_tokens=8, **more)

    try:
        right = await ask(texts, recipe="full_attention")
        assert (right.summary.tokens_recomputed, right.summary.degraded_reason) == (right.summary.context_tokens, "")
        for shown, missed in ((texts, 6), (texts[::-1], 0)):
            summary = (await ask(shown, recipe="prophetkv")).summary
            assert (summary.degraded_reason, summary.chunks_missed) == ("", missed)
            assert sum(hit.chunks for hit in summary.hits) == 6 - missed
        repeated = (await ask(texts[::-1], recipe="prophetkv")).summary
        assert (repeated.degraded_reason, len(repeated.hits)) == ("", 0)
        assert repeated.context_tokens - repeated.tokens_reused == repeated.tokens_recomputed < PAGE
        # Nothing of the first is left in vLLM's prefix cache for another salt.
        assert (await ask(texts, recipe="prophetkv", ratio=1.0)).text == right.text
        stopped = await ask(texts, recipe="prophetkv", ratio=1.0, stop=[right.text[2:4]])
        assert (stopped.summary.finish_reason, stopped.summary.degraded_reason) == ("stop_string", "")
        several = await asyncio.gather(*(ask(texts[n:] + texts[:n], recipe="epic") for n in range(1, 6)))
        assert [each.summary.degraded_reason for each in several] == [""] * 5
        await client.ingest("towns", "towns.md", "\n\n".join(texts).encode())
        found = await client.ask("towns", "How many bridges has Number 3?", max_tokens=4)
        assert (found.summary.degraded_reason, found.summary.chunks_retrieved) == ("", len(found.sources))
        inside.cache.stop()
        lost = await ask([*texts, "A new one."], recipe="prophetkv")
        assert lost.summary.degraded
        assert "lookup failed" in lost.summary.degraded_reason
        assert lost.summary.tokens_recomputed == lost.summary.context_tokens
        assert lost.text == (await ask([*texts, "A new one."], recipe="full_attention")).text
    finally:
        await client.close()


@pytest.mark.slow
@pytest.mark.system
@needs_vllm
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--hf-overrides", '{"rope_theta": 5000.0}'), "vLLM can't fuse passages with hf_overrides"),
        (("--tensor-parallel-size", "2"), "vLLM can't fuse passages with tensor parallelism"),
        (("--enable-lora",), "vLLM can't fuse passages with LoRA"),
        (("--speculative-config", NGRAM), "vLLM can't fuse passages with speculative decoding"),
    ],
)
def test_what_vllm_is_not_started_with(
    reference_model: Path, flags: tuple[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise vLLM binds the threads of each of two ranks to a NUMA node, and most machines have one.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with servers(reference_model) as started, pytest.raises(OSError, match=why):
        started.vllm(started.fusionkv("", 1 << 26), "--dtype", "float32", *flags)


def quantised(model: Path, folder: Path) -> Path:
    """A copy of a model with weights of eight bits, in the format that vLLM computes with on CPUs too."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name, weight in weights.items() if "_proj.weight" in name]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[f"{name}_scale"], weights[name] = scale, (weights[name] / scale).round().to(torch.int8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    made = {"weights": {**bits, "strategy": "channel"}}
    made |= {"targets": ["Linear"], "input_activations": {**bits, "strategy": "token", "dynamic": True}}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    config["quantization_config"] |= {"config_groups": {"group_0": made}, "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.system
@needs_vllm
def test_a_quantised_model_is_refused(reference_model: Path, tmp_path: Path) -> None:
    """Which vLLM starts with otherwise."""
    with servers(quantised(reference_model, tmp_path / "quantised")) as started:
        started.vllm(started.fusionkv(""), "--dtype", "bfloat16")
        with pytest.raises(OSError, match="vLLM can't fuse passages with quantization"):
            started.vllm(started.fusionkv("", 1 << 26), "--dtype", "bfloat16")


@pytest.mark.slow
@pytest.mark.system
@needs_vllm
def test_a_model_of_other_layers_is_refused(tmp_path: Path) -> None:
    model, why = oracle.saved(tmp_path, "qwen3-moe"), r"vLLM has no \S+\.experts\.\S+ of .* that transformers has"
    with servers(model, 1024) as started, pytest.raises(OSError, match=why):
        started.vllm(started.fusionkv("", 1 << 26), "--dtype", "float32")


def test_kv_is_found_without_a_wait_for_a_gpu() -> None:
    """A span's positions are in host memory: torch compares them with others there."""
    rotation, segments = rotary(8), (KVSegment(2, 3, 0, shift=5), KVSegment(9, 4, 3))
    kv = torch.empty(1, 2, 16, 2, 8, device="meta")
    inside: Any = SimpleNamespace(pool=SimpleNamespace(kv=kv), _model=SimpleNamespace(rotations=(rotation,)))
    plan: Any = SimpleNamespace(visible=lambda: segments)
    keys, values = next(FusedPrefill._layers(inside, plan, 6))
    assert keys.shape == values.shape == (6, 2, 8)


def test_spans() -> None:
    params = {"fusionkv": {"spans": [[2, 5], [5, 6]], "recipe": "prophetkv", "ratio": 1, "tenant": "a"}}
    asked = SpannedPrompt.of(params, range(100, 110))
    assert asked is not None
    request = asked.request()
    parts = [list(part.ids) for part in (request.system, *request.chunks, request.question)]
    assert parts == [[100, 101], [102, 103, 104], [105], [106, 107, 108, 109]]
    assert (asked.tokens, request.recipe, request.ratio, request.tenant) == (6, "prophetkv", 1, "a")
    assert asked.reuses
    told = {"recipe": "prophetkv", "ratio": 1, "prompt_tokens": 10, "context_tokens": 4}
    assert asked.figures(1) == {**told, "tokens_reused": 0, "tokens_recomputed": 4}
    assert asked.figures(9) == {**told, "tokens_reused": 4, "tokens_recomputed": 0}
    assert SpannedPrompt.of(None, [1]) is SpannedPrompt.of({"fusionkv": {"handle": ""}}, [1]) is None
    plain = SpannedPrompt.of({"fusionkv": {"spans": [[0, 1]], "recipe": "full_attention"}}, [1, 2])
    assert plain is not None
    assert not plain.reuses
    assert not plain.request().HasField("ratio")
    assert (plain.figures(1)["tokens_lossless"], plain.figures(0)["ratio"]) == (1, 1.0)


def test_separators() -> None:
    ids = [1, 2, 8, 9, 3, 4, 5, 8, 9, 8, 6, 8, 9, 7]
    found = SpannedPrompt.separated(ids, [8, 9], "acme")
    assert found is not None
    assert (found.spans, found.tenant, found.request().question.ids) == (((4, 9), (9, 13)), "acme", [7])
    assert SpannedPrompt.separated(ids[:7], [8, 9], "") is None  # a system prompt alone
    with_end = SpannedPrompt.separated(ids[:-1], [8, 9], "")
    assert with_end is not None
    assert with_end.spans == ((4, 9),)  # what is behind the last passage but one is the question


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"spans": []}, "spans is empty"),
        ({"spans": [[0, 3], [4, 5]]}, "does not begin where the passage before it ends"),
        ({"spans": [[3, 3]]}, r"\[3, 3\] is empty"),
        ({"spans": [[-1, 3]]}, "does not begin"),
        ({"spans": [[0, 10]]}, "there is no question"),
        ({"spans": [[0, True]]}, "pairs of positions"),
        ({"spans": "x"}, "spans has the wrong type"),
        ({"spans": [[0, 3]], "handle": "x"}, "handle is not one of spans, recipe"),
        ({"spans": [[0, 3]], "ticket": 1}, "ticket has the wrong type"),
        ({"spans": [[0, 3]], "ratio": True}, "ratio has the wrong type"),
        ({"spans": [[0, 3]], "ratio": 1.5, "recipe": "epic"}, "ratio is 1.5"),
        ({"spans": [[0, 3]], "recipe": "epik"}, "unknown recipe"),
        ({"spans": [[0, 3]], "corpus": "c" * 257}, "longer than 256 characters"),
    ],
)
def test_what_are_no_spans(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SpannedPrompt.of({"fusionkv": wrong}, range(10))
