"""LMCache's L2 adapter: objects that LMCache's servers share, and that outlive them.

LMCache's plugin adapter loads it by `module_path` and `class_name`. Written for LMCache 0.5.6.
"""

import itertools
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Generic, TypeVar

from lmcache.lmcache_native import Bitmap  # pyright: ignore[reportMissingImports]
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey  # pyright: ignore[reportMissingImports]
from lmcache.v1.distributed.internal_api import L2StoreResult  # pyright: ignore[reportMissingImports]
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # pyright: ignore[reportMissingImports]
from lmcache.v1.memory_management import MemoryObj  # pyright: ignore[reportMissingImports]
from lmcache.v1.platform.event_notifier import create_event_notifier  # pyright: ignore[reportMissingImports]

from fusionkv.kvcache_service.adapters.engine_blobs import EngineBlobs, EngineOptions
from fusionkv.kvcache_service.blobs import Blobs, Pin

log = logging.getLogger("lmcache.fusionkv")
R = TypeVar("R")


class _Finished(Generic[R]):
    """Results of tasks of one kind until they are asked for, and the descriptor that tells of new ones."""

    def __init__(self) -> None:
        self.notifier = create_event_notifier()
        self._results: dict[int, R] = {}
        self._lock = threading.Lock()

    def add(self, task: int, result: R) -> None:
        with self._lock:
            self._results[task] = result
        self.notifier.notify()

    def take(self, task: int) -> R | None:
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, R]:
        with self._lock:
            taken, self._results = self._results, {}
        return taken


@dataclass(slots=True)
class _Lock:
    """The lease of a lookup, and how many of its keys are still locked."""

    pin: Pin
    keys: int


class FusionKVL2Adapter(L2AdapterInterface):
    """Implements LMCache's interface, all of whose tasks run on one thread.

    A lock is a lease, which expires after the service's `lease_ms`; an object that was evicted then is a miss. Byte
    accounts are of what this adapter stored and deleted; the service evicts by its own accounts.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """adapter_params: as of `EngineOptions`. Raises ValueError if they are wrong."""
        super().__init__()
        self._options = EngineOptions.of(adapter_params, "adapter_params")
        self._blobs = EngineBlobs(self._options, {"engine": "lmcache", "version": version("lmcache")}, log)
        self._stored: _Finished[L2StoreResult] = _Finished()
        self._found: _Finished[Bitmap] = _Finished()
        self._loaded: _Finished[Bitmap] = _Finished()
        self._tasks = itertools.count()
        # By model, rank and group: how their objects look. Deletions name keys only.
        self._layouts: dict[tuple[str, int, int], str] = {}
        # By key, of the lookups that locked it.
        self._locks: dict[ObjectKey, list[_Lock]] = defaultdict(list)
        self._locks_lock = threading.Lock()

    def get_store_event_fd(self) -> int:
        return self._stored.notifier.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._found.notifier.fileno()

    def get_load_event_fd(self) -> int:
        return self._loaded.notifier.fileno()

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        names, views = self._of_objects(keys, objects)

        def then(new: list[bool] | None) -> None:
            pairs = [(key, view.nbytes) for key, view, is_new in zip(keys, views, new or (), strict=False) if is_new]
            sizes = [size for _, size in pairs]
            try:
                if pairs:
                    self._notify_keys_stored([key for key, _ in pairs], sizes)
            finally:
                self._stored.add(task, L2StoreResult(new is not None, sum(sizes)))

        task = next(self._tasks)
        self._blobs.start(lambda blobs: blobs.store(names, views), None, then)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.take_all()

    # Lookup and lock

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        asked = [
            (at, key, self._name(key, group_layout_descs[key.object_group_id]))
            for at, key in enumerate(keys)
            if key.object_group_id in group_layout_descs
        ]

        async def lookup(blobs: Blobs) -> Bitmap:
            pin = await blobs.pin([name for _, _, name in asked])
            hits = [(at, key) for (at, key, _), entry in zip(asked, pin.entries, strict=True) if entry is not None]
            lock = _Lock(pin, len(hits))
            with self._locks_lock:
                for _, key in hits:
                    self._locks[key].append(lock)
            if not hits:
                await blobs.unpin(pin)
            return _bitmap(len(keys), [at for at, _ in hits])

        task = next(self._tasks)
        self._blobs.start(lookup, Bitmap(len(keys)), lambda found: self._found.add(task, found))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        ended = []
        with self._locks_lock:
            for key in keys:
                if key not in self._locks:
                    continue
                lock = self._locks[key].pop()
                lock.keys -= 1
                if not lock.keys:
                    ended.append(lock)
                if not self._locks[key]:
                    del self._locks[key]

        async def unlock(blobs: Blobs) -> None:
            for lock in ended:  # an error leaves it to the lease's end
                await blobs.unpin(lock.pin)

        self._blobs.start(unlock, None, lambda _: None)

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        names, views = self._of_objects(keys, objects)

        nothing: list[bool] = []

        def then(filled: list[bool]) -> None:
            hits = [at for at, is_filled in enumerate(filled) if is_filled]
            try:
                if hits:
                    self._notify_keys_accessed([keys[at] for at in hits])
            finally:
                self._loaded.add(task, _bitmap(len(keys), hits))

        task = next(self._tasks)
        self._blobs.start(lambda blobs: blobs.retrieve(names, views), nothing, then)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.take(task_id)

    # Deletion and the rest

    def delete(self, keys: list[ObjectKey]) -> None:
        named = [(key, name) for key in keys if (name := self._known_name(key)) is not None]

        async def delete(blobs: Blobs) -> list[tuple[ObjectKey, int]]:
            names = [name for _, name in named]
            pin = await blobs.pin(names, lease_ms=1)
            await blobs.delete(names)
            found = zip(named, pin.entries, strict=True)
            return [(key, entry.size) for (key, _), entry in found if entry is not None]

        nothing: list[tuple[ObjectKey, int]] = []
        if deleted := self._blobs.run(delete, nothing):
            self._notify_keys_deleted([key for key, _ in deleted], [size for _, size in deleted])

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": not self._blobs.away, "type": type(self).__name__, "cache": self._options.cache}

    def close(self) -> None:
        self._blobs.close()
        for finished in (self._stored, self._found, self._loaded):
            finished.notifier.close()

    def _of_objects(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> tuple[list[bytes], list[memoryview]]:
        layouts = [MemoryLayoutDesc(each.get_shapes(), each.get_dtypes()) for each in objects]
        names = [self._name(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        return names, [memoryview(each.byte_array).cast("B") for each in objects]

    def _name(self, key: ObjectKey, layout: MemoryLayoutDesc) -> bytes:
        text = json.dumps([[*map(list, layout.shapes)], [*map(str, layout.dtypes)]])
        self._layouts[key.model_name, key.kv_rank, key.object_group_id] = text
        return _named(key, text)

    def _known_name(self, key: ObjectKey) -> bytes | None:
        layout = self._layouts.get((key.model_name, key.kv_rank, key.object_group_id))
        return None if layout is None else _named(key, layout)


def _named(key: ObjectKey, layout: str) -> bytes:
    fields = [key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, layout]
    return json.dumps(fields).encode()


def _bitmap(size: int, hits: Sequence[int]) -> Bitmap:
    bitmap = Bitmap(size)
    bitmap.batched_set(hits)
    return bitmap
