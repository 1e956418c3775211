"""The quality page's tables are the report's figures."""

import json
import subprocess
import sys
from pathlib import Path


def test_tables_hold_the_worst_model_and_keep_the_text(root: Path, tmp_path: Path) -> None:
    def row(model: str, recipe: str, r: float, metric: str, score: float) -> dict[str, object]:
        return {"model": model, "task": "chain2", "recipe": recipe, "r": r, "metric": metric} | {
            "score": score,
            "low": score - 0.1,
            "high": score + 0.1,
            "n": 500,
        }

    rows = [
        row(model, recipe, r, "exact_match", score + (model == "b") * 0.05)
        for model in ("a", "b")
        for recipe, r, score in (("full_reuse", 0.0, 0.1), ("epic", 0.1, 0.2), ("epic", 0.15, 0.3))
    ]
    rows += [row("a", "epic", 0.15, "recomputed_tokens", 46.0), row("b", "epic", 0.15, "recomputed_tokens", 48.0)]
    report = tmp_path / "report.json"
    report.write_text(json.dumps(rows))
    argv = [sys.executable, "-P", root / "scripts/quality_docs.py", report]
    page = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    text, heading, tables = page.partition("## Tables\n")
    assert (root / "docs/quality.md").read_text().startswith(text + heading)
    assert "500 samples a cell" in tables
    assert tables.index("Worst case over `a`, `b`") < tables.index("### `a`") < tables.index("### `b`")
    assert "| `epic` | 0.15 | 30.0 (20-40) |\n" in tables
    assert tables.count("| `epic` | 0.1 | 20.0 (10-30) |\n") == 2  # the worst case, and model a
    assert "| `epic` | 0.1 | 25.0 (15-35) |\n" in tables
    assert "| `epic` | 0.15 | 47 |  |  |  |\n" in tables
