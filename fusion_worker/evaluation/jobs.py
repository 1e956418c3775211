"""The work of an evaluation, cut into jobs for a few processes: a block of samples of a task, under a model."""

import asyncio
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.evaluation.cells import Cell, Measured, Store, Subject, key
from fusionkv.fusion_worker.evaluation.samples import Block, Task
from fusionkv.fusion_worker.methods.recipes import Recipe

# Samples of a job: what an interrupted run loses at most, for each process.
BLOCK = 20


@dataclass(frozen=True, slots=True)
class Job:
    """Cells that are to be measured over a block. picture: whether what was chosen in its first sample is kept."""

    subject: Subject
    config: WorkerConfig
    block: Block
    cells: tuple[Cell, ...]

    @property
    def picture(self) -> bool:
        return self.block.start == 0


def cells_of(task: Task, recipes: Sequence[Recipe], ratios: Sequence[float]) -> list[Cell]:
    """A task's cells: every recipe at every ratio, those that fix it at their own.

    A recipe that encodes otherwise than alone is asked at 0 as well: what its encoding brings without recomputing.
    """
    found: dict[Cell, None] = {}
    for recipe in recipes:
        wanted = [recipe.ratio] if recipe.fixed else [0.0, *ratios] if recipe.neighbours else [*ratios]
        found |= dict.fromkeys(Cell(recipe, ratio) for ratio in wanted)
    return list(found)


def missing(subject: Subject, config: WorkerConfig, task: Task, cells: Sequence[Cell], store: Store) -> Iterator[Job]:
    """Jobs for what the store lacks."""
    for block in task.blocks(BLOCK):
        lacking = tuple(cell for cell in cells if key(subject, block, cell) not in store)
        if lacking:
            yield Job(subject, config, block, lacking)


def run(jobs: Sequence[Job], processes: int, threads: int) -> Iterator[tuple[Job, list[Measured]]]:
    """Does the jobs in `processes` processes of `threads` CPU threads each; yields them as they are done.

    Raises what the first job that fails raises.
    """
    # Not forked: a child would take over locks that the parent's threads hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start, (threads,)) as pool:
        waiting: dict[Future[list[Measured]], Job] = {}
        queue = iter(jobs)
        try:
            while True:
                # One more than there are processes: none waits for its next job, and few are lost when one fails.
                while len(waiting) <= processes and (job := next(queue, None)) is not None:
                    waiting[pool.submit(_work, job)] = job
                if not waiting:
                    return
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _work(job: Job) -> list[Measured]:
    return _Bench.of(job).measure(job)


class _Bench:
    """A process's model and engine, kept from job to job while the model stays the same."""

    _current: "_Bench | None" = None

    def __init__(self, config: WorkerConfig, chunk_tokens: int) -> None:
        from fusionkv.fusion_worker import models
        from fusionkv.fusion_worker.evaluation.runner import Runner

        self.key = (config, chunk_tokens)
        self._loop = asyncio.new_event_loop()
        model = models.load(config.model, config.device, config.dtype)

        async def make() -> Runner:
            return Runner(model, config, chunk_tokens)

        self._runner = self._loop.run_until_complete(make())

    @classmethod
    def of(cls, job: Job) -> "_Bench":
        wanted = (job.config, job.subject.chunk_tokens)
        if cls._current is None or cls._current.key != wanted:
            if cls._current is not None:
                cls._current.close()
            cls._current = None  # two models at once may not fit
            cls._current = cls(*wanted)
        return cls._current

    def measure(self, job: Job) -> list[Measured]:
        return self._loop.run_until_complete(self._runner.measure(job.block, job.cells, job.picture))

    def close(self) -> None:
        self._loop.run_until_complete(self._runner.close())
        self._loop.close()


def shipped() -> list[Path]:
    """The directories of the models that come with the project."""
    folders = Path(str(resources.files("fusionkv.models")))
    return sorted(file.parent for file in folders.glob("*/config.json"))
