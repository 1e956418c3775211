"""The demo starts everything by itself: its answers are right, and what it reports holds together."""

import json
import shutil
import statistics
from pathlib import Path

import pytest

from tests.commands import run_python

RECIPES = ("full_attention", "default")


@pytest.mark.system
@pytest.mark.slow
def test_the_demo(root: Path, reference_model: Path, tmp_path: Path) -> None:
    corpora = tmp_path / "corpora"
    questions = json.loads((root / "examples/corpus/questions.json").read_text())
    name = questions[0]["corpus"]
    shutil.copytree(root / "examples/corpus" / name, corpora / name)
    chosen = [question for question in questions if question["corpus"] == name][:3]
    (corpora / "questions.json").write_text(json.dumps(chosen))

    out = tmp_path / "out/demo.json"
    flags = ["--model", reference_model, "--corpora", corpora, "--out", out]
    run_python(root / "examples/demo.py", *flags, timeout=560)
    assert sorted(f.name for f in out.parent.iterdir()) == ["demo.html", "demo.json"], "it leaves no data behind"
    assert "were not recomputed" in out.with_suffix(".html").read_text()

    made = json.loads(out.read_text())
    summary, rows = made["summary"], made["rows"]
    assert (summary["model"], summary["questions"]) == (reference_model.name, len(chosen))
    assert len(rows) == len(chosen) * len(RECIPES)
    assert len(made["again"]) == summary["full_attention"]["right"] - summary["kept"]
    full, default = (summary[recipe]["right"] for recipe in RECIPES)
    assert (full, summary["kept"] + summary["gained"]) == (len(chosen), default)
    assert summary["default"]["recipes"] == {"deeplayer+primed+similarity_guided(10)": len(chosen)}
    for recipe in RECIPES:
        own = [row for row in rows if row["recipe"] == recipe]
        assert summary[recipe]["right"] == sum(row["right"] for row in own)
        assert summary[recipe]["ttft_median_s"] == statistics.median(row["summary"]["seconds"]["ttft"] for row in own)
    for row in rows:
        counted, recipe = row["summary"], row["recipe"]
        kinds = [counted[f"tokens_{kind}"] for kind in ("lossless", "reused", "recomputed")]
        assert sum(kinds) == counted["context_tokens"] > 0
        assert 0 < counted["seconds"]["ttft"] <= counted["seconds"]["total"]
        assert row["right"] == any(expected in row["answer"] for expected in row["expected"])
        if recipe == "full_attention":
            assert kinds[2] == counted["context_tokens"]
            assert row["right"]
        else:
            assert counted["recipe"] == "deeplayer+primed+similarity_guided(10)"
            assert 0 < kinds[2] < counted["context_tokens"]
            assert counted["chunks_missed"] == 0, "its chunks were encoded ahead of time"
