"""The other ranks of a worker: child processes of rank 0, which end with it, and with which it ends."""

import asyncio
import contextlib
import ctypes
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fusionkv.fusion_worker.tensor_parallel.leader import RankLost

T = TypeVar("T")
_MODULE = "fusionkv.fusion_worker"
# Told to end, a rank ends at once; what does not is killed.
_END_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


class Processes:
    """Ranks 1 and up. meeting: the file that all find one another by.

    lost: fails with RankLost when one of them ends that was not told to, or when `report` says why; never succeeds.
    """

    def __init__(self, meeting: Path) -> None:
        self.meeting = meeting
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.children: list[asyncio.subprocess.Process] = []

    def report(self, why: RankLost) -> None:
        """Fails `lost`. From any thread."""
        self._loop.call_soon_threadsafe(self._fail, why)

    def _fail(self, why: RankLost) -> None:
        if not self.lost.done():
            self.lost.set_exception(why)

    async def beside(self, work: Callable[[], T]) -> T:
        """Does what waits for the other ranks, in a thread of its own; raises RankLost when one of them ends."""
        done: asyncio.Future[T] = self._loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, failed = None, None
            try:
                result = work()
            except BaseException as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(settle, result, failed)

        # A daemon: what waits for a rank that is gone holds nothing up.
        threading.Thread(target=run, name="start", daemon=True).start()
        waited: list[asyncio.Future[Any]] = [done, self.lost]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            self.lost.result()
        return done.result()


@asynccontextmanager
async def started(count: int, argv: Sequence[str]) -> AsyncIterator[Processes]:
    """Ranks 1 to count - 1, as `python -m fusionkv.fusion_worker` with these flags. On leaving they have ended."""
    with tempfile.TemporaryDirectory(prefix="fusionkv-ranks-") as folder:
        processes = Processes(Path(folder) / "meeting")
        children = processes.children
        watchers: list[asyncio.Task[None]] = []
        try:
            for rank in range(1, count):
                own = ("--rank", str(rank), "--meeting", str(processes.meeting))
                child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", _MODULE, *argv, *own), stdin=asyncio.subprocess.DEVNULL
                )
                children.append(child)
                watchers.append(asyncio.create_task(_watch(child, rank, count, processes)))
            yield processes
            if not processes.lost.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_END_SECONDS):
                        await asyncio.gather(*watchers)
        finally:
            for watcher in watchers:
                watcher.cancel()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
            # Nobody may have asked.
            processes.lost.cancel() or processes.lost.exception()


async def _watch(child: asyncio.subprocess.Process, rank: int, count: int, processes: Processes) -> None:
    status = await child.wait()
    if status:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        processes.report(RankLost(f"rank {rank} of {count} {how}; its last lines above say why"))


def end_with_parent() -> None:
    """For a rank that is a child: it dies with rank 0, and leaves it to rank 0 to follow signals."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
