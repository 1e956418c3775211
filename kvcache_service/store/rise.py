"""Batches keys of entries that a client read from segment files, for the service to promote them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fusionkv.protos.runtime.errors import ServiceError

# Delay of a call, in which further keys are collected. Reads have priority.
_AFTER_SECONDS = 0.02
# Keys per call, far below the service's limit (max_path, by default 256).
_MAX_KEYS = 8
# Limit of waiting keys; the oldest are dropped.
_MAX_WAITING = 256


class Rise:
    """Collects keys and sends them in the background, on the running event loop."""

    def __init__(self, send: Callable[[Sequence[bytes]], Awaitable[Any]]) -> None:
        """send: requests promotion of entries by key; a ServiceError is ignored."""
        self._send = send
        self._keys: dict[bytes, None] = {}
        self._sending: asyncio.Task[None] | None = None
        self._closed = False

    def soon(self, key: bytes) -> None:
        """Queues a key; does not block."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > _MAX_WAITING:
            del self._keys[next(iter(self._keys))]
        if not self._closed and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._run())

    def close(self) -> None:
        """Drops queued keys, and ignores later ones."""
        self._closed = True
        if self._sending is not None:
            self._sending.cancel()

    async def _run(self) -> None:
        while self._keys:
            await asyncio.sleep(_AFTER_SECONDS)
            keys = list(self._keys)[:_MAX_KEYS]
            for key in keys:
                del self._keys[key]
            with contextlib.suppress(ServiceError):
                await self._send(keys)
