"""What tests measure of a model, by the runner of an evaluation."""

import asyncio
from collections.abc import Sequence

from fusionkv.bench.quality.data.samples import Block, Task
from fusionkv.bench.quality.report.cells import Cell, Measured
from fusionkv.bench.quality.runner import Runner
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.recipes import modifiers


def cells(*asked: tuple[str, float]) -> list[Cell]:
    return [Cell(modifiers.find(name), r) for name, r in asked]


def measure(
    model: Model,
    task: Task,
    asked: Sequence[Cell],
    timed: bool = True,
    picture: bool = False,
    pool_bytes: int = 64 << 20,
    auxiliary: Model | None = None,
) -> dict[Cell, Measured]:
    async def run() -> list[Measured]:
        runner = Runner(model, WorkerConfig(pool_bytes=pool_bytes), 512, auxiliary)
        try:
            return await runner.measure(Block(task, 0, len(task.samples)), asked, timed, picture)
        finally:
            await runner.close()

    return dict(zip(asked, asyncio.run(run()), strict=True))
