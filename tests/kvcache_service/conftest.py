"""A cache service for a test, in its own process."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import lmdb
import pytest

from fusionkv.kvcache_service.tiers import disk_index, index_file
from tests.kvcache_service.tools import Service, serving


@pytest.fixture(autouse=True)
def index_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves the process that checks an index at each start. What it has to say of one that is damaged, it says."""
    in_a_process = disk_index._rewrite

    def rewrite(directory: Path, new: Path) -> str:
        with suppress(lmdb.Error, index_file.LaterVersion, OSError):
            index_file.rewrite(str(directory), str(new))
            return ""
        shutil.rmtree(new, ignore_errors=True)
        return in_a_process(directory, new)

    monkeypatch.setattr(disk_index, "_rewrite", rewrite)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Service]]]:
    """`await start(memory=, disk=, ...)` serves a store; its integrity is checked when the test ends."""
    async with AsyncExitStack() as stack:
        yield lambda **more: stack.enter_async_context(serving(tmp_path / "data", **more))


@pytest.fixture
async def service(start: Callable[..., Awaitable[Service]]) -> Service:
    return await start()
