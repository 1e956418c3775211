"""Splits an evaluation into jobs for several processes: blocks of samples under a model."""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.evaluate.data.samples import Block, Task
from fusionkv.fusion_worker.evaluate.report.cells import NO_CONTEXT, Cell, Measured, Store, Subject, key
from fusionkv.protos.contract.recipes import Recipe
from fusionkv.protos.runtime import process

# Samples of a job, which an interrupted run loses at most for each process: of a reference task, and of a file, whose
# samples can take minutes.
BLOCK, _DATA_BLOCK = 25, 2


@dataclass(frozen=True, slots=True)
class Part:
    """Cells to measure over a block."""

    block: Block
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks with the same contexts, which one process encodes once."""

    subject: Subject
    config: WorkerConfig
    parts: tuple[Part, ...]


def blocks(task: Task) -> list[Block]:
    """A task's samples, as they are measured and stored."""
    return [*task.blocks(_DATA_BLOCK if task.library else BLOCK)]


def cells_of(task: Task, recipes: Sequence[Recipe], ratios: Sequence[float]) -> list[Cell]:
    """A task's cells: every recipe at every ratio, or at its fixed ratio.

    Recipes that encode with neighbours are also measured at 0, to show the effect of their encoding alone. If answers
    are generated, the question without its context is a cell as well.
    """
    cells: dict[Cell, None] = {}
    for recipe in recipes:
        at = [recipe.ratio] if recipe.fixed else [0.0, *ratios] if recipe.neighbours else [*ratios]
        cells |= dict.fromkeys(Cell(recipe, ratio) for ratio in at)
    return [*cells, *[NO_CONTEXT] * bool(task.metrics)]


def missing(
    subject: Subject, config: WorkerConfig, plan: Sequence[tuple[Task, Sequence[Cell]]], store: Store
) -> Iterator[Job]:
    """Yields jobs for the cells of a plan that the store lacks. plan: tasks, each with its cells."""
    parts: dict[tuple[str, int], list[Part]] = {}
    for task, cells in plan:
        for block in blocks(task):
            lacking = tuple(cell for cell in cells if key(subject, block, cell) not in store)
            if lacking:
                parts.setdefault((task.contexts or task.name, block.start), []).append(Part(block, lacking))
    for together in parts.values():
        yield Job(subject, config, tuple(together))


def run(jobs: Sequence[Job], processes: int, threads: int) -> Iterator[tuple[Job, list[list[Measured]]]]:
    """Runs jobs in `processes` processes of `threads` CPU threads each; yields them as they finish.

    Raises the error of the first job that fails, and OSError if a process ends early.
    """
    # Not forked: a child would inherit locks held by the parent's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start, (threads, os.getpid())) as pool:
        waiting: dict[Future[list[list[Measured]]], Job] = {}
        queue = iter(jobs)
        try:
            while True:
                # One more than processes: no process idles, and few jobs are lost when one fails.
                while len(waiting) <= processes and (job := next(queue, None)) is not None:
                    waiting[pool.submit(_work, job)] = job
                if not waiting:
                    return
                done = wait(waiting, return_when=FIRST_COMPLETED).done
                for future in sorted(done, key=lambda future: future.exception() is not None):
                    yield waiting.pop(future), future.result()
        except BaseException as error:
            # The others' results are not needed any more, and could take half an hour. The pool waits for its
            # processes, in the one thread that may: of two that wait for a process, one never learns that it ended.
            for child in multiprocessing.active_children():
                child.terminate()
            if isinstance(error, BrokenProcessPool):
                lost = "a process ended early: if memory was short, use --processes 1; finished measurements are kept"
                raise OSError(lost) from error
            raise


def _start(threads: int, parent: int) -> None:
    process.share_heaps()
    # Otherwise the processes of an evaluation that is killed keep their memory and finish their jobs for nobody.
    process.end_with_parent(parent=parent)
    import torch

    torch.set_num_threads(threads)


def _work(job: Job) -> list[list[Measured]]:
    bench = _Bench.of(job)
    return [bench.measure(part) for part in job.parts]


class _Bench:
    """A process's model and engine, kept for the next job with the same model."""

    _current: "_Bench | None" = None

    def __init__(self, config: WorkerConfig, chunk_tokens: int) -> None:
        from fusionkv.fusion_worker import models
        from fusionkv.fusion_worker.evaluate.runner import Runner

        self.key = (config, chunk_tokens)
        self._loop = asyncio.new_event_loop()
        model = models.load(config.model, config.device, config.dtype)
        auxiliary = models.load(Path(config.auxiliary), "cpu") if config.auxiliary else None

        async def make() -> Runner:
            return Runner(model, config, chunk_tokens, auxiliary)

        self._runner = self._loop.run_until_complete(make())

    @classmethod
    def of(cls, job: Job) -> "_Bench":
        key = (job.config, job.subject.chunk_tokens)
        if cls._current is None or cls._current.key != key:
            if cls._current is not None:
                cls._current.close()
            cls._current = None  # two models may not fit at the same time
            cls._current = cls(*key)
        return cls._current

    def measure(self, part: Part) -> list[Measured]:
        return self._loop.run_until_complete(self._runner.measure(part.block, part.cells))

    def close(self) -> None:
        self._loop.run_until_complete(self._runner.close())
        self._loop.close()
