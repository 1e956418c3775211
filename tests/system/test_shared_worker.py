"""A worker beside one of two cache services: it fetches from the other, and goes on when either is killed."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from tests.system.redis_process import RedisServer
from tests.system.shared_services import Services
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.slow]
POOL_TOKENS = 768


def ids(count: int, seed: int) -> list[int]:
    return [(7 * seed + 13 * i) % 200 + 20 for i in range(count)]


SYSTEM, QUESTION = ids(8, 1), ids(6, 2)
CHUNKS = [ids(10 + n % 6, 10 + n) for n in range(20)]  # so many that one service holding all of them is 1 in 10^6


async def ask(worker: WorkerClient, chunks: list[list[int]], **more: Any) -> tuple[list[int], Summary]:
    request = pb.GenerateRequest(
        system=pb.Tokens(ids=SYSTEM),
        chunks=[pb.Chunk(ids=chunk) for chunk in chunks],
        question=pb.Tokens(ids=QUESTION),
        sampling=pb.Sampling(max_tokens=6),
        **more,
    )
    events = [event async for event in worker.generate(request)]
    return [event.token.id for event in events if event.HasField("token")], events[-1].summary


@pytest.fixture
async def services(launch: Any, tmp_path: Path) -> AsyncIterator[Services]:
    server = RedisServer(tmp_path)
    made = Services(launch, tmp_path, server.url)
    made.start()
    made.start()
    yield made
    await made.close()
    server.kill9()


@pytest.mark.parametrize(
    ("killed", "signed"), [(1, False), (0, False), (0, True)], ids=["the other", "its own", "its own, signed"]
)
async def test_a_worker_fetches_from_the_holder_and_outlives_either(
    launch: Any, services: Services, reference_model: Path, tmp_path: Path, killed: int, signed: bool
) -> None:
    shape = json.loads((reference_model / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    (tmp_path / "signing.keys").write_text("11" * 32)
    keys = ("--signing-keys", str(tmp_path / "signing.keys")) if signed else ()
    pool = POOL_TOKENS * shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * head * 4
    service = launch(
        "fusionkv.fusion_worker", "--model", str(reference_model), "--listen", "127.0.0.1:0", "--device", "cpu",
        "--dtype", "float32", "--threads", "1", "--pool-bytes", str(pool), "--cache", services.services[0].address,
        *keys,
    )  # fmt: skip
    await services.emptied(2)
    worker = WorkerClient(service.address)

    async def evict() -> None:
        """Empties the worker's pool by a prompt that needs all of it."""
        await ask(worker, [ids(740, 3)], recipe="full_attention")

    right, _ = await ask(worker, CHUNKS, recipe="full_attention")
    found, summary = await ask(worker, CHUNKS, recipe="prophetkv", ratio=1.0)
    assert found == right
    assert summary.chunks_missed == len(CHUNKS)

    async def stored() -> bool:
        return sum(await services.entries()) == len(CHUNKS) + 1

    await until(stored)
    await services.settled(2)
    held = await services.entries()
    assert all(held), "both have some"
    await evict()
    found, summary = await ask(worker, CHUNKS, recipe="prophetkv", ratio=1.0)
    assert found == right
    assert not summary.degraded
    assert summary.chunks_missed == 0
    assert {hit.tier for hit in summary.hits} == {"memory", "remote"}
    remote = sum(hit.chunks for hit in summary.hits if hit.tier == "remote")

    await evict()
    services.services[killed].kill9()
    found, summary = await ask(worker, CHUNKS, recipe="prophetkv", ratio=1.0)
    assert found == right
    assert not summary.degraded, summary.degraded_reason
    lost, left = (remote, "memory") if killed else (len(CHUNKS) - remote, "remote")
    assert summary.chunks_missed == lost, "what it held is encoded anew"
    assert {hit.tier for hit in summary.hits if hit.chunks} <= {left, "device"}

    async def held_by_the_other() -> bool:
        there = (await services.clients[1 - killed].stats()).tiers[-1].entries
        return there == len(CHUNKS) + 1

    await until(held_by_the_other)
    await worker.close()
