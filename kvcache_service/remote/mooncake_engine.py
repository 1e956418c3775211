"""Mooncake Store as backend of the remote tier."""

import contextlib
import ctypes
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fusionkv.kvcache_service.remote.tier import Engine
from fusionkv.kvcache_service.tiers.base import Unreachable

# Transfer buffer: twice a batch of 8 MiB for each of eight threads.
_BUFFER_BYTES = 128 << 20
_ANSWER_SECONDS = 2.0
# Mooncake's error code for a missing value.
_NOT_FOUND = -704
_DEFAULTS = {"host": "127.0.0.1", "metadata": "P2PHANDSHAKE", "protocol": "tcp", "device": ""}


class MooncakeEngine(Engine):
    """A client of a store's master, which also contributes memory to the store.

    Values are in memory contributed by clients, and vanish with the client. The store evicts the least recently used
    values; there is no time to live. Mooncake applies its own timeouts to calls.
    """

    def __init__(self, url: str, segment_bytes: int) -> None:
        """url: mooncake://MASTER:PORT?host=OWN&protocol=tcp|rdma&device=NAMES&metadata=URL, the last four optional.

        Raises ImportError if the package, or a library that it needs, is not installed; ValueError if the URL is
        malformed.
        """
        self._make = _store_class()
        parts = urlsplit(url)
        settings = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        if not parts.hostname or not parts.port or parts.path or settings.keys() - _DEFAULTS:
            raise ValueError(f"expected mooncake://MASTER:PORT, optionally with {', '.join(_DEFAULTS)} in the query")
        own = _DEFAULTS | settings
        self._setup = (
            own["host"], own["metadata"], segment_bytes, _BUFFER_BYTES, own["protocol"], own["device"], parts.netloc,
        )  # fmt: skip
        self._store: Any = None
        self._connecting = threading.Lock()

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        store = self._connected()
        values = [value or None for value in store.get_batch(list(names))] if names else []
        if not any(values):
            # An empty response may also mean that there was none.
            self.probe()
        return values

    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        store = self._connected()
        _done(store.upsert_batch([name for name, _ in values], [value for _, value in values]))

    def touch(self, names: Sequence[str]) -> list[bool]:
        answers = self._connected().batch_is_exist(list(names)) if names else []
        if any(answer < 0 for answer in answers):
            raise Unreachable(f"the Mooncake Store is unreachable: {min(answers)}")
        return [answer == 1 for answer in answers]

    def remove(self, names: Sequence[str]) -> None:
        for answer in self._connected().batch_remove(list(names), True) if names else []:
            if answer != _NOT_FOUND:
                _done(answer)

    def remove_all(self, prefix: str) -> None:
        answer = self._connected().remove_by_regex(f"^{prefix}.*", True)
        _done(min(answer, 0))

    def close(self) -> None:
        if self._store is not None:
            # Without a reachable master, closing the client holds the GIL for a minute (62 s in 0.3.13). The master
            # drops clients that vanish anyway.
            answered = threading.Event()
            threading.Thread(target=self._probe, args=(answered,), daemon=True).start()
            if answered.wait(_ANSWER_SECONDS):
                self._store.close()

    def _probe(self, answered: threading.Event) -> None:
        with contextlib.suppress(OSError):
            self.probe()
            answered.set()

    def _connected(self) -> Any:
        with self._connecting:
            if self._store is None:
                store = self._make()
                answer = store.setup(*self._setup)
                if answer:
                    with contextlib.suppress(Exception):
                        store.close()
                    raise Unreachable(f"the Mooncake Store at {self._setup[-1]} can't be joined: {answer}")
                self._store = store
            return self._store


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
