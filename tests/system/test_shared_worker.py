"""Two workers, each beside a cache service of its own, over one remote tier."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.fusion_worker.client import WorkerClient
from tests.services import pool_bytes, start_worker
from tests.system.redis_process import RedisServer
from tests.system.shared_services import Services
from tests.system.test_worker_faults import ask, ids
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.slow]
POOL_TOKENS = 768
CHUNKS = [ids(10 + n % 6, 10 + n) for n in range(20)]


@pytest.fixture
async def services(launch: Any, tmp_path: Path) -> AsyncIterator[tuple[Services, RedisServer]]:
    server = RedisServer(tmp_path)
    made = Services(launch, tmp_path, server)
    made.start()
    made.start()
    yield made, server
    await made.close()
    server.kill9()


@pytest.mark.parametrize("signed", [False, True], ids=["plain", "signed"])
async def test_workers_at_two_nodes(
    launch: Any, services: tuple[Services, RedisServer], reference_model: Path, tmp_path: Path, signed: bool
) -> None:
    """What one encoded the other finds; with its own cache service or without the remote tier each answers right."""
    cluster, server = services
    (tmp_path / "signing.keys").write_text("11" * 32)
    keys = ("--signing-keys", str(tmp_path / "signing.keys")) if signed else ()
    await cluster.emptied()
    flags = ("--device", "cpu", "--dtype", "float32", "--pool-bytes", pool_bytes(reference_model, POOL_TOKENS), *keys)
    workers = [
        WorkerClient(start_worker(launch, reference_model, *flags, cache=service).address)
        for service in cluster.services
    ]
    right, _ = await ask(workers[0], CHUNKS, recipe="full_attention")
    found, summary = await ask(workers[0], CHUNKS)
    assert found == right
    assert summary.chunks_missed == len(CHUNKS)

    async def stored() -> bool:
        return (await cluster.entries())[0] == len(CHUNKS) + 1

    await until(stored)
    await cluster.settled()
    found, summary = await ask(workers[1], CHUNKS)
    assert found == right
    assert (summary.degraded, summary.chunks_missed) == (False, 0)
    assert {hit.tier for hit in summary.hits if hit.chunks} == {"remote"}

    # Their own node's copies, without the remote tier; then nothing at all.
    server.kill9()
    await ask(workers[1], [ids(740, 3)], recipe="full_attention")  # empties its pool
    found, summary = await ask(workers[1], CHUNKS)
    assert found == right
    assert (summary.degraded, summary.chunks_missed) == (False, 0)
    cluster.services[1].kill9()
    await ask(workers[1], [ids(740, 3)], recipe="full_attention")
    found, summary = await ask(workers[1], CHUNKS)
    assert found == right
    assert summary.degraded
    for worker in workers:
        await worker.close()
