"""Data directories that can't be written, at the start and from then on."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.protos.runtime import errors
from tests.conftest import Service
from tests.gateway.test_retrieval import put as ingest
from tests.small_disk import SmallDisk, mounted
from tests.system.cache_process import MIB, check_refused, flags, get, payload, put

pytestmark = [pytest.mark.system, pytest.mark.slow]
GATEWAY = ("fusionkv.gateway", "--listen", "127.0.0.1:0", "--data-dir")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path, "8m") as made:
        yield made


@pytest.mark.long
async def test_no_service_starts_on_a_read_only_disk(disk: SmallDisk) -> None:
    """Neither with an empty directory, nor with one that was used."""
    used = {"cache": disk.inside / "cache", "gateway": disk.inside / "gateway"}
    engine = await EmbeddedRetrieval.open(disk.outside / "gateway")
    await ingest(engine, "c", "a", "one")
    await engine.close()
    first = Service(*flags(used["cache"], disk="2MiB"), before=disk.before).wait_until_serving()
    assert first.stop() == 0
    disk.read_only()
    for cache, gateway in (used.values(), [disk.inside / "new"] * 2):
        check_refused(Service(*flags(cache, disk="2MiB"), before=disk.before), "Read-only file system")
        check_refused(Service(*GATEWAY, str(gateway), before=disk.before), "Read-only file system")


@pytest.mark.parametrize("used", [False, True])
def test_no_service_starts_without_permission(tmp_path: Path, used: bool) -> None:
    # Without its capabilities, root is bound by permissions as others are.
    drop = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    if os.geteuid() == 0 and (
        not shutil.which(drop[0]) or subprocess.run([*drop, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("root may write anywhere: needs setpriv (apt-get install util-linux)")
    before = drop if os.geteuid() == 0 else ()
    for own in (flags(tmp_path / "cache", disk="2MiB"), [*GATEWAY, str(tmp_path / "gateway")]):
        data = Path(own[own.index("--data-dir") + 1])
        data.mkdir()
        if used:
            assert Service(*own).wait_until_serving().stop() == 0
            for path in data.rglob("*"):
                path.chmod(0o500 if path.is_dir() else 0o400)
        data.chmod(0o500)
        check_refused(Service(*own, before=before), "ermission denied")
        for path in (data, *data.rglob("*")):
            path.chmod(0o700)


async def test_a_cache_with_read_only_segments_keeps_entries(launch: Any, cache_client: Any, disk: SmallDisk) -> None:
    for name in "ab":
        service = launch(*flags(disk.inside / "data", disk="3MiB"), before=disk.before)
        client = cache_client(service)
        if name == "a":
            assert await put(client, "a", payload("a", MIB))
            assert service.stop() == 0
    disk.read_only("data/segments")
    with pytest.raises(errors.Unavailable, match="Read-only file system"):
        await get(client, "a")
    with pytest.raises(errors.ResourceExhausted, match="Read-only file system"):
        await put(client, "b", payload("b", MIB))
    disk.writable("data/segments")
    assert await get(client, "a") == payload("a", MIB)
    assert await put(client, "b", payload("b", MIB))
    assert service.stop() == 0
