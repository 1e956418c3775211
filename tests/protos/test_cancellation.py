"""A task that is asked to end ends, whatever it waits for and however soon the answer comes."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from fusionkv.protos.runtime import cancellation


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("so")


async def outcome(steps: int, call: Callable[[], Awaitable[None]]) -> tuple[bool, int]:
    """Whether a task that is asked to end after so many rounds of the loop was cancelled; and how far it came."""
    seen = []

    async def work() -> None:
        with contextlib.suppress(ValueError), cancellation.heeded():
            await asyncio.wait_for(call(), 60)
        seen.append(cancellation.requests())

    task = asyncio.create_task(work())
    for _ in range(steps):
        await asyncio.sleep(0)
    asked = task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == (asked and not seen)
    return task.cancelled(), len(seen)


@pytest.mark.parametrize("call", [lambda: asyncio.sleep(0), fail], ids=["result", "error"])
async def test_a_request_is_heeded_at_every_moment(call: Callable[[], Awaitable[None]]) -> None:
    """`wait_for` itself overlooks the one between its result and its end, before Python 3.12."""
    found = [await outcome(steps, call) for steps in range(8)]
    assert (True, 0) in found
    assert found[-1] == (False, 1)
    # Never one that both went on and was asked to end.
    assert set(found) == {(True, 0), (False, 1)}


async def test_what_was_asked_before_does_not_end_what_cleans_up() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            with cancellation.heeded():
                await asyncio.sleep(0)
            cleaned.append(cancellation.requests())

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [1]


def test_outside_of_tasks_nobody_asks() -> None:
    assert cancellation.requests() == 0
    with cancellation.heeded():
        pass


async def test_an_error_inside_passes_through() -> None:
    with pytest.raises(ValueError, match="so"), cancellation.heeded():
        raise ValueError("so")
