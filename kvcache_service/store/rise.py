"""What a client read from the service's files itself: the service hears of it a moment later, and may take it up."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fusionkv.protos.runtime.errors import ServiceError

# A reader waits for its bytes first; whatever else is read meanwhile goes into the same call.
_AFTER_SECONDS = 0.02
# Of a call: far below what a service takes at once (max_path, 256 unless set otherwise).
_MOST_AT_ONCE = 8
# That wait: what was read longest ago is forgotten first.
_MOST_WAITING = 256


class Rise:
    """Gathers keys and sends them. Belongs to the running event loop."""

    def __init__(self, send: Callable[[Sequence[bytes]], Awaitable[Any]]) -> None:
        """send: asks the service to take up what is hot of these; a ServiceError is nobody's concern."""
        self._send = send
        self._keys: dict[bytes, None] = {}
        self._sending: asyncio.Task[None] | None = None
        self._closed = False

    def soon(self, key: bytes) -> None:
        """Does not wait."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > _MOST_WAITING:
            del self._keys[next(iter(self._keys))]
        if not self._closed and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._run())

    def close(self) -> None:
        """Forgets what was not sent, and what comes from a reader that ends now."""
        self._closed = True
        if self._sending is not None:
            self._sending.cancel()

    async def _run(self) -> None:
        while self._keys:
            await asyncio.sleep(_AFTER_SECONDS)
            keys = list(self._keys)[:_MOST_AT_ONCE]
            for key in keys:
                del self._keys[key]
            with contextlib.suppress(ServiceError):
                await self._send(keys)
