"""Prints docs/journal/quality.md: its text up to the heading "Tables", followed by the tables of a report."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/journal/quality.md"
HEADING = "## Tables\n"
# Metrics of answers, most preferred first; a task's table shows the first one that was measured.
JUDGED = (
    *("exact_match", "f1", "rouge_l", "string_match_all", "string_match_part", "number_match"),
    *("class_match", "code_similarity"),
)
# Only counts: the report's seconds vary by a factor of four with other load on the machine.
COSTS = ("recomputed_tokens", "scored_rows")
DEVIATION = "kv_deviation_layer_"
Rows = dict[tuple[str, str, str, float, str], dict[str, Any]]


def names(rows: Rows, place: int) -> list[Any]:
    """Distinct values of one part of the rows' keys, in order."""
    return list(dict.fromkeys(key[place] for key in rows))


def metric_of(rows: Rows, task: str) -> str:
    known = {key[4] for key in rows if key[1] == task}
    return next(metric for metric in JUDGED if metric in known)


def worst(rows: Rows, models: list[str], task: str, recipe: str, r: float) -> dict[str, Any] | None:
    """The lowest score over the models, None unless all have one."""
    found = [rows.get((model, task, recipe, r, metric_of(rows, task))) for model in models]
    known = [row for row in found if row is not None]
    return min(known, key=lambda row: float(row["score"])) if len(known) == len(models) else None


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    low, high = (f"{100 * row[name]:.0f}" for name in ("low", "high"))
    return f"{100 * row['score']:.1f} ({low}-{high})"


def ratios(rows: Rows) -> list[float]:
    """The ratios of recipes that were measured at several ratios."""
    several = {(recipe, r) for _, _, recipe, r, _ in rows}
    open_ = {recipe for recipe in names(rows, 2) if sum(name == recipe for name, _ in several) > 1}
    return sorted({r for recipe, r in several if recipe in open_})


def recipes_at(rows: Rows, r: float) -> Iterator[tuple[str, float]]:
    """Yields recipes that were measured at a ratio, and those that have a single ratio."""
    for recipe in names(rows, 2):
        known = {ratio for _, _, name, ratio, _ in rows if name == recipe}
        if r in known or len(known) == 1:
            yield recipe, r if r in known else next(iter(known))


def head(columns: list[str]) -> str:
    return f"| recipe | r | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}\n"


def table(rows: Rows, models: list[str], r: float) -> Iterator[str]:
    tasks = names(rows, 1)
    yield head(tasks)
    for recipe, at in recipes_at(rows, r):
        cells = " | ".join(cell(worst(rows, models, task, recipe, at)) for task in tasks)
        yield f"| `{recipe}` | {at:g} | {cells} |\n"


def costs(rows: Rows, r: float) -> Iterator[str]:
    yield head([name.replace("_", " ") for name in COSTS])
    for recipe, at in recipes_at(rows, r):
        means = []
        for cost in COSTS:
            found = [row["score"] for k, row in rows.items() if k[2:] == (recipe, at, cost)]
            means.append(f"{sum(found) / len(found):.4g}" if found else "")
        yield f"| `{recipe}` | {at:g} | {' | '.join(means)} |\n"


def against_full(rows: Rows, r: float) -> Iterator[str]:
    """Yields the agreement of first tokens with full attention and the KL divergence, of the worst model by task."""
    tasks = names(rows, 1)
    yield head(tasks)
    for recipe, at in recipes_at(rows, r):
        cells = []
        for task in tasks:
            agreed, away = (
                [row["score"] for k, row in rows.items() if k[1:] == (task, recipe, at, metric)]
                for metric in ("agreement", "kl")
            )
            cells.append(f"{100 * min(agreed):.1f}; {max(away):.2g}" if agreed and away else "")
        yield f"| `{recipe}` | {at:g} | {' | '.join(cells)} |\n"


def deviations(rows: Rows) -> Iterator[str]:
    """Yields the deviation of reused KV from full attention by layer: means over tasks, of the worst model."""
    layers = sorted({int(key[4].removeprefix(DEVIATION)) for key in rows if key[4].startswith(DEVIATION)})
    yield f"| recipe | {' | '.join(f'layer {layer}' for layer in layers)} |\n|---|{'---|' * len(layers)}\n"
    for recipe in names(rows, 2):
        cells = []
        for layer in layers:
            found: dict[str, list[float]] = {}
            for (model, _, name, _, metric), row in rows.items():
                if (name, metric) == (recipe, f"{DEVIATION}{layer}"):
                    found.setdefault(model, []).append(row["score"])
            cells.append(f"{max(sum(v) / len(v) for v in found.values()):.3f}" if found else "")
        if any(cells):
            yield f"| `{recipe}` | {' | '.join(cells)} |\n"


def read(report: Path) -> Rows:
    return {
        (row["model"], row["task"], row["recipe"], row["r"], row["metric"]): row
        for row in json.loads(report.read_text(encoding="utf-8"))
    }


def page(report: Path) -> str:
    rows = read(report)
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    models, parts = names(rows, 0), [before, HEADING]
    sizes = sorted({row["n"] for key, row in rows.items() if key[4] == metric_of(rows, key[1])})
    parts.append(f"\nPercent, with the interval of 95%; {' to '.join(map(str, sizes))} samples a cell.\n")
    middle = min(ratios(rows), key=lambda r: abs(r - 0.15))
    groups = [(f"`{model}`", [model], ratios(rows)) for model in models]
    if len(models) > 1:
        # Then each model is shown at one ratio: the report has the others.
        worst_of = "Worst case over " + ", ".join(f"`{m}`" for m in models)
        groups = [(worst_of, models, ratios(rows)), *((title, group, [middle]) for title, group, _ in groups)]
    for title, group, asked in groups:
        parts.append(f"\n### {title}\n")
        for r in asked:
            parts += [f"\nr = {r:g}\n\n", *table(rows, group, r)]
    parts += ["\n### Cost, mean over models and tasks\n\n", *costs(rows, middle)]
    parts += ["\n### Against full attention\n\nFirst tokens that are full attention's, in percent; KL of the first "]
    parts += ["token's distribution from full attention's, in nats. The lowest and the highest over the models.\n\n"]
    parts += against_full(rows, middle)
    parts += [
        "\n### KV deviation by layer, r = 0\n\nRelative L2 of reused keys and values against full attention's: "
    ]
    parts += ["mean over the tasks, of the model that is furthest off in the layer.\n\n", *deviations(rows)]
    return "".join(parts)


if __name__ == "__main__":
    print(page(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/eval/report.json"), end="")
