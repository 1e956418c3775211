"""Two workers, each beside a cache service of its own, over one remote tier."""

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
CHUNKS = [ids(10 + n % 6, 10 + n) for n in range(20)]


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
async def services(launch: Any, tmp_path: Path) -> AsyncIterator[tuple[Services, RedisServer]]:
    server = RedisServer(tmp_path)
    made = Services(launch, tmp_path, server)
    made.start()
    made.start()
    yield made, server
    await made.close()
    server.kill9()


def start_worker(launch: Any, model: Path, cache: str, *more: str) -> Any:
    shape = json.loads((model / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    pool = POOL_TOKENS * shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * head * 4
    return launch(
        "fusionkv.fusion_worker", "--model", str(model), "--listen", "127.0.0.1:0", "--device", "cpu",
        "--dtype", "float32", "--threads", "1", "--pool-bytes", str(pool), "--cache", cache, *more,
    )  # fmt: skip


@pytest.mark.parametrize("signed", [False, True], ids=["plain", "signed"])
async def test_workers_at_two_nodes(
    launch: Any, services: tuple[Services, RedisServer], reference_model: Path, tmp_path: Path, signed: bool
) -> None:
    """What one encoded the other finds; with its own cache service or without the remote tier each answers right."""
    cluster, server = services
    (tmp_path / "signing.keys").write_text("11" * 32)
    keys = ("--signing-keys", str(tmp_path / "signing.keys")) if signed else ()
    await cluster.emptied()
    workers = [
        WorkerClient(start_worker(launch, reference_model, service.address, *keys).address)
        for service in cluster.services
    ]
    right, _ = await ask(workers[0], CHUNKS, recipe="full_attention")
    found, summary = await ask(workers[0], CHUNKS, recipe="prophetkv", ratio=1.0)
    assert found == right
    assert summary.chunks_missed == len(CHUNKS)

    async def stored() -> bool:
        return (await cluster.entries())[0] == len(CHUNKS) + 1

    await until(stored)
    await cluster.settled()
    found, summary = await ask(workers[1], CHUNKS, recipe="prophetkv", ratio=1.0)
    assert found == right
    assert (summary.degraded, summary.chunks_missed) == (False, 0)
    assert {hit.tier for hit in summary.hits if hit.chunks} == {"remote"}

    # Their own node's copies, without the remote tier; then nothing at all.
    server.kill9()
    await ask(workers[1], [ids(740, 3)], recipe="full_attention")  # empties its pool
    found, summary = await ask(workers[1], CHUNKS, recipe="prophetkv", ratio=1.0)
    assert found == right
    assert (summary.degraded, summary.chunks_missed) == (False, 0)
    cluster.services[1].kill9()
    await ask(workers[1], [ids(740, 3)], recipe="full_attention")
    found, summary = await ask(workers[1], CHUNKS, recipe="prophetkv", ratio=1.0)
    assert found == right
    assert summary.degraded
    for worker in workers:
        await worker.close()
