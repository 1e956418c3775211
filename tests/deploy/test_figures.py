"""Every headline figure in the README and docs/ is that of a table in docs/benchmarks/, and the same everywhere."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

Rows = list[dict[str, str]]
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("performance", "comparison", "vllm", "quality")))
# What is so many times sooner or faster, in prose; times of kernels and of storage are in tables of their own pages.
CLAIMS = re.compile(r"([\d.]+)(?: to ([\d.]+))? times\s+(?:sooner|over|as\s+fast|for\s+FusionKV)")
# torch's attention beside the worker's, of docs/benchmarks/gpu.csv.
OTHER_CLAIMS = {"1.7"}


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
            seconds(rows["first-token"], machine, r) for r in ("full attention", "full reuse", recipe)
        )
        assert full.keys() == reuse.keys() == own.keys()
        return [(n, full[n], reuse[n], own[n], ratio(full[n], own[n])) for n in full]

    def written(found: Rows, own: str) -> list[tuple[str, ...]]:
        rest = [[value for title, value in row.items() if title != "AMX"] for row in found]
        titles = [title for title in found[0] if title != "AMX"]
        keep = [
            at for at, title in enumerate(titles) if own in title or not ("default" in title or "prophet" in title)
        ]
        return [tuple(row[at] for at in keep) for row in rest]

    plain, amx = expected("two cores without AMX", "default"), expected("two cores with AMX", "prophetkv")
    assert written(table(root / "README.md", "| tokens of passages | full"), "default") == plain
    page = table(root / "docs/performance.md", "| context | AMX |")
    assert written([row for row in page if row["AMX"] == "no"], "default") == plain
    assert written([row for row in page if row["AMX"] == "yes"], "prophetkv") == amx
    gpu = table(root / "docs/performance.md", "| context | full attention | full reuse")
    assert written(gpu, "prophetkv") == expected("H100", "prophetkv")


def test_answers(root: Path, rows: dict[str, Rows]) -> None:
    """Each model's table, and their sums in the README and in prose."""
    answers = rows["answers"]
    for name, first in (
        ("SmolLM2", "| 48 questions, SmolLM2"),
        ("Gemma", "| 48 questions, Gemma"),
        ("Qwen", "| 36 "),
    ):
        mine = [row for row in answers if row["model"].startswith(name)]
        for written, row in zip(table(root / "docs/quality.md", first), mine, strict=False):
            title, *values = written.values()
            kept = f"{row['kept']}; {row['gained']}" if row["gained"] else row["kept"]
            kl = f"{row['kl_mean']}, {row['kl_median']}" if row["kl_median"] else row["kl_mean"]
            assert title.replace("`", "") == row["recipe"]
            assert values == [kept, row["f1"], kl, row["off"], row["same"]]
    total: dict[str, Sequence[Any]] = {}
    for recipe in ("full attention", "full_reuse, 0", "prophetkv, 0.2", "deeplayer+primed, 0.2: the default"):
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
    assert f"F1 is {default[1]} with the default and {full[1]} with full attention" in prose
    assert f"and {default[2]} stay the same" in prose
    smol = {row["recipe"]: row for row in answers if row["model"].startswith("SmolLM2")}
    own, worst = smol["deeplayer+primed, 0.2: the default"]["kl_mean"], smol["full_reuse, 0"]["kl_mean"]
    back = f"the default, at 20%, {100 * (1 - float(own) / float(worst)):.0f}% in"
    assert back in " ".join((root / "docs/comparison.md").read_text().split())


def test_vllm(root: Path, rows: dict[str, Rows]) -> None:
    cases = ("cold", "same order", "other order", "other neighbours")
    base, *ours = rows["vllm"]
    found = {row[""]: row for row in table(root / "docs/vllm.md", "| | cold |")}
    assert [found[base["system"]][case] for case in cases] == [base[case] for case in cases]
    for row in ours:
        assert [found[row["system"]][case] for case in cases] == [
            f"{row[case]}, {ratio(base[case], row[case])}x" for case in cases
        ]


def test_what_is_claimed_follows_from_the_tables(root: Path, rows: dict[str, Rows]) -> None:
    base, *ours = rows["vllm"]
    known = {ratio(row["cold"], row["other order"]) for row in ours} | OTHER_CLAIMS
    known |= {ratio(base[case], row[case]) for row in ours for case in ("cold", "other order", "other neighbours")}
    known |= {ratio(row["same order"], base["same order"]) for row in ours}
    first = rows["first-token"]
    for machine, recipe in {(row["machine"], row["recipe"]) for row in first}:
        full, own = seconds(first, machine, "full attention"), seconds(first, machine, recipe)
        known |= {ratio(full[context], own[context]) for context in own}
    said = {
        (page, number)
        for page in PAGES
        for match in CLAIMS.finditer((root / page).read_text())
        for number in match.groups()
        if number
    }
    assert {page for page, _ in said} >= {"docs/comparison.md", "docs/vllm.md"}
    assert {claim for claim in said if claim[1] not in known} == set()
