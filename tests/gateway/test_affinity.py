"""Which of two real workers gets a prompt: by what their pools hold, and by how busy they are."""

import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.workers.fleet import PrefixAffinity
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from tests.services import Launch, start_cache, start_worker

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]
TOPICS, PAGES, TOKENS = 4, 6, 256
ROUNDS = 15


def prompt(topic: int, pages: Sequence[int], max_tokens: int = 2) -> pb.GenerateRequest:
    """A question for some pages of a topic."""
    chunks = [pb.Chunk(ids=[40 + topic, 50 + page] * (TOKENS // 2)) for page in sorted(pages)]
    sampling = pb.Sampling(max_tokens=max_tokens)
    return pb.GenerateRequest(recipe="full_reuse", chunks=chunks, question=pb.Tokens(ids=[1]), sampling=sampling)


@pytest.fixture(scope="module")
def workers(launch_module: Launch, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Addresses of two, each with room for less than three of four topics: a token of the model takes 256 bytes."""
    cache = start_cache(launch_module, tmp_path_factory.mktemp("affinity"))
    return [start_worker(launch_module, tiny_model, "--pool-bytes", "1MiB", cache=cache).address for _ in range(2)]


def asked() -> list[pb.GenerateRequest]:
    """Questions that want four of the six pages of their topic; topics in any order."""
    chance = random.Random(1)
    topics = [topic for _ in range(ROUNDS) for topic in range(TOPICS)]
    chance.shuffle(topics)
    return [prompt(topic, chance.sample(range(PAGES), 4)) for topic in topics]


async def from_pool(call: Callable[[int, pb.GenerateRequest], Any]) -> int:
    """Chunks that were in the pool of the worker which answered, in the second half of all."""
    hits = 0
    requests = asked()
    for number, request in enumerate(requests):
        async with contextlib.aclosing(call(number, request)) as responses:
            async for response in responses:
                if response.HasField("summary") and number >= len(requests) // 2:
                    hits += sum(hit.chunks for hit in response.summary.hits if hit.tier == "device")
    return hits


async def test_prompts_go_where_their_chunks_are(workers: list[str]) -> None:
    """Beside the same prompts given to both workers in turn. The load is the same: one at a time."""
    clients = [WorkerClient(address) for address in workers]
    in_turn = await from_pool(lambda number, request: clients[number % 2].generate(request))
    for client in clients:
        await client.close()
    pool = WorkerPool(workers)
    routed = await from_pool(lambda _, request: pool.generate(request, 60))
    await pool.close()
    most = 4 * ROUNDS * TOPICS // 2
    print(f"chunks from the pool: {routed} of {most}, in turn {in_turn}")
    assert routed > 1.2 * in_turn


async def test_a_busy_worker_is_passed_over_for_all_it_holds(workers: list[str]) -> None:
    pool = WorkerPool(workers)
    request = prompt(0, range(4))
    async for _ in pool.generate(request, 60):
        pass
    (warm,) = (m for m in pool._fleet.members if m.holdings.share({}) == 0 and m.holdings._tokens)
    (cold,) = (m for m in pool._fleet.members if m is not warm)
    streams = [pool.generate(prompt(0, range(4), max_tokens=120), 60) for _ in range(4)]
    for stream in streams:
        await anext(stream)
    # Two more than the other has are worth it, for what it holds; then both hold it, and share.
    assert (warm.in_flight, cold.in_flight) in {(2, 2), (3, 1)}
    for stream in streams:
        await stream.aclose()
    await pool.close()


def test_holdings_are_bounded_by_the_pool() -> None:
    holdings = PrefixAffinity()
    holdings.resize(100)
    for number in range(10):
        holdings.use({bytes([number]): 30})
    assert holdings.share({bytes([9]): 30, bytes([8]): 30, bytes([7]): 30}) == 1
    assert holdings.share({bytes([6]): 30}) == 0
    holdings.use({bytes([7]): 30})
    holdings.use({b"new": 30})
    assert holdings.share({bytes([7]): 30, bytes([8]): 10}) == 0.75
    holdings.resize(30)
    assert holdings.share({b"new": 1, bytes([7]): 1}) == 0.5
    holdings.clear()
    assert holdings.share({b"new": 1}) == 0
    assert holdings.share({}) == 0
