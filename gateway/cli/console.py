"""Console output of commands (progress or JSON), and retries while a gateway is busy or not yet available."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fusionkv.gateway.cli import shown
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.errors import NotFound, ResourceExhausted, Unavailable

T = TypeVar("T")
# Seconds between two attempts to reach a service that is not yet available.
_PAUSE = 2.0
# Seconds between two lines of progress where there is no terminal.
_LINE_SECONDS = 5.0


Steps = Callable[[str, int, int | None], object]
"""Shows the progress of something long: what is being done, how much of it is done, and of what total, if known."""


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Steps]:
    """Progress on standard error: a bar in a terminal, otherwise a line every few seconds; nothing if `quiet`."""
    console = Console(stderr=True)
    if quiet:
        yield lambda what, done, total: None
    elif not console.is_terminal or console.is_dumb_terminal:
        yield _lines()
    else:
        text = TextColumn("{task.description}", markup=False)
        times = TimeElapsedColumn(), TimeRemainingColumn()
        with Progress(text, BarColumn(), MofNCompleteColumn(), *times, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda what, done, total: bar.update(
                task, description=shown.line(what), completed=done, total=total
            )


def _lines() -> Steps:
    shown_at = time.monotonic()

    def show(what: str, done: int, total: int | None) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= _LINE_SECONDS:
            shown_at = time.monotonic()
            shown.tell(f"{what}: {done}" if total is None else f"{what}: {done} of {total}")

    return show


def print_json(value: object) -> None:
    print(shown.as_json(value), flush=True)


async def retry_while_busy(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Repeats a call refused with a retry delay for up to `seconds`, and returns its result."""
    deadline = Deadline.after(seconds)
    while True:
        try:
            return await call()
        except ResourceExhausted as error:
            if error.retry_after is None or error.retry_after > deadline.remaining():
                raise
            # Random, so that calls refused together are not retried together.
            pause = error.retry_after * random.uniform(1.0, 2.0)
        await asyncio.sleep(pause)


async def retry_until_available(call: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
    """Repeats a call that fails as UNAVAILABLE or NOT_FOUND until a deadline; returns its result.

    Raises these errors after the deadline, and any other at once.
    """
    reported = ""
    while True:
        try:
            return await call()
        except (Unavailable, NotFound) as error:
            if deadline.passed:
                raise
            if str(error) != reported:
                reported = str(error)
                shown.tell(f"waiting for up to {deadline.remaining():.0f} s more: {reported}")
        await asyncio.sleep(min(_PAUSE, deadline.remaining()))
