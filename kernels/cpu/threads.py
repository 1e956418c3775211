"""Independent pieces of work side by side on a CPU, each on a thread of its own."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

_MOST = 8  # threads: with more, Python's lock would be waited for (an operation takes 0.3 ms here, its start 0.01)

P = TypeVar("P")
R = TypeVar("R")


def side_by_side(work: Callable[[P], R], pieces: Sequence[P]) -> list[R]:
    """`work` of each piece, in their order.

    An operation that torch spreads over threads ends with its slowest. When others use the machine as well, most of
    the time goes into waiting for a thread that is not running; pieces of their own don't wait for each other.
    """
    threads = torch.get_num_threads()
    workers = min(threads, _MOST)
    if workers == 1 or len(pieces) < workers:
        return [work(piece) for piece in pieces]

    def run(piece: P) -> R:
        # The mode is a thread's own.
        with torch.inference_mode():
            return work(piece)

    return list(_pool(workers, threads).map(run, pieces))


@cache
def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """Workers that share so many of torch's threads."""
    started = threading.Barrier(workers + 1)

    def start() -> None:
        # A thread's first question or operation sets its own number to the process's, over what was set before.
        torch.get_num_threads()
        torch.set_num_threads(threads // workers)
        started.wait()

    pool = ThreadPoolExecutor(workers, "side-by-side", initializer=start)
    for _ in range(workers):
        pool.submit(int)
    started.wait()
    # Setting a thread's own number sets the process's as well.
    torch.set_num_threads(threads)
    return pool
