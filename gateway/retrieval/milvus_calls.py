"""Calls of a Milvus client that do not block the event loop, and raise service errors."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from fusionkv.gateway.retrieval.base import current_deadline
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.errors import NotFound, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")
# Limit for a call, including the wait for a thread. By default, Milvus lets a call wait for minutes.
_SECONDS = 30.0
# Concurrent calls; the client blocks a thread for each.
_CALLS = 16
# The client pings an idle connection every 10 s. Most gRPC servers and proxies treat that as an attack: they close
# the connection and refuse the next one. A call without a reply for 10 s still sends pings.
_NO_IDLE_PINGS = {"grpc.keepalive_permit_without_calls": False}
# Calls in a row without a reply after which only a trial call is made now and then. Calls with a shorter timeout than
# MIN_SECONDS do not count.
_FAILURES, MIN_SECONDS = 3, 1.0
# Pause between trials, and timeout of a trial, which its caller spends in vain if Milvus is still down.
REST_SECONDS, _TRIAL_SECONDS = 2.0, 5.0
_NO_COLLECTION, _NOT_LOADED = 100, 101
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class NoCollection(NotFound):
    """The collection does not exist."""


class _NotLoaded(Unavailable):
    """The collection must be loaded before it can be searched: Milvus Lite has restarted, or a user released it."""


class MilvusCalls:
    """Calls raise NoCollection if the collection does not exist, and Unavailable for any other error."""

    def __init__(self, client: MilvusClient, threads: ThreadPoolExecutor) -> None:
        self.client = client
        self._threads = threads
        self._unanswered = 0  # calls in a row
        self._trial = 0.0  # time of the next trial call

    @classmethod
    async def open(cls, url: str, token: str, database: str, ca: str) -> "MilvusCalls":
        """Raises OSError if Milvus can't be reached, or rejects the token."""
        # pymilvus logs every error with a traceback, including expected ones.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        threads = ThreadPoolExecutor(_CALLS, "milvus")
        more = {"server_pem_path": ca} if ca else {}
        direct = {"grpc.enable_http_proxy": 0} if process.is_near(urlsplit(url).hostname or "") else {}

        def connect() -> MilvusClient:
            options = _NO_IDLE_PINGS | direct
            return MilvusClient(url, token=token, db_name=database, timeout=_SECONDS, grpc_options=options, **more)

        try:
            client = await asyncio.get_running_loop().run_in_executor(threads, connect)
        except (MilvusException, grpc.RpcError, ValueError) as error:
            threads.shutdown(wait=False)
            raise OSError(f"can't connect to Milvus: {_reason(error)}: check milvus_url and milvus_token") from error
        return cls(client, threads)

    async def read(self, call: Callable[..., T], name: str, **options: Any) -> T:
        """As `run`, for a call that needs the collection loaded."""
        try:
            return await self.run(call, name, **options)
        except _NotLoaded:
            await self.run(self.client.load_collection, name)
            return await self.run(call, name, **options)

    async def run(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Runs a call in a thread with its timeout in seconds, unless the deadline passes before a thread is free."""
        deadline = min(Deadline.after(self._admit()), current_deadline())
        loop = asyncio.get_running_loop()

        def run() -> T:
            if deadline.passed:
                raise Unavailable("Milvus: the deadline passed before the call began")
            seconds = deadline.remaining()
            # Recorded from the thread: the caller may be cancelled before the call ends.
            unanswered = 0.0
            try:
                return call(*args, timeout=seconds, **options)
            except (MilvusException, grpc.RpcError) as error:
                unanswered = seconds if _unanswered(error) else 0.0
                raise
            finally:
                loop.call_soon_threadsafe(self._record, unanswered)

        try:
            return await loop.run_in_executor(self._threads, run)
        except (MilvusException, grpc.RpcError) as error:
            code = error.code if isinstance(error, MilvusException) else None
            if code == _NO_COLLECTION:
                raise NoCollection(_reason(error)) from error
            kind = _NotLoaded if code == _NOT_LOADED else Unavailable
            raise kind(f"Milvus: {_reason(error)}") from error

    async def close(self) -> None:
        # Waits for calls in progress.
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        await asyncio.to_thread(self.client.close)

    def _admit(self) -> float:
        """The maximum seconds of a call. Raises Unavailable if Milvus does not answer and no trial is due."""
        if self._unanswered < _FAILURES:
            return _SECONDS
        now = time.monotonic()
        if now < self._trial:
            raise Unavailable(
                f"Milvus did not answer the last {self._unanswered} calls; "
                f"the next attempt is in {self._trial - now:.1f} s"
            )
        self._trial = now + _TRIAL_SECONDS  # no other call may try until then
        return _TRIAL_SECONDS

    def _record(self, unanswered: float) -> None:
        """Records the end of a call: the seconds in which it got no reply, or 0 after a reply."""
        if not unanswered:
            if self._unanswered >= _FAILURES:
                log.info("Milvus is answering again")
            self._unanswered = 0
        elif unanswered >= MIN_SECONDS:
            self._unanswered += 1
            self._trial = time.monotonic() + REST_SECONDS
            if self._unanswered == _FAILURES:
                log.warning("Milvus did not answer %d calls in a row: refusing further calls", _FAILURES)


def _unanswered(error: MilvusException | grpc.RpcError) -> bool:
    """Whether there was no reply: after its own retries, the client returns gRPC's status as Milvus's code."""
    return (error.code() if isinstance(error, grpc.RpcError) else error.code) in _SILENT


def _reason(error: Exception) -> str:
    return str(getattr(error, "message", "") or error).splitlines()[0]
