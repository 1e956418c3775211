"""Waiting for what happens in the background: until it is so, with a limit that only a hang reaches."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

# Ten times what the slowest of it takes on two busy cores.
LIMIT_SECONDS = 60.0


async def until(met: Callable[[], Any], seconds: float = LIMIT_SECONDS) -> None:
    """Waits until `met()`, or what it gives to be awaited, is true; the event loop runs meanwhile."""
    async with asyncio.timeout(seconds):
        while True:
            found = met()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.005)


def wait_until(met: Callable[[], Any], seconds: float = LIMIT_SECONDS) -> None:
    """As `until`, for a test without an event loop."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, f"not so within {seconds:g} s"
        time.sleep(0.02)
