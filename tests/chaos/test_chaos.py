"""Two faults of a fixed seed over real processes, and whether what watches over them would see what is wrong."""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from fusionkv.protos.runtime.errors import Unavailable
from tests.chaos import disk_faults
from tests.chaos.answers import RECIPES
from tests.chaos.entries import Entries
from tests.chaos.faults import FAULTS
from tests.chaos.oracle import Oracle
from tests.chaos.process import Wrong
from tests.chaos.run import Run
from tests.system.cache_process import NAMESPACE, flags, payload, put
from tests.system.redis_process import server

pytestmark = pytest.mark.system
# One that ends and one that stops a process; continuous integration strikes one of every kind (.ci/run).
FIRST = ("redis fails over", "gateway stands still")


@pytest.mark.slow
def test_a_few_faults(root: Path, tmp_path: Path) -> None:
    """What watches over faults starts all services, strikes, checks and reports. The rest is `make chaos`."""
    server()
    report = tmp_path / "chaos.json"
    # An episode that hangs is told of before the test ends.
    wanted = ("--faults", "2", "--seed", "30", "--first", ",".join(FIRST), "--secured", "--episode-seconds", "200")
    argv = [sys.executable, "-P", root / "tests/chaos/run.py", *wanted, "--json", report]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=580, check=False)
    assert report.exists(), done.stdout
    made = json.loads(report.read_text())
    assert made["failures"] == [], done.stdout
    assert done.returncode == 0, done.stdout
    assert made["faults"] >= 2
    for name in FIRST:
        assert made["struck"].get(name, 0) or name in made["not possible here"]
    assert made["seen"]["answers"] >= 4, "two at the end of each round, whatever the traffic met"
    assert made["seen"]["entries checked"] > 0


@pytest.fixture
async def entries(launch: Any, cache_client: Any, tmp_path: Path) -> Entries:
    """It has stored ten entries in one cache service."""
    client = cache_client(launch(*flags(tmp_path / "data")))
    made = Entries(SimpleNamespace(cache_clients=[client]), random.Random(1), Counter())  # type: ignore[arg-type]
    for _ in range(10):
        await made.put_one()
    return made


async def test_what_is_whole_is_right(entries: Entries) -> None:
    await entries.everything_is_there(set())
    assert entries.seen["entries checked"] == 10


async def test_a_lost_entry_is_seen(entries: Entries) -> None:
    await entries.world.cache_clients[0].delete(namespace=NAMESPACE)
    with pytest.raises(Wrong, match="entry 0 was acknowledged by cache0; cache0 has it not"):
        await entries.everything_is_there(set())
    await entries.everything_is_there(set(range(10)))
    assert not entries.stored, "what may be gone is no longer asked for"


async def test_other_bytes_are_seen(entries: Entries) -> None:
    client = entries.world.cache_clients[0]
    await client.delete(namespace=NAMESPACE)
    for name in range(10):
        await put(client, name, payload("another", entries.stored[name]))
    with pytest.raises(Wrong, match="other bytes than were put"):
        await entries.everything_is_there(set(), share=0.5)


class Recovering(Exception):
    """All faults of an episode are over."""


@pytest.mark.parametrize("first", ["gateway killed", "worker killed"])
async def test_a_question_may_fail_until_all_are_back(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """A full disk asks something as it ends, while what struck before it is still down."""
    monkeypatch.setattr(disk_faults, "_disk", Mock())
    ended = await asyncio.gather(*(_episode(seed, first, "disk full") for seed in range(12)))
    assert any(starts for starts in ended), "a cache service was started, and something asked, on a full disk"


async def test_a_question_may_not_fail_by_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_faults, "_disk", Mock())
    with pytest.raises(Wrong, match="the cache alone has a fault"):
        await _episode(1, "disk full")


async def _episode(seed: int, *names: str) -> int:
    """Strikes while no question is answered. Returns how often the cache service was started."""
    silent = Mock()
    silent.ask = silent.ingest = silent.model = AsyncMock(side_effect=Unavailable("down"))
    cache, other = Mock(start=AsyncMock()), Mock(start=AsyncMock())
    world: Any = Mock(caches=[cache], gateway=other, workers=[other], client=silent, worker_clients=[silent])
    oracle = Oracle(world, random.Random(seed))
    oracle.entries = Mock(put_one=AsyncMock(), get_one=AsyncMock())
    oracle.answers.questions, oracle.answers.pages = [("Who?", [*RECIPES])], {"a": "A page."}
    oracle.empty_pools = AsyncMock()  # type: ignore[method-assign]
    oracle.recovered = AsyncMock(side_effect=Recovering)  # type: ignore[method-assign]
    run = Run(argparse.Namespace(seed=seed, faults=1, json=Path("none")), [], Mock(), None)
    chosen = [(fault, 0) for name in names for fault in FAULTS if fault.name == name]
    with pytest.raises(Recovering):
        await run._episode(world, oracle, chosen, False)
    return cache.start.await_count
