"""vLLM's tiering manager with FusionKV's tier, driven by JSON lines: run by vLLM's Python, for test_tier.py.

A command is an object with `do`, the name of a method of `Managers`, and its arguments. Its result is a line of JSON.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (  # pyright: ignore[reportMissingImports]
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (  # pyright: ignore[reportMissingImports]
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # pyright: ignore[reportMissingImports]

_STEP = ScheduleEndContext((), ())


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


class Instance:
    """A vLLM instance's tiers: those of a scheduler, without an engine."""

    def __init__(self, name: str, tier: dict[str, Any], model: str, dtype: str, row_bytes: int, rows: int) -> None:
        module = "fusionkv.kvcache_service.adapters.vllm"
        tiers = [{"type": "FusionKVTier", "module_path": module, **tier}]
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
            worker_kv_bytes_per_block=row_bytes,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": rows * row_bytes, "secondary_tiers": tiers},
            engine_id=f"fusionkv-{os.getpid()}-{name}",
            model=OffloadingModelConfig(model, dtype),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        self._manager = TieringOffloadingSpec(config).get_manager()
        self._rows = np.asarray(self._manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._began = 0
        self.longest = 0.0

    def store(self, keys: list[int]) -> None:
        """Fills rows, as the worker does, and hands them to the tiers."""
        context = self._begin()
        names = [key_of(key) for key in keys]
        prepared = self._manager.prepare_store(names, context)
        for key, row in zip(keys, prepared.store_spec.chunk_ids, strict=True):
            self._rows[row] = self._bytes(key)
        self._timed(self._manager.complete_store, names, context)
        self._until_idle()
        self._manager.on_request_finished(context)

    def lookup(self, keys: list[int]) -> tuple[ReqContext, list[LookupResult]]:
        """Looks up as the scheduler does, step by step while a lookup is to be repeated."""
        context = self._begin()
        while True:
            found = [self._timed(self._manager.lookup, key_of(key), context) for key in keys]
            if LookupResult.RETRY not in found:
                return context, found
            self.step()

    def load(self, keys: list[int]) -> dict[str, Any]:
        """Looks up and loads; which keys were there, and whether all those have their bytes."""
        began = time.monotonic()
        return self.finish(self.lookup(keys), keys) | {"seconds": time.monotonic() - began}

    def finish(self, looked_up: tuple[ReqContext, list[LookupResult]], keys: list[int]) -> dict[str, Any]:
        context, _ = looked_up
        self._until_idle()
        found = [self._timed(self._manager.lookup, key_of(key), context) for key in keys]
        there = [key for key, result in zip(keys, found, strict=True) if result is LookupResult.HIT]
        names = [key_of(key) for key in there]
        rows = self._manager.prepare_load(names, context).chunk_ids if there else []
        right = all(np.array_equal(self._rows[row], self._bytes(key)) for key, row in zip(there, rows, strict=True))
        self._manager.complete_load(names, context)
        self._manager.on_request_finished(context)
        missed = [key for key, result in zip(keys, found, strict=True) if result is LookupResult.MISS]
        return {"found": there, "missed": missed, "right": right, "longest": self.longest}

    def reset(self) -> None:
        """As vLLM does when it sleeps: the CPU tier is emptied once nothing transfers any more."""
        self._manager.reset_cache()
        if hasattr(self._manager, "on_reset_flushed"):  # vLLM 0.33: no worker writes to the tier any more
            self._manager.on_reset_flushed()

    def close(self) -> None:
        self._rows = np.empty(0)
        self._manager.shutdown()

    def _bytes(self, key: int) -> np.ndarray:
        return np.random.default_rng(key).integers(0, 256, self._rows.shape[1], np.uint8)

    def _begin(self) -> ReqContext:
        self._began += 1
        context = ReqContext(f"request {self._began}")
        self._manager.on_new_request(context)
        return context

    def _until_idle(self) -> None:
        self.step()
        while self._manager.has_pending_work():
            self.step()

    def step(self) -> None:
        self._timed(self._manager.on_schedule_end, _STEP)
        time.sleep(0.002)  # in which vLLM computes

    def _timed(self, call: Any, *args: Any) -> Any:
        began = time.monotonic()
        result = call(*args)
        self.longest = max(self.longest, time.monotonic() - began)
        return result


class Managers:
    """Instances by name."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._pending: dict[str, Any] = {}

    def open(
        self, name: str, tier: Any, model: str = "m", dtype: str = "float16", row_bytes: int = 16384, rows: int = 64
    ) -> str:
        """Returns the error, if it is refused."""
        try:
            self._instances[name] = Instance(name, tier, model, dtype, row_bytes, rows)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    def store(self, name: str, keys: list[int]) -> None:
        self._instances[name].store(keys)

    def load(self, name: str, keys: list[int]) -> dict[str, Any]:
        return self._instances[name].load(keys)

    def look_up(self, name: str, keys: list[int]) -> None:
        """The first half of `load`."""
        self._pending[name] = self._instances[name].lookup(keys), keys

    def step(self, name: str) -> None:
        """Ends a step of the scheduler, which submits loads."""
        self._instances[name].step()

    def end(self, name: str) -> dict[str, Any]:
        return self._instances[name].finish(*self._pending.pop(name))

    def reset(self, name: str) -> None:
        self._instances[name].reset()

    def close(self, name: str) -> None:
        self._instances.pop(name).close()


def main() -> None:
    managers = Managers()
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM logs there
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(managers, command.pop("do"))(**command)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
