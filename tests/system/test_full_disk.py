"""Services on a file system that is full or read-only: they find what they have, and take more afterwards."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.protos.runtime import errors
from tests.conftest import Service
from tests.ports import free_port
from tests.small_disk import SmallDisk, mounted
from tests.system.cache_process import MIB, MODULE, check_refused, check_stopped, find, flags, get, payload, put
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.slow]
GATEWAY = ("fusionkv.gateway", "--listen", "127.0.0.1:0", "--data-dir")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path, "4m") as made:
        yield made


@pytest.fixture
def start(launch: Any, disk: SmallDisk) -> Any:
    """`start(size)`: a cache service on the small disk; again, one after the other, over the same files."""
    return lambda size: launch(*flags(disk.inside / "data", disk=size), before=disk.before)


async def test_it_starts_on_a_full_disk(start: Any, cache_client: Any, disk: SmallDisk) -> None:
    service = start("3MiB")
    assert await put(cache_client(service), "before", payload("before", MIB))
    disk.fill()
    for killed in (True, False):
        service.kill9() if killed else service.stop()
        service = start("3MiB")
        client = cache_client(service)
        assert await get(client, "before") == payload("before", MIB)
        with pytest.raises(errors.ResourceExhausted, match="No space left on device"):
            await put(client, "meanwhile", payload("meanwhile", MIB))
    disk.empty()
    assert await put(client, "after", payload("after", MIB))
    assert service.stop() == 0


async def test_it_evicts_and_deletes_on_a_full_disk(start: Any, cache_client: Any, disk: SmallDisk) -> None:
    """What could not be recorded is an error, or comes back with the next start; nothing is torn."""
    service = start("1MiB")
    client = cache_client(service)
    old, new = [[f"{age} {n}" for n in range(12)] for age in ("old", "new")]
    data = {name: payload(name, MIB // 16) for name in (*old, *new)}
    for name in old:
        assert await put(client, name, data[name])
    disk.fill()
    stored = []
    for name in new:  # from the fifth on, something has to go
        with contextlib.suppress(errors.ResourceExhausted):
            stored += [name] * await put(client, name, data[name])
    gone = (await find(client, old[-1])).entry
    with contextlib.suppress(errors.ResourceExhausted):
        await client.delete([gone.key])
    assert await get(client, old[-1]) is None
    for name in data:
        assert await get(client, name) in (None, data[name])
    disk.empty()
    for name in new:
        if name not in stored:
            assert await put(client, name, data[name])
    service.kill9()
    service = start("1MiB")
    client = cache_client(service)
    for name in data:
        assert await get(client, name) in (None, data[name])
    assert all([await get(client, name) for name in new[-4:]])
    assert service.stop() == 0
    assert "damaged" not in service.log


@pytest.mark.parametrize("output", [">/dev/full 2>&1", "<&- >&-", "<&- >&- 2>&-"])
async def test_a_log_that_is_full_or_closed_ends_nothing(cache_client: Any, tmp_path: Path, output: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    own = ("--listen", address, "--data-dir", str(tmp_path / "data"), "--disk-bytes", "16MiB")
    service = Service(MODULE, *own, before=("sh", "-c", f'exec "$@" {output}', "-"))
    try:
        client = cache_client(address)

        async def serves() -> bool:
            assert service.process.poll() is None, service.log
            with contextlib.suppress(errors.Unavailable):
                return await get(client, "none") is None
            return False

        await until(serves)
        assert await put(client, "a", payload("a", 4096))
        # 120 is Python's own, for what it could not write at its end.
        assert service.stop() in (0, 120)
    finally:
        service.kill9()
    assert await check_stopped(tmp_path / "data", 16 * MIB) == 1


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
