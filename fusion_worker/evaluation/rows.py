"""From measurements to rows: one score with its interval for every model, task, recipe, ratio and metric."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fusionkv.fusion_worker.evaluation import metrics, statistics
from fusionkv.fusion_worker.evaluation.cells import Cell, Measured
from fusionkv.fusion_worker.evaluation.samples import Task
from fusionkv.fusion_worker.evaluation.statistics import Estimate

_NAMES = {"recomputed": "recomputed_tokens", "stored": "stored_tokens"}
_SHARES = {*metrics.TEXT_METRICS, metrics.class_match.__name__, "agreement"}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. low, high: its interval of 95%; None where a score or an interval is not defined."""

    model: str
    task: str
    recipe: str
    r: float
    metric: str
    score: float | None
    low: float | None
    high: float | None
    n: int


def primary(task: Task) -> str:
    """The metric that the task is judged by."""
    return task.metrics[0] if task.metrics else "exact_match"


def rows(model: str, task: Task, table: Mapping[Cell, Measured]) -> Iterator[Row]:
    """All rows of a model on a task. Beside what was measured:

    normalised_M            share of what full reuse lost in M that the recipe brings back (FusionRAG eq. 11)
    M_minus_full_attention  mean difference sample by sample
    M_minus_best            the same to the best other recipe at the same ratio
    """
    judged = primary(task)
    full = next((m for c, m in table.items() if c.recipe.lossless), None)
    reuse = next((m for c, m in table.items() if c.recipe.name == "full_reuse"), None)
    for cell, measured in table.items():
        row = partial(_row, model, task.name, cell)
        for name, values in measured.values.items():
            estimate = statistics.mean if name in _SHARES else statistics.average
            yield row(_NAMES.get(name, name), estimate(values))
        for name, values in measured.seconds.items():
            yield row(f"{name}_seconds", statistics.average(values))
        own = measured.values[judged]
        if full is None or full is measured:
            continue
        yield row(f"{judged}_minus_full_attention", statistics.difference(own, full.values[judged]))
        if reuse is not None and reuse is not measured:
            columns = (own, reuse.values[judged], full.values[judged])
            yield row(f"normalised_{judged}", statistics.bootstrap(_normalised, *columns))
        if others := _rivals(cell, judged, table):
            best = max(others, key=lambda values: math.fsum(values))
            yield row(f"{judged}_minus_best", statistics.difference(own, best))


def _rivals(cell: Cell, judged: str, table: Mapping[Cell, Measured]) -> list[Sequence[float]]:
    if cell.recipe.fixed:
        return []
    rivals = [(c, m) for c, m in table.items() if c.ratio == cell.ratio and not c.recipe.fixed]
    return [m.values[judged] for c, m in rivals if c.recipe.name != cell.recipe.name]


def _normalised(means: np.ndarray) -> np.ndarray:
    return np.vectorize(metrics.normalised)(means[0], means[1], means[2])


def _row(model: str, task: str, cell: Cell, metric: str, estimate: Estimate) -> Row:
    score, low, high = (_known(value) for value in (estimate.score, estimate.low, estimate.high))
    return Row(model, task, cell.recipe.name, cell.ratio, metric, score, low, high, estimate.n)


def _known(value: float) -> float | None:
    """Six digits, which is more than any of these figures means."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
