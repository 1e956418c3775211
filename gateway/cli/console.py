"""Console output of commands (progress bar or JSON), and retries while a gateway is busy or not yet available."""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fusionkv.protos.runtime.errors import NotFound, ResourceExhausted, Unavailable

T = TypeVar("T")
# Seconds between two attempts to reach a service that is not yet available.
_PAUSE = 2.0


def progress_bar(quiet: bool) -> Progress:
    """A progress bar on standard error; disabled if `quiet` is set or standard error is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


async def retry_while_busy(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Repeats a call refused with a retry delay for up to `seconds`, and returns its result."""
    end = time.monotonic() + seconds
    while True:
        try:
            return await call()
        except ResourceExhausted as error:
            if error.retry_after is None or time.monotonic() + error.retry_after > end:
                raise
            # Random, so that calls refused together are not retried together.
            pause = error.retry_after * random.uniform(1.0, 2.0)
        await asyncio.sleep(pause)


async def retry_until_available(call: Callable[[], Awaitable[T]], end: float) -> T:
    """Repeats a call that fails as UNAVAILABLE or NOT_FOUND until time.monotonic() is `end`; returns its result.

    Raises:
        ServiceError: UNAVAILABLE or NOT_FOUND after `end`, any other error at once.
    """
    reported = ""
    while True:
        try:
            return await call()
        except (Unavailable, NotFound) as error:
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise
            if str(error) != reported:
                reported = str(error)
                print(f"fusionkv: waiting for up to {remaining:.0f} s more: {reported}", file=sys.stderr, flush=True)
        await asyncio.sleep(min(_PAUSE, remaining))
