"""What a gRPC call passes before its message is read, and limits on messages that nobody finishes or reads.

gRPC makes room for a message as soon as it is asked for: a message of which one byte is missing takes as much memory
as a whole one. So a call asks only while it has a place, and there are few.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc

from fusionkv.protos.observe import rejected
from fusionkv.protos.runtime.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted

# Receives the name of a method and the context of a call of it; open while the call runs, with what its method
# receives. Raises ServiceError to refuse the call.
Admit: TypeAlias = "Callable[[str, grpc.aio.ServicerContext], contextlib.AbstractAsyncContextManager[Any]]"
# Messages that arrive at the same time: of probes, whose callers are unknown, and of all other calls together.
PLACES, PROBE_PLACES = 16, 2
# Seconds in which a message must have arrived; the second limit holds while other calls wait for a place.
_SECONDS, _BUSY_SECONDS = 30.0, 2.0
# Seconds for which a client may leave a stream unread. A call that waits for its client holds places of all clients.
_STALL_SECONDS = 30.0
# A waiting call holds what its client may send unasked: 64 KiB.
_MAX_WAITING = 1024


class Arrivals:
    """Places for messages that arrive. Most are there when they are asked for, and hold one for less than 1 ms.

    The call that came last gets the next place: callers that never send all of their message delay each other, and
    others only while such callers come faster than their time is over.
    """

    def __init__(self, places: int = PLACES, seconds: float | None = None) -> None:
        """`seconds`: in which a message must have arrived; 30 by default."""
        self.free = places
        self._seconds = seconds
        self._held: dict[asyncio.Timeout, float] = {}  # with the time since when
        self._waiting: list[asyncio.Future[None]] = []

    async def message(self, context: grpc.aio.ServicerContext) -> Any:
        """The first message of a call, or EOF.

        Raises:
            InvalidArgument: it can't be parsed.
            DeadlineExceeded: it did not arrive in time.
            ResourceExhausted: too many calls wait for a place.
        """
        try:
            async with self.place():
                return readable(await context.read())
        except DeadlineExceeded:
            rejected.note("grpc_message_timeout")
            raise

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Held while a message arrives. Raises DeadlineExceeded and ResourceExhausted as `message` does."""
        if self.free:
            self.free -= 1
        else:
            await self._wait()
        seconds = _SECONDS if self._seconds is None else self._seconds
        limit = asyncio.timeout(min(seconds, _BUSY_SECONDS) if self._waiting else seconds)
        self._held[limit] = asyncio.get_running_loop().time()
        try:
            async with limit:
                yield
        except TimeoutError:
            raise DeadlineExceeded("the message did not arrive in time") from None
        finally:
            del self._held[limit]
            self._leave()

    async def _wait(self) -> None:
        """Waits until another call leaves its place to this one."""
        if len(self._waiting) >= _MAX_WAITING:
            raise ResourceExhausted("too many messages are arriving: try again later", retry_after=0.5)
        for limit, since in self._held.items():
            if not limit.expired():
                limit.reschedule(min(since + _BUSY_SECONDS, limit.when() or 0))
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():
                self._leave()
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
            raise

    def _leave(self) -> None:
        while self._waiting:
            if not (waiting := self._waiting.pop()).cancelled():  # its call runs only in the loop's next turn
                waiting.set_result(None)
                return
        self.free += 1


def readable(message: Any) -> Any:
    """A message, unless its deserialiser returned an InvalidArgument for it, which is raised."""
    if isinstance(message, InvalidArgument):
        raise message
    return message


async def following(first: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any]:
    """All messages of a call: the one that was read, and those behind it. Servicers limit how many calls stream."""
    message = first
    while message is not grpc.aio.EOF:
        yield message
        message = readable(await context.read())


async def write(context: grpc.aio.ServicerContext, message: Any) -> None:
    """Writes a message of a stream. Raises DeadlineExceeded if the client reads nothing."""
    try:
        async with asyncio.timeout(_STALL_SECONDS):
            await context.write(message)
    except TimeoutError:
        rejected.note("grpc_send_timeout")
        raise DeadlineExceeded(f"nothing was read for {_STALL_SECONDS:g} s") from None
