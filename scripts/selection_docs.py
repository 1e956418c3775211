"""Prints docs/selection.md with its two tables of scores from build/eval/report.json or another report."""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # `python -P` leaves it out
from quality_docs import ROOT, Rows, metric_of, names, ratios, read, worst

PAGE = ROOT / "docs/selection.md"
TASKS = ("twohop", "chain1", "chain2", "coref", "multivalue")
OURS, RIVAL, BOUNDS = "trace", "prophetkv", ("full_attention", "full_reuse")


def percent(score: float) -> str:
    return f"{100 * score:.1f}".removesuffix(".0")


def lowest(rows: Rows, task: str, recipe: str, r: float) -> float:
    """The worst of all models."""
    row = worst(rows, names(rows, 0), task, recipe, r)
    assert row is not None, f"{recipe} at {r:g} lacks a model on {task}"
    return float(row["score"])


def head(first: str) -> str:
    return f"| {first} | {' | '.join(TASKS)} |"


def of_all_models(rows: Rows) -> Iterator[str]:
    """The bounds; then, at each ratio, the papers' best recipe of each task and ours."""
    yield f"|---|{'---|' * len(TASKS)}"
    for recipe in BOUNDS:
        r = next(r for _, _, name, r, _ in rows if name == recipe)
        yield f"| `{recipe}` | {' | '.join(percent(lowest(rows, task, recipe, r)) for task in TASKS)} |"
    for r in ratios(rows):
        if r == 0:
            continue
        known = {recipe for _, task, recipe, ratio, _ in rows if ratio == r and task in TASKS}
        papers = sorted(known - {OURS, *BOUNDS})
        best = (percent(max(lowest(rows, task, recipe, r) for recipe in papers)) for task in TASKS)
        yield f"| best of the papers for each task, {r:g} | {' | '.join(best)} |"
        yield f"| `{OURS}`, {r:g} | {' | '.join(percent(lowest(rows, task, OURS, r)) for task in TASKS)} |"


def of_each_model(rows: Rows) -> Iterator[str]:
    """Ours and the papers' score that is nearest to what it begins with, at all ratios in one cell."""
    yield f"|---|{'---|' * len(TASKS)}"
    asked = [r for r in ratios(rows) if r > 0]
    for recipe in (OURS, RIVAL):
        for model in names(rows, 0):
            cells = (
                " / ".join(percent(rows[model, task, recipe, r, metric_of(rows, task)]["score"]) for r in asked)
                for task in TASKS
            )
            yield f"| `{recipe}`, `{model}` | {' | '.join(cells)} |"


def page(report: Path) -> str:
    rows = read(report)
    tables = {head("recipe, r"): of_all_models, head("recipe, model"): of_each_model}
    lines: list[str] = []
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        inside = inside and line.startswith("|")
        if inside:
            continue
        lines.append(line)
        if line in tables:
            lines += tables.pop(line)(rows)
            inside = True
    assert not tables, f"{PAGE} lacks the tables {[*tables]}"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/eval/report.json"), end="")
