"""Requests that the running task end, calls that overlook them, and work that goes on to its end."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def requests() -> int:
    """How many requests that the running task end are open; 0 outside of tasks."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return 0
    return task.cancelling() if task is not None else 0


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """Makes a request that arrives inside end the task, even if what is awaited inside overlooks it.

    redis-py sends its commands through `asyncio.wait_for`, which before Python 3.12 returns or raises what it has
    instead of passing the request on: https://github.com/python/cpython/issues/86296.

    Raises:
        CancelledError: at the end, if it was overlooked, in the place of any other error.
    """
    before = requests()
    try:
        yield
    except Exception as error:
        if requests() > before:
            raise asyncio.CancelledError from error
        raise
    if requests() > before:
        raise asyncio.CancelledError


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
