"""The report: a self-contained HTML page of tables, tables for a terminal, and advice."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment
from rich.table import Table

from fusionkv.fusion_worker.evaluate.metrics import SCORES
from fusionkv.fusion_worker.evaluate.report.cells import NO_CONTEXT
from fusionkv.fusion_worker.evaluate.report.rows import Row, untested

# Metrics in nats; all others are shares, or differences of shares.
_IN_NATS = {"answer_kl", "answer_kl_median", "answer_kl_p90", "gold_nll"}
# Recipes between which all others lie.
_ENDS = ("full_attention", "full_reuse")
# Right answers of full attention from which a recipe is advised.
_LEAST = 12
# The ratio of the first table, or the measured one closest to it.
_RATIO = 0.15
_COSTS = ("encoded_tokens_per_chunk", "stored_tokens", "recomputed_tokens", "scored_rows")
# Columns of a model's answers to a set in a terminal, and their titles.
_COLUMNS = {
    "right": "right",
    "kept": "kept",
    "gained": "gained",
    "f1": "F1",
    "rouge_l_full": "ROUGE-L",
    "entities_full": "entities",
    "entities": "gold\nentities",
    "answer_kl": "KL",
    "answer_kl_median": "KL median",
    "answer_kl_p90": "KL p90",
    "answer_kl_above_1": "KL > 1",
}
# Metrics of generated answers, besides those of their text.
_ANSWERS = (
    *(name for name in _COLUMNS if name not in SCORES),
    *("answer_kl_back", "answer_agreement", "gold_nll", "gold_nll_back"),
)


class Figures:
    """Rows by model, task, recipe, ratio and metric."""

    def __init__(self, rows: Iterable[Row], judged: Mapping[str, str]) -> None:
        """judged: the main metric of each task."""
        self.judged = judged
        self.by = {(row.model, row.task, row.recipe, row.r, row.metric): row for row in rows}
        self.models = list(dict.fromkeys(model for model, *_ in self.by))
        self.tasks = list(dict.fromkeys(task for _, task, *_ in self.by))
        self.recipes = list(dict.fromkeys(recipe for _, _, recipe, *_ in self.by))
        self.ratios = sorted({r for _, _, recipe, r, _ in self.by if recipe not in _ENDS})
        """Ratios of recipes other than full attention and full reuse."""
        self.middle = min(self.ratios, key=lambda r: abs(r - _RATIO), default=_RATIO)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Columns of the first table: every task's main metric, and others if that is about distributions.

        These are right and kept answers, or a text metric where answers are not counted.
        """
        columns = []
        for task in self.tasks:
            known = self.metrics(task)
            texts = [name for name in known if name in SCORES and name != self.judged[task]]
            counted = [name for name in ("right", "kept") if name in known]
            beside = (counted or texts[:1]) if self.judged[task] in _ANSWERS else []
            columns += [(task, name) for name in (self.judged[task], *beside)]
        return columns

    def metrics(self, task: str) -> list[str]:
        return list(dict.fromkeys(name for _, t, _, _, name in self.by if t == task))

    def answers(self, model: str, task: str) -> tuple[list[str], list[tuple[str, float, list[str]]]]:
        """Names of all metrics of generated answers, and their values by recipe and ratio; empty for other tasks."""
        known = self.metrics(task)
        names = [name for name in (*_ANSWERS, *SCORES) if name in known] if "gold_nll" in known else []
        cells = dict.fromkeys((recipe, r) for m, t, recipe, r, _ in self.by if (m, t) == (model, task))
        rows = [(recipe, r, [self.by.get((model, task, recipe, r, name)) for name in names]) for recipe, r in cells]
        return names, [(recipe, r, [_shown(row) if row else "" for row in found]) for recipe, r, found in rows]

    def worst(self, task: str, recipe: str, r: float, metric: str) -> Row | None:
        """The lowest score over the models; None unless all have one."""
        rows = [self.by.get((model, task, recipe, r, metric)) for model in self.models]
        known = [row for row in rows if row is not None and row.score is not None]
        return min(known, key=lambda row: row.score or 0.0) if len(known) == len(rows) else None

    def cost(self, recipe: str, r: float, metric: str) -> float | None:
        """A cost's mean over models and tasks."""
        costs = [
            row.score
            for (_, _, name, ratio, what), row in self.by.items()
            if (name, ratio, what) == (recipe, r, metric) and row.score is not None
        ]
        return sum(costs) / len(costs) if costs else None

    def table(self, r: float) -> list[tuple[str, float, list[Row | None]]]:
        """Each recipe, its ratio (or fixed ratio), and its worst row in every column."""
        lines = []
        for recipe in self.recipes:
            known = {ratio for _, _, name, ratio, _ in self.by if name == recipe}
            at = r if r in known else next(iter(known)) if len(known) == 1 else None
            if at is not None:
                worst = [self.worst(task, recipe, at, name) for task, name in self.columns]
                lines.append((recipe, at, worst))
        return lines


def page(rows: Sequence[Row], judged: Mapping[str, str]) -> str:
    """The report as HTML."""
    figures = Figures(rows, judged)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    )
    return template.render(
        figures=figures,
        ratios=sorted(figures.ratios, key=lambda r: r != figures.middle),
        costs=_COSTS,
        remarks=[*warnings(figures), *advice(figures)],
        n=sorted({row.n for row in rows if row.metric in judged.values()}),
    )


def _shown(row: Row) -> str:
    """A score in percent or in nats with its interval, as "81.2 (77.6 to 84.4)"."""
    scale, digits = (1, 3) if row.metric in _IN_NATS else (100, 1)
    score, low, high = ("" if x is None else f"{scale * x:.{digits}f}" for x in (row.score, row.low, row.high))
    return f"{score} ({low} to {high})" if low and high else score


def tables(rows: Sequence[Row], judged: Mapping[str, str]) -> Iterator[Table | str]:
    """Yields the tables of the middle ratio for a terminal, the sets that are no test for a model, and advice.

    Answers that are counted have a table for each model and set; the worst case over the models is one table.
    """
    figures = Figures(rows, judged)
    counted = [task for task in figures.tasks if "right" in figures.metrics(task)]
    yield from (_answers(figures, model, task) for model in figures.models for task in counted)
    if len(figures.models) > 1 or len(counted) < len(figures.tasks):
        yield summary(figures)
    yield from warnings(figures)
    yield from advice(figures)


def advice(figures: Figures) -> Iterator[str]:
    """A sentence for each model: the recipe that keeps most of full attention's right answers, if they were counted.

    Sets that are no test for the model do not count. Of equals, the recipe with the lowest ratio.
    """
    no_test = {(row.model, row.task) for row in untested(figures.by.values())}
    for model in figures.models:
        kept = [
            row
            for row in figures.by.values()
            if row.model == model and row.metric == "kept" and (model, row.task) not in no_test
            if row.recipe not in ("full_attention", NO_CONTEXT.recipe.name)
        ]
        if not kept:
            continue
        right = sum({row.task: row.n for row in kept}.values())
        by_cell: dict[tuple[str, float], list[Row]] = {}
        for row in kept:
            by_cell.setdefault((row.recipe, row.r), []).append(row)
        held = {cell: sum(round((row.score or 0.0) * row.n) for row in rows) for cell, rows in by_cell.items()}
        (recipe, ratio), most = min(held.items(), key=lambda item: (-item[1], item[0][1]))
        if right < _LEAST:
            yield f"{model} has {right} right answers with full attention: too few to advise on a recipe"
        else:
            yield f"for {model}, use {recipe} at {ratio:g}: it keeps {most} of full attention's {right} right answers"


def warnings(figures: Figures) -> list[str]:
    """A sentence for each model and set that is no test for it."""
    sentences = []
    for row in untested(figures.by.values()):
        cells = (("full_attention", 1.0), (row.recipe, row.r))
        full, bare = (figures.by[row.model, row.task, *cell, "right"].score or 0.0 for cell in cells)
        low, high = (-100 * bound for bound in (row.high or 0.0, row.low or 0.0))
        sentences.append(
            f"{row.model} on {row.task}: this set is no test for this model. It answers {full:.0%} of the questions "
            f"right with their passages, and {bare:.0%} without (difference in points, 95%: {low:.0f} to {high:.0f})"
        )
    return sentences


def _answers(figures: Figures, model: str, task: str) -> Table:
    by = {(recipe, r, name): row for (m, t, recipe, r, name), row in figures.by.items() if (m, t) == (model, task)}
    known = {name for *_, name in by}
    columns = [name for name in _COLUMNS if name in known]
    n = max(row.n for row in by.values())
    title = f"{model} on {task}, {n} questions: KL in nats, the rest in %, with 95% intervals"
    table = Table(title=title, box=None, pad_edge=False)
    for title in ("recipe", "r", *(_COLUMNS[name] for name in columns)):
        table.add_column(title, justify="left" if title == "recipe" else "right", overflow="fold")
    for recipe, r, _ in figures.table(figures.middle):
        cells = (by.get((recipe, r, name)) for name in columns)
        table.add_row(recipe, f"{r:g}", *("" if row is None else _stacked(row) for row in cells))
    return table


def _stacked(row: Row) -> str:
    """A score, and its interval in the next line."""
    scale, digits = (1, 2) if row.metric in _IN_NATS else (100, 0)
    score, low, high = ("" if x is None else f"{scale * x:.{digits}f}" for x in (row.score, row.low, row.high))
    return f"{score}\n[dim]{low}..{high}[/dim]" if low else score


def summary(figures: Figures) -> Table:
    """The worst case over the models, at the middle ratio."""
    table = Table(title=f"worst case over {len(figures.models)} models, %", box=None, pad_edge=False)
    titles = []
    for task, name in figures.columns:
        short = task.removeprefix("cacheblend/")
        titles.append(short if name == figures.judged[task] != "answer_kl_back" else f"{short}\n{name}")
    for name in ("recipe", "r", *titles):
        # Folded, not cut: recipes may differ in their last modifier.
        table.add_column(name, justify="left" if name == "recipe" else "right", overflow="fold")
    for recipe, r, cells in figures.table(figures.middle):
        scores = ["" if row is None or row.score is None else f"{100 * row.score:.1f}" for row in cells]
        table.add_row(recipe, f"{r:g}", *scores)
    return table


def worst(rows: Sequence[Row], judged: Mapping[str, str]) -> list[dict[str, Any]]:
    """The same table as data: recipe, ratio, score by task, and further metrics by task.

    Scores are None if a model has none.
    """
    figures = Figures(rows, judged)
    lines = []
    for recipe, r, cells in figures.table(figures.middle):
        scores, beside = dict[str, float | None](), dict[str, dict[str, float | None]]()
        for (task, name), row in zip(figures.columns, cells, strict=True):
            score = None if row is None else row.score
            if name == judged[task]:
                scores[task] = score
            else:
                beside.setdefault(task, {})[name] = score
        lines.append({"recipe": recipe, "r": r, "scores": scores, "beside": beside})
    return lines
