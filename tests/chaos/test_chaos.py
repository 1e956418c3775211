"""A few faults of a fixed seed over real processes, and whether what watches over them would see what is wrong."""

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient
from tests.chaos.entries import Entries
from tests.chaos.process import Wrong
from tests.system.cache_process import NAMESPACE, flags, payload, put
from tests.system.redis_process import server

pytestmark = pytest.mark.system
# Of every kind one; one more is drawn.
FIRST = (
    "redis fails over",
    "cache of another version",
    "cache on a lossy link",
    "partition",
    "cache stands still",
    "clock jumps",
    "bits flip in segments",
    "gateway stands still",
    "key of the disks renewed",
)


@pytest.mark.timeout(900)
def test_a_few_faults(root: Path, tmp_path: Path) -> None:
    """The rest is `make chaos`."""
    server()
    report = tmp_path / "chaos.json"
    # Two episodes that hang are told of before the test ends.
    wanted = ("--faults", "10", "--seed", "30", "--first", ",".join(FIRST), "--secured", "--episode-seconds", "300")
    argv = [sys.executable, "-P", root / "tests/chaos/run.py", *wanted, "--json", report]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=880, check=False)
    assert report.exists(), done.stdout
    made = json.loads(report.read_text())
    assert made["failures"] == [], done.stdout
    assert done.returncode == 0, done.stdout
    assert made["faults"] >= 10
    for name in FIRST:
        assert made["struck"].get(name, 0) or name in made["not possible here"]
    assert made["seen"]["answers"] >= 4, "two at the end of each round, whatever the traffic met"
    assert made["seen"]["entries checked"] > 0


@pytest.fixture
async def entries(launch: Any, tmp_path: Path) -> AsyncIterator[Entries]:
    """It has stored ten entries in one cache service."""
    client = CacheClient(launch(*flags(tmp_path / "data")).address)
    made = Entries(SimpleNamespace(cache_clients=[client]), random.Random(1), Counter())  # type: ignore[arg-type]
    for _ in range(10):
        await made.put_one()
    yield made
    await client.close()


async def test_what_is_whole_is_right(entries: Entries) -> None:
    await entries.everything_is_there(set())
    assert entries.seen["entries checked"] == 10


async def test_a_lost_entry_is_seen(entries: Entries) -> None:
    await entries.world.cache_clients[0].delete(namespace=NAMESPACE)
    with pytest.raises(Wrong, match="entry 0 was acknowledged, and no service has it"):
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
