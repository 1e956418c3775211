"""Two faults of a fixed seed over real processes, and whether what watches over them would see what is wrong."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.entries import Entries
from tests.chaos.process import Wrong
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
