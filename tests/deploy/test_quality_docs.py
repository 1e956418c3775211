"""The tables of the page on quality are the report's figures."""

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
    rows += [row(m, "epic", 0.15, "prefill_seconds", 0.5) for m in "ab"]
    rows += [row("a", "epic", 0.15, "agreement", 0.75), row("b", "epic", 0.15, "agreement", 0.5)]
    rows += [row("a", "epic", 0.15, "kl", 0.25), row("b", "epic", 0.15, "kl", 0.125)]
    rows += [row("a", "full_reuse", 0.0, f"kv_deviation_layer_{n}", n / 8) for n in range(11)]
    rows += [row("b", "full_reuse", 0.0, f"kv_deviation_layer_{n}", 0.5) for n in range(3)]
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
    cost, _, rest = tables.partition("### Cost")[2].partition("### Against full attention")
    assert "| `epic` | 0.15 | 47 |  |\n" in cost
    assert "seconds" not in tables, "they depend on what else ran"
    against, _, away = rest.partition("### KV deviation by layer")
    assert "| `epic` | 0.15 | 50.0; 0.25 |\n" in against
    assert "| layer 9 | layer 10 |\n" in away
    assert "| `full_reuse` | 0.500 | 0.500 | 0.500 | 0.375 |" in away
    assert "epic" not in away
