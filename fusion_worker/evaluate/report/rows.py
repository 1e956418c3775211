"""Turns measurements into rows: a score with its interval for each model, task, recipe, ratio and metric."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from fusionkv.fusion_worker.evaluate import metrics
from fusionkv.fusion_worker.evaluate.data.samples import Task
from fusionkv.fusion_worker.evaluate.report import statistics
from fusionkv.fusion_worker.evaluate.report.cells import NO_CONTEXT, Cell, Measured
from fusionkv.fusion_worker.evaluate.report.statistics import Estimate

_NAMES = {"recomputed": "recomputed_tokens", "stored": "stored_tokens"}
_SHARES = {*metrics.SCORES, *(f"{name}_full" for name in metrics.SCORES), "agreement", "answer_agreement"}
# An answer whose tokens are further from full attention's, in nats in the mean, is counted as wrecked.
_FAR = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """A score. low, high: its 95% interval. None if a score or an interval is undefined."""

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
    """The metric of single answers."""
    return task.metrics[0] if task.metrics else "exact_match"


def judged(task: Task) -> str:
    """The metric by which recipes are judged on a task."""
    return "answer_kl_back" if task.metrics else primary(task)


def rows(model: str, task: Task, table: Mapping[Cell, Measured]) -> Iterator[Row]:
    """Yields all rows of a model on a task: measured metrics, and derived ones:

    normalised_M            share of full reuse's loss in M that the recipe recovers (FusionRAG eq. 11)
    answer_kl_back          1 - answer_kl / full reuse's answer_kl, of the means
    gold_nll_back           share of full reuse's loss of likelihood that the recipe recovers, of the means
    right                   share of questions answered right, by the task's metric
    kept                    share of full attention's right answers that are right
    gained                  share of questions that are answered right, and wrong with full attention
    answer_kl_median, answer_kl_p90, answer_kl_above_1
                            median and 90th percentile of answer_kl, and the share of answers above 1 nat
    answer_same             share of full attention's answers all of whose tokens stay the most likely
    M_minus_full_attention  mean difference by sample
    """
    scored = primary(task)
    full = next((m for c, m in table.items() if c.recipe.lossless and c != NO_CONTEXT), None)
    reuse = next((m for c, m in table.items() if c.recipe.name == "full_reuse"), None)
    for cell, measured in table.items():
        row = partial(_row, model, task.name, cell)
        for name, values in measured.values.items():
            estimate = statistics.mean if name in _SHARES else statistics.average
            yield row(_NAMES.get(name, name), estimate(values))
        for name, share in (*_brought_back(measured, full, reuse), *_answers(task, measured, full)):
            yield row(name, share)
        scores = measured.values[scored]
        if full is None or full is measured:
            continue
        yield row(f"{scored}_minus_full_attention", statistics.difference(scores, full.values[scored]))
        if reuse is not None and reuse is not measured:
            columns = (scores, reuse.values[scored], full.values[scored])
            yield row(f"normalised_{scored}", statistics.bootstrap(_recovered, *columns))


def _brought_back(
    measured: Measured, full: Measured | None, reuse: Measured | None
) -> Iterator[tuple[str, Estimate]]:
    values = measured.values
    if reuse is not None and "answer_kl" in values and "answer_kl" in reuse.values:
        yield "answer_kl_back", statistics.bootstrap(_kl_back, values["answer_kl"], reuse.values["answer_kl"])
    if full is not None and reuse is not None and all("gold_nll" in m.values for m in (measured, full, reuse)):
        columns = [[-nll for nll in m.values["gold_nll"]] for m in (measured, reuse, full)]
        yield "gold_nll_back", statistics.bootstrap(_recovered, *columns)


def _answers(task: Task, measured: Measured, full: Measured | None) -> Iterator[tuple[str, Estimate]]:
    """What became of full attention's right answers, and of the answers that went furthest from it."""
    if kl := measured.values.get("answer_kl"):
        yield "answer_kl_median", statistics.quantile(kl, 0.5)
        yield "answer_kl_p90", statistics.quantile(kl, 0.9)
        yield "answer_kl_above_1", statistics.mean([float(far > _FAR) for far in kl])
    if agreed := measured.values.get("answer_agreement"):
        yield "answer_same", statistics.mean([float(share == 1) for share in agreed])
    if not task.right:
        return
    right = measured.values[task.right]
    yield "right", statistics.mean(right)
    if full is None or full is measured:
        return
    others = full.values[task.right]
    if kept := [mine for mine, other in zip(right, others, strict=True) if other]:
        yield "kept", statistics.mean(kept)
    yield "gained", statistics.mean([mine * (1 - other) for mine, other in zip(right, others, strict=True)])
    yield "right_minus_full_attention", statistics.difference(right, others)


def untested(figures: Iterable[Row]) -> list[Row]:
    """The rows of models that answer a set about as well without its passages: it is no test for them.

    Each is the difference in `right` between the question alone and full attention.
    """
    asked = (row for row in figures if row.recipe == NO_CONTEXT.recipe.name)
    return [r for r in asked if r.metric == "right_minus_full_attention" and r.high is not None and r.high >= 0]


def _kl_back(means: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 - means[0] / means[1]


def _recovered(means: np.ndarray) -> np.ndarray:
    """The share of full reuse's loss that a recipe recovers (FusionRAG eq. 11); nan without a loss.

    means: of the recipe, full reuse and full attention; higher is better.
    """
    lost = means[2] - means[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(lost > 0, (means[0] - means[1]) / lost, np.nan)


def _row(model: str, task: str, cell: Cell, metric: str, estimate: Estimate) -> Row:
    """With six significant digits; None for what is not finite."""
    values = (estimate.score, estimate.low, estimate.high)
    score, low, high = (float(f"{value:.6g}") if math.isfinite(value) else None for value in values)
    return Row(model, task, cell.recipe.name, cell.ratio, metric, score, low, high, estimate.n)
