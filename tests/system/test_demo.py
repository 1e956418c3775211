"""The demo on a small part of its corpus: every row is there, and what it reports holds together."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.slow]
RECIPES = ("full_attention", "full_reuse", "prophetkv", "default")


def test_the_demo(root: Path, reference_model: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    questions = json.loads((root / "examples/corpus/questions.json").read_text())
    shelf = questions[0]["shelf"]
    shutil.copytree(root / "examples/corpus" / shelf, corpus / shelf)
    chosen = [question for question in questions if question["shelf"] == shelf][:3]
    (corpus / "questions.json").write_text(json.dumps(chosen))

    out = tmp_path / "out/demo.json"
    flags = ["--model", reference_model, "--corpus", corpus, "--out", out]
    command = [sys.executable, "-P", root / "examples/demo.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f.name for f in out.parent.iterdir()] == ["demo.json"], "the demo leaves no data behind"

    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(chosen) * len(RECIPES) * 2
    for row in rows:
        summary, recipe = row["summary"], row["recipe"]
        kinds = [summary[f"tokens_{kind}"] for kind in ("lossless", "reused", "recomputed")]
        assert sum(kinds) == summary["context_tokens"] > 0
        assert summary["recipe"] == ("prophetkv+corrected+similarity_guided(10)" if recipe == "default" else recipe)
        assert 0 < summary["seconds"]["ttft"] <= summary["seconds"]["total"]
        assert row["right"] == (row["answer"] == row["expected"])
        if recipe == "full_attention":
            assert kinds[2] == summary["context_tokens"]
            assert row["right"]
        if recipe == "full_reuse":
            assert kinds[2] == 0
        if recipe == "default":
            assert 0 < kinds[2] < summary["context_tokens"]
            assert summary["chunks_missed"] == 0, "its chunks were encoded ahead of time"
