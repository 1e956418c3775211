"""The demo on a small part of its corpora: every answer is there, and what it reports holds together."""

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.slow]
RECIPES = ("full_attention", "default")


def test_the_demo(root: Path, reference_model: Path, tmp_path: Path) -> None:
    corpora = tmp_path / "corpora"
    questions = json.loads((root / "examples/corpus/questions.json").read_text())
    name = questions[0]["corpus"]
    shutil.copytree(root / "examples/corpus" / name, corpora / name)
    chosen = [question for question in questions if question["corpus"] == name][:3]
    (corpora / "questions.json").write_text(json.dumps(chosen))

    out = tmp_path / "out/demo.json"
    flags = ["--model", reference_model, "--corpora", corpora, "--out", out]
    command = [sys.executable, "-P", root / "examples/demo.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(f.name for f in out.parent.iterdir()) == ["demo.html", "demo.json"], "it leaves no data behind"
    assert "were not computed again" in out.with_suffix(".html").read_text()

    made = json.loads(out.read_text())
    summary, rows = made["summary"], made["rows"]
    assert (summary["model"], summary["questions"]) == (reference_model.name, len(chosen))
    assert len(rows) == len(chosen) * len(RECIPES)
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
            assert counted["recipe"] == "prophetkv+corrected+similarity_guided(10)"
            assert 0 < kinds[2] < counted["context_tokens"]
            assert counted["chunks_missed"] == 0, "its chunks were encoded ahead of time"
