"""Runs independent pieces of work in parallel on CPU threads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

_MOST = 8  # threads; more would contend for Python's lock (an operation takes 0.3 ms here, its launch 0.01 ms)

P = TypeVar("P")
R = TypeVar("R")


def side_by_side(work: Callable[[P], R], pieces: Sequence[P]) -> list[R]:
    """Runs `work` on each piece. Returns the results in the order of the pieces.

    An operation that torch spreads over threads takes as long as its slowest thread. On a machine with other load,
    most of that time is spent waiting for a descheduled thread; independent pieces do not wait for each other.
    """
    threads = torch.get_num_threads()
    workers = min(threads, _MOST)
    if workers == 1 or len(pieces) < workers:
        return [work(piece) for piece in pieces]

    def run(piece: P) -> R:
        # Inference mode is per thread.
        with torch.inference_mode():
            return work(piece)

    return list(_pool(workers, threads).map(run, pieces))


@cache
def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """A pool of `workers` threads that share `threads` threads of torch."""
    started = threading.Barrier(workers + 1)

    def start() -> None:
        # A thread's first query or operation resets its thread count to the process's, so query before setting it.
        torch.get_num_threads()
        torch.set_num_threads(threads // workers)
        started.wait()

    pool = ThreadPoolExecutor(workers, "side-by-side", initializer=start)
    for _ in range(workers):
        pool.submit(int)
    started.wait()
    # Setting a thread's count sets the process's as well.
    torch.set_num_threads(threads)
    return pool
