"""Every headline figure in the README and docs/ is that of a table in docs/benchmarks/, and the same everywhere."""

import csv
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fusionkv.bench.services.vllm import CASES, Row
from fusionkv.fusion_worker.evaluate.data.samples import Task
from fusionkv.fusion_worker.evaluate.report import rows as report
from fusionkv.fusion_worker.evaluate.report.cells import Cell, Measured
from fusionkv.fusion_worker.quality.verdict import PRIMED
from fusionkv.protos.contract.recipes import find_recipe
from tests.commands import run_python

Rows = list[dict[str, str]]
DEFAULT = f"{PRIMED.recipe}, {PRIMED.ratio:g}"
MODELS = {
    "smollm2": "| 120 questions, S",
    "gemma3-270m": "| 48 questions, G",
    "qwen2.5-0.5b": "| 360 questions, Q",
    "qwen2.5-1.5b": "| 48 questions, Q",
}
SYSTEMS = {
    "vllm prefix cache": "vLLM's prefix cache",
    "fusionkv in vllm": "FusionKV, vLLM decodes",
    "fusionkv inside vllm": "FusionKV inside vLLM",
    "fusionkv": "FusionKV alone",
}
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("performance", "comparison", "vllm", "quality")))
# What is so many times sooner or faster, in prose; times of kernels and of storage are in tables of their own pages.
CLAIMS = re.compile(r"([\d.]+)(?: to ([\d.]+))? times\s+(?:sooner|over|as\s+fast|for\s+FusionKV)")
# torch's attention beside the worker's, of docs/benchmarks/gpu.csv.
OTHER_CLAIMS = {"1.7"}
# A number, but no part of a word, an address, a date or a version of three parts.
NUMBER = re.compile(r"(?<![\w.,/@=:-])\d+(?:,\d{3})*(?:\.\d+)?%?(?!\w|[.:-]\d)")
UNMEASURED = {"configuration", "methods", "kernels", "structure", "security", "upgrading"}
# Versions, settings, thresholds, sizes of workloads, and the seconds that a GPU is expected to take.
GIVEN = {"3.11", "20.10", "0.17", "0.31", "0.32", "0.33", "95%", "90%", "0.1", "0.2", "0.3", "0.6", "15%", "20%"}
GIVEN |= {"1.8", "3.5", "0.08", "0.10", "0.13", "0.14", "0.58", "1.4", "10", "12", "16", "40", "128", "140", "512"}
GIVEN |= {"5.6", "1,000", "2,300", "2,600", "32,000"}


@pytest.fixture(scope="module")
def rows(root: Path) -> dict[str, Rows]:
    names = ("first-token", "answers", "vllm")
    return {name: [*csv.DictReader((root / f"docs/benchmarks/{name}.csv").open())] for name in names}


def table(page: Path, first: str) -> Rows:
    """The first table whose header begins so, by the titles of its columns."""
    below = page.read_text()[page.read_text().index(f"\n{first}") :]
    lines = re.match(r"\n((?:\|.*\n)+)", below)
    assert lines
    titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[1].splitlines())
    return [dict(zip(titles, row, strict=True)) for row in rows]


def seconds(rows: Rows, machine: str, recipe: str) -> dict[str, str]:
    """By context, as written."""
    return {f"{int(r['context']):,}": r["seconds"] for r in rows if r["machine"] == machine and r["recipe"] == recipe}


def ratio(slow: str, fast: str) -> str:
    return f"{float(slow) / float(fast):.1f}"


def test_times_to_the_first_token(root: Path, rows: dict[str, Rows]) -> None:
    def expected(machine: str, recipe: str) -> list[tuple[str, ...]]:
        full, reuse, own = (
            seconds(rows["first-token"], machine, r) for r in ("full_attention", "full_reuse", recipe)
        )
        assert full.keys() == reuse.keys() == own.keys()
        return [(n, full[n], reuse[n], own[n], ratio(full[n], own[n])) for n in full]

    def written(found: Rows) -> list[tuple[str, ...]]:
        return [tuple(value for title, value in row.items() if title != "AMX") for row in found]

    plain, amx = (expected(f"2 cores {kind} AMX", PRIMED.recipe) for kind in ("without", "with"))
    assert written(table(root / "README.md", "| tokens of passages | full")) == plain
    page = table(root / "docs/performance.md", "| context | AMX |")
    assert written([row for row in page if row["AMX"] == "no"]) == plain
    assert written([row for row in page if row["AMX"] == "yes"]) == amx
    gpu = table(root / "docs/performance.md", "| context | full attention | full reuse")
    assert written(gpu) == expected("NVIDIA H100 80GB HBM3", "prophetkv")


def test_answers(root: Path, rows: dict[str, Rows]) -> None:
    """Each model's table, and their sums in the README and in prose."""
    answers = rows["answers"]
    for row in answers:
        row["recipe"] += f", {row['ratio']}"
    for model, first in MODELS.items():
        mine = [row for row in answers if row["model"] == model]
        shown = [each for each in table(root / "docs/quality.md", first) if "no passages" not in each.values()]
        assert len(shown) >= 4
        for written, row in zip(shown, mine, strict=False):
            title, *values = written.values()
            kept = f"{row['kept']}; {row['gained']}" if row["gained"] else row["kept"]
            said = title.replace("`", "").removesuffix(": the default").replace("full attention", "full_attention, 1")
            assert said == row["recipe"]
            assert values == [kept, row["f1"], row["kl_mean"], row["off"], row["same"]]
    total: dict[str, Sequence[Any]] = {}
    for recipe in ("full_attention, 1", "full_reuse, 0", "prophetkv, 0.2", DEFAULT):
        mine = [row for row in answers if row["recipe"] == recipe]
        questions = sum(int(row["questions"]) for row in mine)
        f1 = sum(float(row["f1"]) * int(row["questions"]) for row in mine) / questions
        total[recipe] = (sum(int(r["kept"]) for r in mine), f"{f1:.1f}", sum(int(r["same"]) for r in mine))
    full, reuse, prophet, default = total.values()
    assert [tuple(row.values())[1:] for row in table(root / "README.md", "| | full attention | full reuse")] == [
        tuple(map(str, each)) for each in zip(full, reuse, default, strict=True)
    ]
    prose = " ".join((root / "docs/quality.md").read_text().split())
    assert f"keeps {default[0]} of {full[0]} right answers" in prose
    assert f"`prophetkv` at 0.2 keeps {prophet[0]}, and full reuse {reuse[0]}" in prose
    right = sum(int(r["kept"]) + int(r["gained"]) for r in answers if r["recipe"] == DEFAULT)
    assert f"with those gained, the default answers {right} right" in prose
    assert f"F1 is {default[1]} with the default and {full[1]} with full attention" in prose
    assert f"and {default[2]} stay the same" in prose


def by_machine(rows: Rows) -> list[Rows]:
    return [[*group] for _, group in itertools.groupby(rows, key=lambda row: row["machine"])]


def test_vllm(root: Path, rows: dict[str, Rows]) -> None:
    groups = by_machine(rows["vllm"])
    assert len(groups) == 2
    for base, *ours in groups:
        kind = base["machine"].removeprefix("2 cores ")
        found = {row[kind]: row for row in table(root / "docs/vllm.md", f"| {kind} | cold |")}
        assert [found[SYSTEMS[base["system"]]][case] for case in CASES] == [base[case] for case in CASES]
        for row in ours:
            assert [found[SYSTEMS[row["system"]]][case] for case in CASES] == [
                f"{row[case]}, {ratio(base[case], row[case])}x" for case in CASES
            ]


def derived(rows: dict[str, Rows]) -> set[str]:
    """Ratios of the times in the tables, and sums of the answers over all models."""
    known = set(OTHER_CLAIMS)
    for base, *ours in by_machine(rows["vllm"]):
        known |= {ratio(row["cold"], row["other order"]) for row in ours}
        known |= {
            ratio(base[case], row[case]) for row in ours for case in ("cold", "other order", "other neighbours")
        }
        known |= {ratio(row["same order"], base["same order"]) for row in ours}
    first = rows["first-token"]
    for machine, recipe in {(row["machine"], row["recipe"]) for row in first}:
        full, own = seconds(first, machine, "full_attention"), seconds(first, machine, recipe)
        known |= {ratio(full[context], own[context]) for context in own}
    for recipe, at in {(row["recipe"], row["ratio"]) for row in rows["answers"]}:
        mine = [row for row in rows["answers"] if (row["recipe"], row["ratio"]) == (recipe, at)]
        known |= {str(sum(int(row[of]) for row in mine)) for of in ("questions", "kept", "same")}
        known.add(str(sum(int(row["kept"]) + int(row["gained"] or 0) for row in mine)))
        f1 = sum(float(row["f1"]) * int(row["questions"]) for row in mine)
        known.add(f"{f1 / sum(int(row['questions']) for row in mine):.1f}")
    return known


def test_what_is_claimed_follows_from_the_tables(root: Path, rows: dict[str, Rows]) -> None:
    known = derived(rows)
    said = {
        (page, number)
        for page in PAGES
        for match in CLAIMS.finditer((root / page).read_text())
        for number in match.groups()
        if number
    }
    assert {page for page, _ in said} >= {"docs/comparison.md", "docs/vllm.md"}
    assert {claim for claim in said if claim[1] not in known} == set()


def prose(page: Path) -> list[tuple[str, str]]:
    """Paragraphs and items of a page without code, tables and pictures; each with the pages that it links to."""
    text = re.sub(r"^```.*?^```|^    .*?$|^\|.*?$|<picture>.*?</picture>", "", page.read_text(), flags=re.M | re.S)
    found = []
    for part in re.split(r"\n\s*\n|\n(?=- )", text):
        linked = [page.parent / link for link in re.findall(r"\]\(([^)#:]+\.md)", part)]
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)|\d{4}-\d\d-\d\d", "", part)
        found.append((plain, "".join(file.read_text() for file in linked)))
    return found


def test_every_figure_in_prose_is_in_a_table(root: Path, rows: dict[str, Rows]) -> None:
    """One of its page or of docs/benchmarks/, or is on a page that its paragraph links to; else in single.csv."""
    known_everywhere = GIVEN | derived(rows)
    measured = {*PAGES, "docs/reliability.md"}
    tables = "".join((root / f"docs/benchmarks/{n}.csv").read_text() for n in ("first-token", "answers", "vllm"))
    single = {(row["page"], row["figure"]) for row in csv.DictReader((root / "docs/benchmarks/single.csv").open())}
    used, wrong = set(), []
    for page in (root / "README.md", *sorted(root.glob("docs/*.md"))):
        if page.stem in UNMEASURED:
            continue
        own = "\n".join(line for line in page.read_text().splitlines() if line.startswith("|"))
        whole = str(page.relative_to(root)) in measured
        for text, linked in prose(page):
            for number in NUMBER.findall(text):
                if len(number) == 1 or not (whole or "." in number or "%" in number):
                    continue
                if (page.stem, number) in single:
                    used.add((page.stem, number))
                elif number not in known_everywhere and not any(
                    re.search(rf"(?<![\d.,]){re.escape(number.rstrip('%'))}(?![\d]|[.,]\d)", known)
                    for known in (own, tables, linked)
                ):
                    wrong.append(f"{page.name}: {number} in {' '.join(text.split())[:100]}")
    assert wrong == []
    assert single - used == set(), "these are on no page"


def test_the_last_runs_replace_their_rows_and_no_others(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs/benchmarks"
    folder.mkdir(parents=True)
    before = {name: (root / f"docs/benchmarks/{name}.csv").read_text() for name in ("first-token", "vllm", "answers")}
    for name, text in before.items():
        (folder / f"{name}.csv").write_text(text)
    machine = {"machine": "2 cores without AMX", "model": "smollm2"}
    timed = [
        {**machine, "name": name, "r": r, "context": 1395, "baseline_s": baseline, "value_s": value}
        for name, r, baseline, value in (("full_reuse", 0.0, 5.0, 0.25), (PRIMED.recipe, 0.2, 4.0, 1.25))
    ]
    there = {"machine": "a GPU", "model": "shape-7b", "name": "full_reuse", "r": 0.0, "context": 4096}
    on_gpu = [{**there, "baseline_s": 0.14, "value_s": 0.05}]
    beside = [machine | asdict(Row("fusionkv", case, 0.5, [0.5], 0.75, 1)) for case in CASES]
    values = {"contains": [1.0, 1.0, 0.0, 0.0], "f1": [1.0, 0.5, 0.0, 0.25], "answer_kl": [0.0] * 4}
    full = Measured(values | {"answer_agreement": [1.0] * 4})
    own = {"contains": [1.0, 0.0, 1.0, 0.0], "answer_kl": [0.0, 2.0, 0.1, 0.1]}
    cells = {
        Cell(find_recipe("full_attention"), 1.0): full,
        Cell(find_recipe("prophetkv"), 0.2): Measured(values | own | {"answer_agreement": [1.0, 0.5, 1.0, 1.0]}),
    }
    task = Task("hotpotqa", (), ("f1", "contains"), right="contains")
    answers = [*report.rows("smollm2", task, cells), *report.rows("other", replace(task, right=""), cells)]
    for name, rows in (
        ("bench/ttft.json", timed),
        ("bench/gpu/ttft.json", on_gpu),
        ("bench/vllm.json", beside),
        ("answers/report.json", [asdict(row) for row in answers]),
    ):
        (tmp_path / "build" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "build" / name).write_text(json.dumps(rows))
        os.utime(tmp_path / "build" / name, (0, 0))
    kernels = (root / "docs/benchmarks/gpu.csv").read_text()
    (folder / "gpu.csv").write_text(kernels)
    columns, known, *_ = kernels.splitlines()
    (tmp_path / "build/bench/gpu/gpu.csv").write_text(f"{columns}\n{known}\nnew\n")
    for _ in range(2):
        run_python("-m", "fusionkv.bench.published", "--root", tmp_path)
    assert (folder / "gpu.csv").read_text() == f"{kernels}new\n"
    after = {name: (folder / f"{name}.csv").read_text().splitlines() for name in before}
    assert after["first-token"][1:4] == [
        "1970-01-01,2 cores without AMX,smollm2,full_attention,1,1395,4.00",
        "1970-01-01,2 cores without AMX,smollm2,full_reuse,0,1395,0.250",
        "1970-01-01,2 cores without AMX,smollm2,deeplayer+primed,0.2,1395,1.25",
    ]
    assert after["first-token"][4:6] == [
        "1970-01-01,a GPU,shape-7b,full_attention,1,4096,0.140",
        "1970-01-01,a GPU,shape-7b,full_reuse,0,4096,0.0500",
    ]
    assert after["vllm"][1] == "1970-01-01,2 cores without AMX,smollm2,fusionkv,0.50,0.50,0.50,0.50"
    assert after["vllm"][2:] == [line for line in before["vllm"].splitlines() if ",2 cores with AMX," in line]
    assert after["answers"][1:3] == [
        "1970-01-01,smollm2,4,full_attention,1,2,,43.8,0,0,4",
        "1970-01-01,smollm2,4,prophetkv,0.2,1,1,43.8,0.550,1,3",
    ]
    for name, key in (("first-token", "2 cores without AMX,smollm2"), ("answers", ",smollm2,")):
        assert after[name][0] == before[name].splitlines()[0]
        rest = [line for line in before[name].splitlines()[1:] if key not in line]
        assert len(rest) > 5
        assert after[name][-len(rest) :] == rest
