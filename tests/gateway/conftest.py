"""A tiny model with random weights, and the real services around it."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from tests.ports import free_port
from tests.services import Launch, start_cache, start_gateway, start_worker


@contextlib.contextmanager
def running_milvus(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Milvus Lite as a server, by its URL and its process."""
    port = free_port()
    command = [Path(sys.executable).parent / "milvus-lite", "server", "--data-dir", folder]
    log = folder.parent / f"{folder.name}.log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=out, stderr=out)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ready, end = grpc.channel_ready_future(channel), time.monotonic() + 180
            while not ready.done() and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            assert ready.done(), log.read_text()
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Milvus that all tests share: FUSIONKV_TEST_MILVUS, or else Milvus Lite as a server."""
    if url := os.environ.get("FUSIONKV_TEST_MILVUS"):
        yield url
        return
    with running_milvus(tmp_path_factory.mktemp("milvus") / "data") as (url, _):
        yield url


def byte_level() -> Tokenizer:
    """One token for each byte."""
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 model directory: two layers, random weights, one token for each byte."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<bos>", eos_token="<eos>", add_bos_token=True
    )
    # The end is never drawn, so that an answer has as many tokens as were asked for.
    config = Qwen2Config(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=256, eos_token_id=259,
    )  # fmt: skip
    torch.manual_seed(0)
    network = Qwen2ForCausalLM(config)
    with torch.no_grad():
        network.lm_head.weight[256:] = -10 * network.lm_head.weight[:256].mean(0)
    folder = tmp_path_factory.mktemp("model")
    for made in (network, tokenizer):
        made.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Stack:
    """A cache service, a worker and a gateway, each a process, and a client of the gateway."""

    cache: Any
    worker: Any
    gateway: Any
    client: Client


def succeeds(call: Callable[[], Any], *errors: type[Exception]) -> bool:
    """Whether the call returns, and raises none of these errors."""
    try:
        call()
    except errors:
        return False
    return True


Reopen = Callable[[Path], Awaitable[EmbeddedRetrieval]]


@pytest.fixture
async def reopen() -> AsyncIterator[Reopen]:
    """Opens a folder of corpora, once it has closed the engine that it opened before."""
    opened: list[EmbeddedRetrieval] = []

    async def start(folder: Path) -> EmbeddedRetrieval:
        if opened:
            await opened.pop().close()
        opened.append(await EmbeddedRetrieval.open(folder))
        return opened[0]

    yield start
    for engine in opened:
        await engine.close()


Start = Callable[..., Any]


@pytest.fixture
def start(launch: Launch, tiny_model: Path) -> Start:
    """Starts a worker of the tiny model, with these flags."""
    return functools.partial(start_worker, launch, tiny_model)


@pytest.fixture
def cache(launch: Launch, tmp_path: Path) -> Any:
    return start_cache(launch, tmp_path)


Serve = Callable[..., tuple[Client, Any]]


@pytest.fixture
def serve(launch: Launch, tmp_path: Path) -> Iterator[Serve]:
    """Starts a gateway over workers, with these flags; returns a client of it, and its process."""
    with contextlib.ExitStack() as stack:

        def start(workers: Any, *flags: str, token: Any = None, **more: Any) -> tuple[Client, Any]:
            gateway = start_gateway(launch, tmp_path, workers, *flags, **more)
            return stack.enter_context(Client(gateway.address, token=token, timeout=60)), gateway

        yield start


@pytest.fixture(scope="module")
def notes(launch_module: Launch, reference_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a gateway with the corpus `notes`, for clients of other libraries."""
    worker = start_worker(launch_module, reference_model)
    started = start_gateway(launch_module, tmp_path_factory.mktemp("notes"), worker)
    with Client(started.address, timeout=60) as client:
        client.ingest("notes", "a.md", "Report Velkorda. The lake is blue. The code of Bervek is 535.")
        client.ingest("notes", "b.md", "Report Velkorda. The hill is green. The age of Dorlin is 41.")
    return str(started.address)


@pytest.fixture(scope="module")
def stack(launch_module: Launch, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One of each service for all tests of a module; small limits, so that they can be hit."""
    flags = ("--max-document-bytes", "64KiB", "--max-document-chunks", "200", "--chunk-tokens", "64")
    folder = tmp_path_factory.mktemp("stack")
    cache = start_cache(launch_module, folder)
    worker = start_worker(launch_module, tiny_model, cache=cache)
    gateway = start_gateway(launch_module, folder, worker, *flags)
    with Client(gateway.address, timeout=60) as client:
        yield Stack(cache, worker, gateway, client)


@pytest.fixture(scope="module")
def client(stack: Stack) -> Client:
    """With the corpus `base` of six documents."""
    for i in range(6):
        stack.client.ingest("base", f"page-{i}.txt", f"Report Velnora.\nThe code of Name{i} is {100 + i}.")
    return stack.client
