"""A worker's tensor-parallel ranks: rank 0 starts the others as child processes, and drives steps and copies."""

import asyncio
import logging
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from socket import socket, socketpair
from typing import Any

import torch
import torch.distributed as dist

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.compute.engine import TPGroup
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.models import ALONE, Model, Ranks
from fusionkv.fusion_worker.pool.kv_pool import KVPool, owned, pool_size
from fusionkv.fusion_worker.tensor_parallel.channel import Channel
from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.errors import Unavailable

log = logging.getLogger(__name__)
_Joined = tuple[Model, Channel, Channel]  # A rank's part of the model, and its channels for steps and for copies.


class RankLost(Unavailable):
    """A rank ended, timed out or failed. The ranks are out of sync, and the worker has to restart."""


class Driver(TPGroup):
    """Rank 0's side of a group of several ranks. Steps and copies run concurrently, each in one order on all ranks.

    Calls after the first one that loses a rank raise its error.
    """

    def __init__(self, ranks: Ranks, steps: Channel, copies: Channel, on_lost: Callable[[Unavailable], None]) -> None:
        super().__init__(on_lost)
        self.ranks, self._steps, self._copies = ranks, steps, copies
        self.own = steps.own = copies.own
        self._copying = threading.Lock()
        self._lost: RankLost | None = None

    def step(self, call: Callable[[], Any]) -> Any:
        with self._together(self._steps, call):
            return call()

    def copy(self, call: Callable[..., Any], parts: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        size = len(parts[0]) if parts else 0
        with self._copying, self._together(self._copies, partial(self._copies.copy, call, size)):
            return self._copies.copy(call, size, parts)

    @contextmanager
    def _together(self, channel: Channel, call: Callable[..., Any]) -> Iterator[None]:
        """Sends a call, runs the body, and waits for all ranks. After a failure on any rank all calls fail."""
        if self._lost is not None:
            raise self._lost
        try:
            channel.send(call)
            yield
            dist.barrier(group=channel.data)
        except Exception as error:
            if self._lost is None:
                self._lost = RankLost(f"the {self.ranks.count} ranks of this worker are out of sync: {error}")
                log.error("the tensor-parallel ranks are out of sync", exc_info=error)
                self.on_lost(self._lost)
            raise self._lost from error


class Processes:
    """The processes of ranks 1 and up.

    Attributes:
        meeting: rendezvous file of torch.distributed.
        pipes: sockets to each rank, for steps and for copies.
        lost: fails with RankLost when a rank ends or hangs, and with Unavailable when a worker's only GPU fails.
    """

    def __init__(self, meeting: Path) -> None:
        self.meeting = meeting
        self.children: list[asyncio.subprocess.Process] = []
        self.pipes: list[tuple[socket, socket]] = []
        self._failed: Future[None] = Future()
        self.lost = asyncio.wrap_future(self._failed)

    def report(self, why: Unavailable) -> None:
        """Fails `lost`. Thread-safe."""
        with suppress(InvalidStateError):
            self._failed.set_exception(why)

    async def watch(self, child: asyncio.subprocess.Process, rank: int, count: int) -> None:
        status = await child.wait()
        self.report(RankLost(f"rank {rank} of {count} {process.how_ended(status)}; see its last log lines above"))

    async def lead(self, config: WorkerConfig) -> tuple[Model, TPGroup]:
        """Loads rank 0's model and connects the ranks. Raises as `models.load`, and RankLost if one can't start."""
        if config.tensor_parallel == 1:
            return _load(config, config.device), TPGroup(self.report)
        joined: Future[_Joined] = Future()

        def join() -> None:
            try:
                joined.set_result(_join(config, 0, self.meeting, self.pipes))
            except BaseException as error:
                joined.set_exception(error)

        threading.Thread(target=join, daemon=True).start()  # A daemon: it may wait forever for a rank that ended.
        waited: list[asyncio.Future[Any]] = [asyncio.wrap_future(joined), self.lost]
        done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        model, steps, copies = done.pop().result()
        return model, Driver(model.ranks, steps, copies, self.report)


@asynccontextmanager
async def started(count: int, argv: Sequence[str]) -> AsyncIterator[Processes]:
    """Runs ranks 1 to count - 1 as `python -m fusionkv.fusion_worker` with these flags; kills them on exit."""
    # One rank meets nobody. A folder would stay behind where a signal ends the worker while it loads its model.
    with tempfile.TemporaryDirectory(prefix="fusionkv-ranks-") if count > 1 else nullcontext("") as folder:
        processes = Processes(Path(folder) / "meeting")
        watchers: list[asyncio.Task[None]] = []
        try:
            for rank in range(1, count):
                (step, its_step), (copy, its_copy) = socketpair(), socketpair()
                processes.pipes.append((step, copy))
                fds = its_step.fileno(), its_copy.fileno()
                own = ("--rank", rank, "--meeting", processes.meeting, "--pipes", *fds, "--parent", os.getpid())
                command = (sys.executable, "-P", "-m", "fusionkv.fusion_worker", *argv, *map(str, own))
                # In a new session, so that only rank 0 gets the terminal's signals.
                child = await asyncio.create_subprocess_exec(*command, pass_fds=fds, start_new_session=True)
                its_step.close()
                its_copy.close()
                processes.children.append(child)
                watchers.append(asyncio.create_task(processes.watch(child, rank, count)))
            yield processes
        finally:
            for child in processes.children:
                if child.returncode is None:
                    child.kill()
            await asyncio.gather(*watchers)
            processes.lost.cancel() or processes.lost.exception()  # Marks the exception as retrieved.


def follow(config: WorkerConfig, rank: int, meeting: Path, pipes: Sequence[int]) -> None:
    """Runs a rank other than 0 until rank 0 ends: steps in this thread, copies in another one."""
    step, copy = (socket(fileno=number) for number in pipes)
    model, steps, copies = _join(config, rank, meeting, [(step, copy)])
    size = pool_size(config.pool_bytes, model)
    pool = KVPool.of(model.kv, size, config.page_tokens, model.device)
    steps.own = copies.own = owned(pool, model)
    threading.Thread(target=copies.obey, name="copies", daemon=True).start()
    steps.obey()


def _load(config: WorkerConfig, device: str, ranks: Ranks = ALONE) -> Model:
    torch.set_num_threads(max(1, (config.threads or process.cores()) // ranks.count))
    return models.load(config.model, device, config.dtype, config.max_prompt_tokens, ranks, config.template_date)


def _join(config: WorkerConfig, rank: int, meeting: Path, pipes: Sequence[tuple[socket, socket]]) -> _Joined:
    device, timeout = models.rank_device(config.device, rank), timedelta(seconds=config.rank_timeout)
    ranks = Ranks(rank, config.tensor_parallel)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # All ranks run on this machine; listen only there.
    os.environ["LOCAL_RANK"] = str(rank)  # transformers chooses the GPU by it.
    store = dist.FileStore(str(meeting), ranks.count)
    _meet(store, "started", ranks)
    dist.init_process_group(store=store, rank=rank, world_size=ranks.count, timeout=timeout)  # gloo; NCCL on GPUs
    steps, copies = (Channel(device, timeout, each) for each in zip(*pipes, strict=True))
    model = _load(config, str(device), ranks)
    _meet(store, "loaded", ranks)
    return model, steps, copies


def _meet(store: dist.Store, when: str, ranks: Ranks) -> None:
    store.set(f"{when} {ranks.rank}", "")
    store.wait([f"{when} {rank}" for rank in range(ranks.count)], timedelta(hours=2))
