"""The command that measures the README's table, and the table that it prints."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fusionkv.bench import table
from fusionkv.fusion_worker.quality.verdict import PRIMED
from tests.commands import run_python

HEAD = "| smollm2, 2 cores of Xeon (AMX) | full attention | full reuse | the default |"


def load(name: str, *p99: float) -> list[dict[str, Any]]:
    """Rows at 0.5, 1 and 2 questions a second, under a bound of 4 s."""
    return [
        {"name": name, "requests_per_s": rate, "ttft_p99_s": late, "bound_s": 4.0, "context": 2269}
        for rate, late in zip((0.5, 1.0, 2.0), p99, strict=False)
    ]


def record() -> dict[str, Any]:
    first = [
        {"name": name, "context": context, "baseline_s": baseline, "value_s": value}
        for context, runs in ((1280, ((1.9, 0.16), (2.0, 0.5))), (2274, ((3.3, 0.2), (3.25, 0.81))))
        for (name, _), (baseline, value) in zip(table.RECIPES[1:], runs, strict=True)
    ]
    scores = {
        ("full_attention", "f1"): (0.4, 0.2),
        ("full_reuse", "f1"): (0.2, 0.1),
        (PRIMED.recipe, "f1"): (0.3, 0.21),
        ("full_reuse", "answer_kl_back"): (0.0, 0.0),
        (PRIMED.recipe, "answer_kl_back"): (0.7, 0.8),
        (PRIMED.recipe, "gold_nll_back"): (0.9, None),
    }
    quality = [
        {"recipe": recipe, "metric": metric, "task": task, "score": score, "n": 25}
        for (recipe, metric), of in scores.items()
        for task, score in zip(("hotpotqa", "nq"), of, strict=True)
    ]
    about = {"command": "python -m x", "commit": "abc123", "processor": "2 cores of Xeon (AMX)", "model": "smollm2"}
    parts = {"first": first, "load full_attention": load("full_attention", 5.0), "quality": quality}
    parts["load full_reuse"] = load("full_reuse", 1.0, 2.0, 6.0)
    parts[f"load {PRIMED.recipe}"] = load(PRIMED.recipe, 1.0, 2.0, 3.0)
    return {"about": about, "date": "2026-11-25", "parts": parts}


def test_the_table() -> None:
    head, _, computed, *rows, _, caption = table.markdown(record()).splitlines()
    assert head == HEAD
    assert computed.endswith("| all | none | 20% |")
    assert [row.strip("| ").split(" | ") for row in rows] == [
        # Full attention's time is that beside the default.
        ["seconds to the first token, 1,280 tokens of context", "2.00", "0.16", "0.50"],
        ["seconds to the first token, 2,274 tokens of context", "3.25", "0.20", "0.81"],
        ["questions a second at the same p99, 2,269 tokens of context", "0.40", "1.50", "at least 2.00"],
        ["quality recovered, by KL divergence", "100%", "0%", "75% (70 to 80)"],
        ["quality recovered, by the likelihood of the right answer", "100%", "0%", "90%"],
        ["F1 of the answers, relative", "100%", "50% (50 to 50)", "85% (75 to 105)"],
    ]
    for part in ("`python -m x`, 2026-11-25, commit abc123.", "p99 of", "4.0 s", "2 files with 25 questions"):
        assert part in caption


@pytest.mark.long
@pytest.mark.slow
def test_all_parts_once_and_not_again(root: Path, reference_model: Path, tmp_path: Path) -> None:
    passages = [f"The colour of Name{number} is {number}. It is old and well known." for number in range(40)]
    samples = [
        {
            "question": f"What is the colour of Name{number}?",
            "answers": [str(number)],
            "ctxs": [{"title": f"Name{n}", "text": passages[n]} for n in range(number, number + 20)],
        }
        for number in range(20)
    ]
    (tmp_path / "qa.json").write_text(json.dumps(samples))
    sizes = ["--contexts", "512", "--repeats", "1", "--base", "36", "--chunks", "3", "--requests", "4", "--n", "2"]
    command = ["-m", "fusionkv.bench.table", "--model", reference_model, "--data", tmp_path / "qa.json", *sizes]
    done = [
        run_python(*command, "--json", tmp_path / "table.json", env={"OMP_NUM_THREADS": "1"}, timeout=600)
        for _ in range(2)
    ]
    first, again = done
    assert first.stderr.count("minutes") >= 5
    assert "part" not in again.stderr
    assert first.stdout == again.stdout
    assert "seconds to the first token" in first.stdout
    known = json.loads((tmp_path / "table.json").read_text())
    assert known["about"]["command"].count("--data qa.json ") == 1
    assert sys.executable not in first.stdout
