"""`fusionkv eval` as a person starts it: figures, a second run that measures nothing, own files, plain errors."""

import json
from pathlib import Path

import pytest

from tests.commands import fusionkv

pytestmark = [pytest.mark.system, pytest.mark.slow]
FIELDS = ["model", "task", "recipe", "r", "metric", "score", "low", "high", "n"]


def rows(out: Path) -> dict[tuple[str, str, float, str], dict[str, object]]:
    found = json.loads((out / "report.json").read_text())
    assert all(list(row) == FIELDS for row in found)
    return {(row["task"], row["recipe"], row["r"], row["metric"]): row for row in found}


def test_measured_once_and_reported_again(reference_model: Path, tmp_path: Path) -> None:
    asked = ("eval", reference_model, "--out", tmp_path, "--n", 27, "--tasks", "twohop", "single")
    fusionkv(*asked, "--recipes", "deeplayer", "--ratios", 0.1, 0.2, "--processes", 2, timeout=300)
    found = rows(tmp_path)
    full = found["twohop", "full_attention", 1.0, "exact_match"]
    reuse = found["twohop", "full_reuse", 0.0, "exact_match"]
    some = found["twohop", "deeplayer", 0.2, "exact_match"]
    assert (full["model"], full["n"]) == (reference_model.name, 27)
    assert reuse["score"] < some["score"] <= full["score"]  # type: ignore[operator]
    assert found["twohop", "deeplayer", 0.1, "recomputed_tokens"]["n"] == 27
    # Where full reuse loses nothing, one ratio is enough.
    assert {r for task, recipe, r, _ in found if (task, recipe) == ("single", "deeplayer")} == {0.1}
    kept = (tmp_path / "cells.jsonl").read_bytes()
    assert len(kept.splitlines()) == 2 * (2 + 2) + 2 * (2 + 1)
    again = fusionkv(*asked, "--recipes", "deeplayer", "epic", "--ratios", 0.1, 0.2, "--json", timeout=300)
    said = json.loads(again.stdout)
    assert Path(said["reports"]["json"]) == tmp_path / "report.json"
    assert Path(said["reports"]["html"]).is_file()
    more = (tmp_path / "cells.jsonl").read_bytes()
    assert more.startswith(kept)
    assert {json.loads(line)["recipe"] for line in more[len(kept) :].splitlines()} == {"epic"}
    after = rows(tmp_path)
    assert [(line["recipe"], line["r"]) for line in said["worst"]] == [
        *(("full_attention", 1.0), ("full_reuse", 0.0), ("deeplayer", 0.1), ("epic", 0.1))
    ]
    assert said["worst"][1]["scores"]["twohop"] == reuse["score"]
    assert {name: after[name] for name in found} == found
    assert "epic" in (tmp_path / "report.html").read_text()


def test_files_of_the_papers_formats(reference_model: Path, tmp_path: Path) -> None:
    pages = ["Report Balban. The code of Dorfek is 123. The lake is wide.", "Report Balban. Ada owns the lamp."]
    asked, data = "Report Balban: code of Dorfek?", tmp_path / "data"
    data.mkdir()
    blend = {"ctxs": [{"title": "", "text": p} for p in pages], "question": asked, "answers": ["123"]}
    (data / "pages.json").write_text(json.dumps([blend] * 2))
    (data / "hard.json").write_text(json.dumps([{**blend, "answers": ["an answer that no model gives"]}]))
    context = "\n".join(pages * 4)
    ruler = {"input": f"Answer.\n{context}\nQuestion: {asked}", "outputs": ["1", "2"], "answer_prefix": "\nAnswer:"}
    (data / "niah_x.jsonl").write_text(json.dumps(ruler) + "\n")
    story = {"context": context, "input": asked, "answers": ["123"], "dataset": "hotpotqa"}
    (data / "hotpotqa.jsonl").write_text(json.dumps(story) + "\n")
    (data / "prompts.json").write_text("{}")
    flags = ("--recipes", "cacheblend", "--ratios", 0.2, "--chunk-tokens", 48, "--processes", 1)
    done = fusionkv("eval", reference_model, "--out", tmp_path, "--data", data, *flags, timeout=300)
    found = rows(tmp_path)
    assert "left out: " in done.stderr
    metrics = {
        "cacheblend/pages": ("f1", 2),
        "ruler/niah_x": ("string_match_all", 1),
        "longbench/hotpotqa": ("f1", 1),
    }
    for task, (metric, n) in metrics.items():
        for recipe, r in (("full_attention", 1.0), ("full_reuse", 0.0), ("cacheblend", 0.2)):
            row = found[task, recipe, r, metric]
            assert row["n"] == n
            assert 0.0 <= row["score"] <= 1.0  # type: ignore[operator]
    # Right answers are those that contain an expected one; kept ones are right with the recipe too.
    full, some = (("cacheblend/pages", *cell) for cell in (("full_attention", 1.0), ("cacheblend", 0.2)))
    assert found[*full, "right"]["score"] == found[*full, "contains"]["score"] == 1.0
    assert found[*some, "kept"]["score"] == found[*some, "contains"]["score"]
    # Where no answer is right with the passages, nothing shows that they help.
    no_test = f"{reference_model.name} on cacheblend/hard: this set is no test for this model"
    for text in (done.stderr, (tmp_path / "report.html").read_text()):
        assert no_test in " ".join(text.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--auxiliary", "nowhere"], "nowhere is no model: give the directory of a Hugging Face model"),
        (["--recipes", "magic"], "unknown recipe 'magic'"),
        (["--recipes", "cache_craft+versions"], "cache_craft+versions reuses KV of earlier questions"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl: can't be read"),
        (["--n", "2", "--tasks", "single", "--pool-bytes", "2MiB", "--processes", "1"], "raise pool_bytes to"),
    ],
)
def test_an_error_is_one_line(flags: list[str], message: str, reference_model: Path, tmp_path: Path) -> None:
    done = fusionkv("eval", reference_model, "--out", tmp_path, *flags, status=1)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("fusionkv eval: ")
    assert message in done.stderr
