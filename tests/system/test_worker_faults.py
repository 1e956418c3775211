"""Workers and cache services as processes: killed, stopped, restarted; every answer is right and says so."""

import asyncio
import functools
import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.models import LAYOUT
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime import errors
from tests.fusion_worker.oracle import BASE, byte_tokenizer
from tests.services import pool_bytes, start_worker
from tests.system import prompts
from tests.waiting import until

pytestmark = pytest.mark.system
TOKENS = 6


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 94, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SYSTEM, QUESTION = ids(8, 0), ids(6, 1)
A, B, C = (ids(n, n) for n in (60, 45, 50))


@functools.cache
def network() -> Any:
    torch.manual_seed(1)
    config = transformers.Qwen3Config(**BASE | {"head_dim": 32, "max_position_embeddings": 4096})
    made = transformers.Qwen3ForCausalLM(config).eval()
    made.lm_head.weight.data[94:] = 0  # answers are printable ASCII and never end by themselves
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a token for each byte."""
    folder = tmp_path_factory.mktemp("model")
    network().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


class Cache:
    """A cache service at one address, whatever becomes of its process."""

    def __init__(self, launch: Any, folder: Path) -> None:
        self._launch, self._folder = launch, folder
        self.address = f"unix:{folder}/cache.sock"
        self.start()

    def start(self) -> None:
        files = ("--listen", self.address, "--data-dir", str(self._folder / "data"), "--lease-ms", "2000")
        limits = ("--memory-bytes", "64MiB", "--disk-bytes", "64MiB")
        self.process = self._launch("fusionkv.kvcache_service", *files, *limits)


def start(launch: Any, directory: Path, *more: str, cache: Any = None, pool_tokens: int = 736) -> Any:
    """A worker. A prompt as long as its pool evicts all chunks, so that the next one has to fetch."""
    size = ("--device", "cpu", "--pool-bytes", pool_bytes(directory, pool_tokens))
    return start_worker(launch, directory, *size, *more, cache=cache)


def request(chunks: list[list[int]], max_tokens: int = TOKENS, **more: Any) -> pb.GenerateRequest:
    return prompts.request(SYSTEM, chunks, QUESTION, max_tokens, **{"recipe": "prophetkv", "ratio": 1.0, **more})


async def ask(worker: WorkerClient, chunks: list[list[int]], **more: Any) -> tuple[list[int], Summary]:
    events = [event async for event in worker.generate(request(chunks, **more))]
    assert events[-1].HasField("summary")
    return [event.token.id for event in events[:-1]], events[-1].summary


async def answer(worker: WorkerClient, chunks: list[list[int]], **more: Any) -> Summary:
    """Asks; the tokens are those of plain greedy decoding."""
    found, summary = await ask(worker, chunks, **more)
    assert found == expected(chunks)
    return summary


async def evict(worker: WorkerClient) -> None:
    """Empties the worker's pool of chunks by a prompt that needs all of it."""
    await ask(worker, [ids(712, 9)], recipe="full_attention")


def expected(chunks: list[list[int]]) -> list[int]:
    """What plain greedy decoding answers."""
    whole = torch.tensor([[*SYSTEM, *itertools.chain(*chunks), *QUESTION]])
    out = network().generate(
        whole, attention_mask=torch.ones_like(whole), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
    )
    return out[0, whole.shape[1] :].tolist()


def hits(summary: Summary) -> set[tuple[str, str, int]]:
    return {(h.kind, h.tier, h.chunks) for h in summary.hits}


async def stored(cache: Cache, worker: WorkerClient, chunks: list[list[int]], tenant: str = "") -> None:
    """Waits until the cache service holds the system prompt and these chunks, which come there in the background."""
    client, model = CacheClient(cache.address), await worker.model()
    space = keys.namespace(model.fingerprint, {"dtype": model.dtype, "layout": LAYOUT}, tenant)
    path: list[Any] = [(keys.chunk_digest(part), ()) for part in (SYSTEM, *chunks)]

    async def all_there() -> bool:
        return all(hit.entry for hit in (await client.lookup(space, path, lease_ms=1, timeout=20)).hits)

    await until(all_there)
    await client.close()


async def recovered(worker: WorkerClient, chunks: list[list[int]], **more: Any) -> Summary:
    """Asks until an answer is not degraded; all of them are right."""
    async with asyncio.timeout(120):
        while (summary := await answer(worker, chunks, **more)).degraded:
            pass
    return summary


async def test_a_chunk_outlives_worker_and_cache(launch: Any, tmp_path: Path, directory: Path) -> None:
    """Computed in one prompt, found in another at another place, from the device, from memory, from disk."""
    cache = Cache(launch, tmp_path)
    first = start(launch, directory, cache=cache)
    worker = WorkerClient(first.address)
    assert (await answer(worker, [A, B])).chunks_missed == 2
    assert hits(await answer(worker, [C, A])) == {("alternative", "device", 1)}
    await worker.close()
    assert first.stop() == 0, "what waited to be stored is stored"

    worker = WorkerClient(start(launch, directory, cache=cache).address)
    summary = await answer(worker, [B, A, C])
    assert hits(summary) == {("exact", "memory", 1), ("alternative", "memory", 2)}
    assert summary.bytes_fetched > 0

    cache.process.kill9()
    cache.start()
    await evict(worker)
    summary = await recovered(worker, [C, B, A])
    assert hits(summary) == {("exact", "disk", 1), ("alternative", "disk", 2)}
    await worker.close()


async def test_killed_workers_leak_no_lease(launch: Any, cache_client: Any, tmp_path: Path, directory: Path) -> None:
    cache = Cache(launch, tmp_path)
    service = start(launch, directory, cache=cache, pool_tokens=3936)
    worker, client = WorkerClient(service.address), cache_client(cache)
    await ask(worker, [A])
    await stored(cache, worker, [A])
    # A prompt that waits for room keeps its lease: an answer as long as the model takes holds the pool meanwhile.
    long = worker.generate(request([ids(120, 4)], recipe="full_attention", max_tokens=3800))
    await anext(long)

    async def leased(wanted: bool = True) -> bool:
        return bool((await client.stats()).active_leases) == wanted

    await until(lambda: leased(False))  # what looked for the stored ones
    waiting = asyncio.create_task(ask(worker, [A, B, C]))
    await until(leased)
    assert not waiting.done(), "answered before it was seen to hold a lease"
    service.kill9()
    with pytest.raises(errors.ServiceError):
        await waiting
    await until(lambda: leased(False))
    await long.aclose()
    await worker.close()


async def test_sigterm_lets_answers_end(launch: Any, directory: Path) -> None:
    service = start(launch, directory, "--cache", "none", "--drain-seconds", "300")
    worker = WorkerClient(service.address)
    stream = worker.generate(request([A, B], max_tokens=300))
    tokens = 0
    async for event in stream:
        tokens += event.HasField("token")
        if tokens == 3:
            service.process.send_signal(signal.SIGTERM)
    assert event.HasField("summary")
    assert event.summary.finish_reason == "max_tokens"
    assert tokens == 300
    await worker.close()
    assert await asyncio.to_thread(service.wait) == 0
    assert "Traceback" not in service.log
    assert "fusionkv-worker stopped" in service.log
