"""asyncio tasks and their cancellation: pending requests, and work that must complete despite them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar, cast

T = TypeVar("T")


def requests() -> int:
    """Number of pending cancellation requests of the running task; 0 outside of tasks."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return 0
    return task.cancelling() if task is not None else 0


def background(tasks: set[asyncio.Task[T]], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts a task and keeps it in `tasks` until it ends: the event loop holds it only weakly."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines together; returns their results. The first error cancels the rest and is raised at once."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def detached(tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, T], *expected: type[Exception]) -> T:
    """Completes `work`, as a task in `tasks`, even if the caller is cancelled, who does not wait for it then.

    Raises its errors; if the caller has left, `expected` ones are not logged as unhandled.
    """

    async def result() -> T | Exception:
        try:
            return await work
        except expected as error:
            return error

    done = await asyncio.shield(background(tasks, result()))
    if isinstance(done, expected):
        raise done
    return cast(T, done)


async def to_the_end(work: Awaitable[T]) -> T:
    """Completes `work` even if the caller is cancelled, and raises the cancellation afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # mark as retrieved: the caller has ended
        raise
