"""Prints docs/quality.md: its text up to the heading "Tables", then tables from build/eval/report.json or another."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/quality.md"
HEADING = "## Tables\n"
# What answers are judged by, best first; a task has the first of these that was measured on it.
JUDGED = ("exact_match", "f1", "rouge_l", "string_match_all", "string_match_part", "number_match")
COSTS = ("recomputed_tokens", "scored_rows", "select_seconds", "prefill_seconds")
Rows = dict[tuple[str, str, str, float, str], dict[str, Any]]


def names(rows: Rows, place: int) -> list[Any]:
    """Different values of one part of the rows' keys, in their order."""
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
    """Those at which recipes that leave the ratio open were asked."""
    several = {(recipe, r) for _, _, recipe, r, _ in rows}
    open_ = {recipe for recipe in names(rows, 2) if sum(name == recipe for name, _ in several) > 1}
    return sorted({r for recipe, r in several if recipe in open_})


def table(rows: Rows, models: list[str], r: float) -> Iterator[str]:
    tasks = names(rows, 1)
    yield f"| recipe | r | {' | '.join(tasks)} |\n|---|---|{'---|' * len(tasks)}\n"
    for recipe in names(rows, 2):
        known = {ratio for _, _, name, ratio, _ in rows if name == recipe}
        at = r if r in known else next(iter(known)) if len(known) == 1 else None
        if at is not None:
            cells = " | ".join(cell(worst(rows, models, task, recipe, at)) for task in tasks)
            yield f"| `{recipe}` | {at:g} | {cells} |\n"


def costs(rows: Rows, r: float) -> Iterator[str]:
    yield f"| recipe | r | {' | '.join(name.replace('_', ' ') for name in COSTS)} |\n|---|---|{'---|' * len(COSTS)}\n"
    for recipe in names(rows, 2):
        known = {ratio for _, _, name, ratio, _ in rows if name == recipe}
        at = r if r in known else next(iter(known)) if len(known) == 1 else None
        if at is not None:
            means = []
            for cost in COSTS:
                found = [row["score"] for k, row in rows.items() if k[2:] == (recipe, at, cost)]
                means.append(f"{sum(found) / len(found):.4g}" if found else "")
            yield f"| `{recipe}` | {at:g} | {' | '.join(means)} |\n"


def page(report: Path) -> str:
    rows: Rows = {
        (row["model"], row["task"], row["recipe"], row["r"], row["metric"]): row
        for row in json.loads(report.read_text(encoding="utf-8"))
    }
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    models, parts = names(rows, 0), [before, HEADING]
    sizes = sorted({row["n"] for key, row in rows.items() if key[4] == metric_of(rows, key[1])})
    parts.append(f"\nPercent, with the interval of 95%; {' to '.join(map(str, sizes))} samples a cell.\n")
    groups = [("Worst case over " + ", ".join(f"`{m}`" for m in models), models)] if len(models) > 1 else []
    for title, group in [*groups, *((f"`{model}`", [model]) for model in models)]:
        parts.append(f"\n### {title}\n")
        for r in ratios(rows):
            parts += [f"\nr = {r:g}\n\n", *table(rows, group, r)]
    middle = min(ratios(rows), key=lambda r: abs(r - 0.15))
    parts += ["\n### Cost, mean over models and tasks\n\n", *costs(rows, middle)]
    return "".join(parts)


if __name__ == "__main__":
    print(page(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/eval/report.json"), end="")
