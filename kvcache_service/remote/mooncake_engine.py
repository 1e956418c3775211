"""Mooncake Store as backend of the remote tier."""

import contextlib
import ctypes
import importlib.util
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fusionkv.kvcache_service.remote.tier import RemoteEngine
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.protos.runtime import process

# Transfer buffer: twice a batch of 8 MiB for each of eight threads.
_BUFFER_BYTES = 128 << 20
# What `Writer.fill` reads at once.
_STAGING_BYTES = 4 << 20
_ANSWER_SECONDS = 2.0
# A master that answers lets a client join in 0.15 s.
_JOIN_SECONDS = 5.0
# After a failure, further calls fail for a while: those that waited would each take as long again.
_RETRY_SECONDS = 1.0
# Mooncake's error code for a missing value.
_NOT_FOUND = -704
_DEFAULTS = {"host": "127.0.0.1", "metadata": "P2PHANDSHAKE", "protocol": "tcp", "device": ""}


class _Client:
    """The store's client, which joins the store at its first use."""

    def __init__(self, local: tuple[str, str], master: tuple[str, str, str], memory_bytes: int) -> None:
        """local, master: arguments of `setup` before and behind the sizes. Raises ImportError as `MooncakeEngine`."""
        self._make = _store_class()
        self._local, self._master, self._memory_bytes = local, master, memory_bytes
        self._store: Any = None
        self._connecting = threading.Lock()
        self._next_join = 0.0
        # Closing the client during a call ends the process with SIGSEGV (0.3.13).
        self._calls, self._closed, self._ended = 0, False, threading.Condition()
        # Joining takes 0.2 s, more than a lookup waits. A failure is repeated, and reported, at the first use.
        threading.Thread(target=self._join, daemon=True).start()

    @contextlib.contextmanager
    def call(self) -> Iterator[Any]:
        """The store's client, for one call."""
        store = self._connected()
        with self._ended:
            if self._closed:
                raise Unreachable("the client of the Mooncake Store is closed")
            self._calls += 1
        try:
            yield store
        finally:
            with self._ended:
                self._calls -= 1
                self._ended.notify_all()

    def close(self) -> None:
        """Refuses further calls, waits for those that run, and leaves the store if they ended in time."""
        with self._ended:
            self._closed = True
            idle = self._ended.wait_for(lambda: self._calls == 0, _ANSWER_SECONDS)
        if idle and self._store is not None:
            self._store.close()

    def _join(self) -> None:
        with contextlib.suppress(OSError):
            self._connected()

    def _connected(self) -> Any:
        with self._connecting:
            if self._store is None:
                self._check_master()
                store = self._make()
                answer = store.setup(*self._local, self._memory_bytes, _BUFFER_BYTES, *self._master)
                if answer:
                    with contextlib.suppress(Exception):
                        store.close()
                    raise Unreachable(f"the Mooncake Store at {self._master[-1]} can't be joined: {answer}")
                self._store = store
            return self._store

    def _check_master(self) -> None:
        """Joins the store in another process, as a client without memory. Raises Unreachable.

        While a master does not answer, `setup` holds the GIL: 20 times 30 s (0.3.13).
        """
        if time.monotonic() < self._next_join:
            raise Unreachable(f"the Mooncake Store at {self._master[-1]} can't be joined")
        command = [sys.executable, "-P", "-m", __name__, *self._local, *self._master]
        try:
            subprocess.run(command, check=True, timeout=_JOIN_SECONDS, capture_output=True, stdin=subprocess.DEVNULL)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            self._next_join = time.monotonic() + _RETRY_SECONDS
            raise Unreachable(f"the Mooncake Store at {self._master[-1]} can't be joined") from error


class MooncakeEngine(RemoteEngine):
    """A client of a store's master, which also contributes memory to the store.

    Values are in memory contributed by clients, and vanish with the client. The store evicts the least recently used
    values; there is no time to live. Mooncake applies its own timeouts to calls.
    """

    def __init__(self, url: str, memory_bytes: int) -> None:
        """url: mooncake://MASTER:PORT?host=OWN&protocol=tcp|rdma&device=NAMES&metadata=URL, the last four optional.

        Raises ImportError if the package, or a library that it needs, is not installed; ValueError if the URL is
        malformed.
        """
        parts = urlsplit(url)
        settings = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        if not parts.hostname or not parts.port or parts.path or settings.keys() - _DEFAULTS:
            raise ValueError(f"expected mooncake://MASTER:PORT, optionally with {', '.join(_DEFAULTS)} in the query")
        options = _DEFAULTS | settings
        local, master = (options["host"], options["metadata"]), (options["protocol"], options["device"], parts.netloc)
        self._client = _Client(local, master, memory_bytes)
        self._staging = threading.local()

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        with self._client.call() as store:
            values = [value or None for value in store.get_batch(list(names))] if names else []
        if not any(values):
            # An empty response may also mean that there was none.
            self.probe()
        return values

    def get_into(self, names: Sequence[str], into: Sequence[memoryview]) -> bool:
        """By a registered buffer of this thread, which takes half of the time of `get`.

        Not into the given buffers: a transfer that failed might still write there when others use them.
        """
        sizes = list(map(len, into))
        if sum(sizes) > _STAGING_BYTES:
            return super().get_into(names, into)
        with self._client.call() as store:
            if not hasattr(self._staging, "memory"):
                memory = mmap.mmap(-1, _STAGING_BYTES)
                start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                _done(store.register_buffer(start, _STAGING_BYTES))
                self._staging.memory, self._staging.start = memoryview(memory), start
            offsets = [0, *accumulate(sizes)][:-1]
            answers = store.batch_get_into(list(names), [self._staging.start + at for at in offsets], sizes)
        if any(answer < 0 for answer in answers):
            self.probe()  # a negative answer may also mean that there was none
        if answers != sizes:
            return False
        for at, view in zip(offsets, into, strict=True):
            view[:] = self._staging.memory[at : at + len(view)]
        return True

    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        with self._client.call() as store:
            _done(store.upsert_batch([name for name, _ in values], [value for _, value in values]))

    def touch(self, names: Sequence[str]) -> list[bool]:
        with self._client.call() as store:
            answers = store.batch_is_exist(list(names)) if names else []
        if any(answer < 0 for answer in answers):
            raise Unreachable(f"the Mooncake Store is unreachable: {min(answers)}")
        return [answer == 1 for answer in answers]

    def remove(self, names: Sequence[str]) -> None:
        with self._client.call() as store:
            answers = store.batch_remove(list(names), True) if names else []
        for answer in answers:
            if answer != _NOT_FOUND:
                _done(answer)

    def remove_all(self, prefix: str) -> None:
        with self._client.call() as store:
            answer = store.remove_by_regex(f"^{prefix}.*", True)
        _done(min(answer, 0))

    def close(self) -> None:
        answered = threading.Event()
        threading.Thread(target=self._probe, args=(answered,), daemon=True).start()
        # Without a reachable master, closing the client holds the GIL for a minute (62 s in 0.3.13). The master drops
        # clients that vanish anyway.
        if answered.wait(_ANSWER_SECONDS):
            self._client.close()

    def _probe(self, answered: threading.Event) -> None:
        with contextlib.suppress(OSError):
            self.probe()
            answered.set()


def _done(answer: int) -> None:
    if answer <= -900:
        raise Unreachable(f"the Mooncake Store is unreachable: {answer}")
    if answer < 0:
        raise OSError(f"the Mooncake Store returned an error: {answer}")


def _store_class() -> Any:
    """Imports the store's class. Raises ImportError if it is not installed."""
    # Even the package for machines without CUDA links to the CUDA runtime, which is in another package.
    runtime = importlib.util.find_spec("nvidia.cuda_runtime") if importlib.util.find_spec("nvidia") else None
    for folder in runtime.submodule_search_locations or () if runtime is not None else ():
        for library in Path(folder, "lib").glob("libcudart.so.*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore


if __name__ == "__main__":
    process.end_with_parent()
    local, master = sys.argv[1:3], sys.argv[3:]
    # Without the client's own end, which would wait for the master.
    os._exit(min(1, abs(_store_class()().setup(*local, 0, 0, *master))))
