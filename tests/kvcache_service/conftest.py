"""A cache service for a test, in its own process."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.kvcache_service.tools import Service, serving


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Service]]]:
    """`await start(memory=, disk=, ...)` serves a store; its integrity is checked when the test ends."""
    async with AsyncExitStack() as stack:
        yield lambda **more: stack.enter_async_context(serving(tmp_path / "data", **more))


@pytest.fixture
async def service(start: Callable[..., Awaitable[Service]]) -> Service:
    return await start()
