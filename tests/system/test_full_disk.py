"""A cache service on a file system that is full: it starts, finds what it has, and takes more once there is room."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos import errors
from tests.conftest import Service
from tests.system.cache_process import MIB, flags, get, payload, put

pytestmark = pytest.mark.system


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    """A file system of 4 MiB, seen by whom `before` runs; `where(process)` is its path from outside."""
    alone = ("unshare", "--map-root-user", "--mount")
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mounts: needs root, or user namespaces, and unshare (apt-get install util-linux)")
    # One process holds it open, so that it stays for the next ones.
    keeper = subprocess.Popen(
        [*alone, "sh", "-c", f"mount -t tmpfs -o size=4m none {tmp_path} && echo mounted && exec sleep 600"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    if "mounted" not in keeper.stdout.readline():
        pytest.skip("a tmpfs can't be mounted here")
    yield keeper.pid, ("nsenter", f"--target={keeper.pid}", "--user", "--mount"), tmp_path
    keeper.kill()
    keeper.wait()


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


async def test_it_starts_on_a_full_disk(launch: Any, disk: Any) -> None:
    keeper, before, folder = disk
    ballast = Path(f"/proc/{keeper}/root{folder}/ballast")

    def start() -> Service:
        service: Service = launch(*flags(folder / "data", disk="3MiB"), before=before)
        return service

    first = start()
    client = CacheClient(first.address)
    assert await put(client, "before", payload("before", MIB))
    fill(ballast)
    await client.close()
    for killed in (True, False):
        first.kill9() if killed else first.stop()
        first = start()
        client = CacheClient(first.address)
        assert await get(client, "before") == payload("before", MIB)
        with pytest.raises(errors.ResourceExhausted, match="No space left on device"):
            await put(client, "meanwhile", payload("meanwhile", MIB))
        await client.close()
    client = CacheClient(first.address)
    os.unlink(ballast)
    assert await put(client, "after", payload("after", MIB))
    await client.close()
    assert first.stop() == 0
