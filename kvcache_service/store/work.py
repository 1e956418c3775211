"""Work of a store beside its event loop's calls: I/O in threads, and what outlives its caller."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fusionkv.protos.runtime.cancellation import detached
from fusionkv.protos.runtime.errors import ServiceError

T = TypeVar("T")

_IO_THREADS = 8


class Work:
    """Must be used on one event loop."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(_IO_THREADS, "kvcache-io")
        self.tasks: set[asyncio.Task[Any]] = set()

    def in_thread(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.threads, function, *args)

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Completes `work` in the background even if the caller is cancelled, who no longer waits."""
        return await detached(self.tasks, work, OSError, ServiceError)
