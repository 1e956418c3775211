"""Whether the running task is to end, and work that goes on to its end all the same."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def requests() -> int:
    """How many requests that the running task end are open; 0 outside of tasks."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return 0
    return task.cancelling() if task is not None else 0


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Waits for work also when the caller is cancelled, however often, which it is then when the work is over."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # the caller has ended, so it concerns nobody
        raise
