"""A rank other than 0: does what it is told, with its own heads, until it is told to end."""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable

from fusionkv.fusion_worker.compute.attention import forward, install, shallow
from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.eviction import copy_kept
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.tensor_parallel import orders
from fusionkv.fusion_worker.tensor_parallel.lane import Joined
from fusionkv.fusion_worker.transfer.storage import Storage
from fusionkv.protos.fusion.v1 import ranks_pb2 as pb


class Member:
    """Steps run in the caller's thread, copies in one of their own, as on rank 0. An error ends the process, which
    the others see at once.
    """

    def __init__(self, config: WorkerConfig, model: Model, joined: Joined) -> None:
        install(model)
        self._model = model
        self._joined = joined
        self._pool = KVPool.of(model.kv, config.pool_bytes, config.page_tokens, model.device)
        self._storage = Storage(self._pool, config.store)

    def run(self) -> None:
        """Returns when rank 0 has said so."""
        copying = threading.Thread(target=self._or_end, args=(self._copies,), name="copies", daemon=True)
        copying.start()
        self._or_end(self._steps)
        copying.join()

    def _or_end(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            with contextlib.suppress(OSError):
                print(f"fusionkv-worker: rank {self._joined.ranks.rank} failed", file=sys.stderr)
                traceback.print_exc()
                sys.stderr.flush()
            # Other threads may wait for ranks that will never come.
            os._exit(1)

    def _steps(self) -> None:
        while (step := pb.Step.FromString(self._joined.steps.hear())).spans:
            self._step(step)

    def _step(self, step: pb.Step) -> None:
        model = self._model
        batch = orders.read_batch(step, self._pool.kv, model)
        if not step.HasField("shallow"):
            forward(model, batch)
            return
        probe = orders.read_shallow(step.shallow, model.device)
        probe.scores(model, batch, shallow(model, batch).second)

    def _copies(self) -> None:
        lane = self._joined.copies
        while what := (copy := pb.Copy.FromString(lane.hear())).WhichOneof("what"):
            self._copy(copy, what)
            lane.meet()

    def _copy(self, copy: pb.Copy, what: str) -> None:
        lane, storage = self._joined.copies, self._storage
        if what == "keep":
            span, tokens, slots = orders.read_keep(copy.keep, self._model.device)
            copy_kept(span, tokens, slots, self._pool.kv, self._model)
            return
        chunk = copy.put if what == "put" else copy.take
        runs, count = orders.read_runs(chunk), chunk.tokens
        if what == "put":
            storage.write(runs, count, lane.scattered(storage.part_size(count)))
        else:
            lane.gather(storage.read(runs, count))
