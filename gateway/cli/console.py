"""What commands show while they work: a progress bar for people, or JSON; and their patience with a busy gateway, or
with one that is not there yet."""

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
# Seconds between two tries of what is not there yet.
_PAUSE = 2.0


def progress_bar(quiet: bool) -> Progress:
    """On standard error, if somebody looks at it and `quiet` is not set."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


async def patiently(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """The result of a call that is repeated for as long as the gateway says when to try again."""
    end = time.monotonic() + seconds
    while True:
        try:
            return await call()
        except ResourceExhausted as error:
            if error.retry_after is None or time.monotonic() + error.retry_after > end:
                raise
            # Spread out, or all that were refused together would come back together.
            pause = error.retry_after * random.uniform(1.0, 2.0)
        await asyncio.sleep(pause)


async def awaited(call: Callable[[], Awaitable[T]], end: float) -> T:
    """The result of a call that is repeated, until time.monotonic() is `end`, while whoever answers it, or what it is
    about, is not there yet.

    Raises:
        ServiceError: UNAVAILABLE or NOT_FOUND after that, any other at once.
    """
    told = ""
    while True:
        try:
            return await call()
        except (Unavailable, NotFound) as error:
            left = end - time.monotonic()
            if left <= 0:
                raise
            if str(error) != told:
                told = str(error)
                print(f"fusionkv: waits for up to {left:.0f} s more: {told}", file=sys.stderr, flush=True)
        await asyncio.sleep(min(_PAUSE, left))
