"""Rows of two made-up models, worked out by hand, and a report that holds all of them and needs nothing else."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from fusionkv.fusion_worker.evaluate.data.samples import Sample, Task
from fusionkv.fusion_worker.evaluate.report import report, statistics
from fusionkv.fusion_worker.evaluate.report.cells import NO_CONTEXT, Cell, Measured
from fusionkv.fusion_worker.evaluate.report.rows import Row, _recovered, judged, rows, untested
from fusionkv.protos.contract.recipes import find_recipe
from tests.pages import Page

TASK = Task("chain2", (Sample("", ("p",), "q", ("a",)),) * 8)
BY = {"chain2": "exact_match"}
HARD = '<b>"1" & 2</b>'


def exact(*right: int) -> list[float]:
    return [float(i in right) for i in range(8)]


def cell(name: str, r: float) -> Cell:
    return Cell(find_recipe(name), r)


def measured(right: list[float], tokens: float) -> Measured:
    return Measured({"exact_match": right, "recomputed": [tokens] * 8, "scored_rows": [16.0] * 8})


def table(shift: int) -> dict[Cell, Measured]:
    return {
        cell("full_attention", 1.0): measured(exact(*range(8)), 100),
        cell("full_reuse", 0.0): measured(exact(0), 0),
        cell("epic", 0.15): measured(exact(0, 1), 15),
        cell("prophetkv", 0.15): measured(exact(*range(6 - shift)), 15),
        cell("prophetkv", 0.2): measured(exact(*range(7 - shift)), 20),
    }


@pytest.fixture
def figures() -> list[Row]:
    return [row for shift, model in enumerate(("a", "b")) for row in rows(model, TASK, table(shift))]


def find(figures: list[Row], model: str, recipe: str, r: float, metric: str) -> Row:
    (row,) = (x for x in figures if (x.model, x.recipe, x.r, x.metric) == (model, recipe, r, metric))
    return row


def test_scores_differences_and_shares_brought_back(figures: list[Row]) -> None:
    exact_match = find(figures, "a", "prophetkv", 0.15, "exact_match")
    assert (exact_match.task, exact_match.score, exact_match.n) == ("chain2", 0.75, 8)
    assert (exact_match.low, exact_match.high) == pytest.approx((0.409, 0.929), abs=1e-3)
    assert find(figures, "a", "prophetkv", 0.15, "exact_match_minus_full_attention").score == -0.25
    assert find(figures, "b", "prophetkv", 0.15, "normalised_exact_match").score == pytest.approx(4 / 7, abs=1e-6)
    tokens = find(figures, "a", "prophetkv", 0.2, "recomputed_tokens")
    assert (tokens.score, tokens.low, tokens.high) == (20.0, 20.0, 20.0)
    # Full reuse brings nothing back of what it lost itself.
    assert ("full_reuse", "normalised_exact_match") not in {(r.recipe, r.metric) for r in figures}


def test_the_share_brought_back() -> None:
    """The first is FusionRAG's own example; full reuse lost nothing in the last two."""
    means = np.array([(0.781, 0.712, 0.852), (0.6, 0.7, 0.8), (0.9, 0.9, 0.9), (0.8, 0.9, 0.7)])
    np.testing.assert_allclose(_recovered(means.T), [0.492, -1.0, math.nan, math.nan], atol=1e-3)


def test_where_nothing_was_lost_nothing_is_brought_back() -> None:
    same = {c: measured(exact(0, 1), 0) for c in (*table(0),)}
    row = find(list(rows("a", TASK, same)), "a", "epic", 0.15, "normalised_exact_match")
    assert (row.score, row.low, row.high) == (None, None, None)


DATA = Task("qa", TASK.samples, ("f1", "exact_match"), 8)
KL = {"full_attention": [0.0] * 4, "full_reuse": [0.4, 0.2, 0.1, 0.1], "epic": [0.1, 0.1, 0.1, 0.1]}
NLL = {"full_attention": [1.0, 2.0, 1.0, 2.0], "full_reuse": [3.0, 4.0, 3.0, 2.0], "epic": [2.0, 3.0, 2.0, 2.0]}


def answers() -> dict[Cell, Measured]:
    found = {}
    for at in (cell("full_attention", 1.0), cell("full_reuse", 0.0), cell("epic", 0.15)):
        name = at.recipe.name
        texts = {"f1": [0.5, 0.0, 1.0, 0.5], "exact_match": [0.0, 0.0, 1.0, 0.0]}
        found[at] = Measured({"gold_nll": NLL[name], "answer_kl": KL[name], "answer_agreement": [1.0] * 4, **texts})
    bare = {"gold_nll": [5.0] * 4, "f1": [0.0] * 4, "exact_match": [0.0] * 4}
    return {**found, NO_CONTEXT: Measured(bare)}


def test_what_comes_back_is_a_ratio_of_means() -> None:
    figures = list(rows("a", DATA, answers()))
    back = find(figures, "a", "epic", 0.15, "answer_kl_back")
    assert back.score == pytest.approx(1 - 0.1 / 0.2)
    assert find(figures, "a", "epic", 0.15, "gold_nll_back").score == pytest.approx(0.75 / 1.5)
    assert find(figures, "a", "no_context", 0.0, "gold_nll_back").score == pytest.approx((3 - 5) / 1.5, rel=1e-5)
    for name, r, score in (("full_attention", 1.0, 1.0), ("full_reuse", 0.0, 0.0)):
        for metric in ("answer_kl_back", "gold_nll_back"):
            end = find(figures, "a", name, r, metric)
            assert (end.score, end.low, end.high, end.n) == (score, score, score, 4)
    absent = {(row.recipe, row.metric) for row in figures}
    assert not {("no_context", name) for name in ("answer_kl", "answer_kl_back", "agreement")} & absent
    assert find(figures, "a", "epic", 0.15, "f1_minus_full_attention").score == 0.0
    gained = answers()
    gained[cell("full_reuse", 0.0)].values["gold_nll"] = [0.5] * 4  # type: ignore[index]
    row = find(list(rows("a", DATA, gained)), "a", "epic", 0.15, "gold_nll_back")
    assert (row.score, row.low, row.high) == (None, None, None)


def test_a_data_task_is_judged_by_what_comes_back_and_f1_stands_beside() -> None:
    figures, by = list(rows("a", DATA, answers())), {"qa": judged(DATA)}
    assert by == {"qa": "answer_kl_back"}
    lines = {line["recipe"]: line for line in report.worst(figures, by)}
    assert lines["epic"] == {"recipe": "epic", "r": 0.15, "scores": {"qa": 0.5}, "beside": {"qa": {"f1": 0.5}}}
    assert (lines["no_context"]["scores"], lines["no_context"]["beside"]) == ({"qa": None}, {"qa": {"f1": 0.0}})
    out = StringIO()
    Console(file=out, width=100).print(*report.tables(figures, by))
    assert re.search(r"answer_kl_back +f1\n", out.getvalue())
    assert re.search(r"epic +0.15 +50.0 +50.0", out.getvalue())
    narrow = StringIO()
    Console(file=narrow, width=24).print(*report.tables(figures, by))
    assert "…" not in narrow.getvalue(), "names that differ at their ends stay apart"
    page = re.sub(r"<[^>]*>|\s+", " ", report.page(figures, by))
    assert re.search(r"a on qa: answers", page)
    values = r"0\.100 \(0\.100 to 0\.100\) +0\.100 \(.*?\) +0\.100 \(.*?\) +0\.0 \(.*?\) +50\.0 \(.*?\) +100\.0 "
    assert re.search(rf"epic +0\.15 +{values}", page)


COUNTED = Task("qa", TASK.samples, ("exact_match",), 8, right="exact_match")


def counted(bare: list[float]) -> dict[Cell, Measured]:
    """Full attention has six of eight questions right, the recipe five: four of those, and one more."""
    found = {
        cell("full_attention", 1.0): Measured({"exact_match": exact(0, 1, 2, 3, 4, 5), "answer_kl": [0.0] * 8}),
        cell("epic", 0.15): Measured(
            {"exact_match": exact(0, 1, 2, 3, 6), "answer_kl": [0.3, 0.0, 2.0, 0.1, 0.4, 0.2, 1.0, 0.5]}
        ),
    }
    return {**found, NO_CONTEXT: Measured({"exact_match": bare})}


def test_right_answers_that_were_kept_and_gained_and_the_worst_ones() -> None:
    figures = list(rows("a", COUNTED, counted(exact())))
    by = {row.metric: row for row in figures if row.recipe == "epic"}
    scores = {"right": 5 / 8, "kept": 4 / 6, "gained": 1 / 8, "right_minus_full_attention": -1 / 8}
    # Sorted: 0, 0.1, 0.2, 0.3, 0.4, 0.5, 1, 2; the 90th percentile is 0.3 of the way from 1 to 2.
    scores |= {"answer_kl": 4.5 / 8, "answer_kl_median": 0.35, "answer_kl_p90": 1.3, "answer_kl_above_1": 1 / 8}
    assert {name: by[name].score for name in scores} == pytest.approx(scores, abs=1e-6)
    assert (by["kept"].n, by["gained"].n) == (6, 8)
    wilson = statistics.wilson(4, 6)
    assert (by["kept"].low, by["kept"].high) == pytest.approx((wilson.low, wilson.high), abs=1e-6)
    own = {row.metric for row in figures if row.recipe == "full_attention"}
    assert "right" in own
    assert not {"kept", "gained"} & own
    nothing = {**counted(exact()), cell("full_attention", 1.0): Measured({"exact_match": exact()})}
    assert {row.metric for row in rows("a", COUNTED, nothing)} >= {"right", "gained"}
    assert "kept" not in {row.metric for row in rows("a", COUNTED, nothing)}, "there was nothing to keep"


def test_answers_are_one_table_for_a_model_and_a_set() -> None:
    figures, by = list(rows("a", COUNTED, counted(exact()))), {"qa": judged(COUNTED)}
    out = StringIO()
    for shown in report.tables(figures, by):
        Console(file=out, width=140).print(shown)
    assert "a on qa, 8 questions" in out.getvalue()
    assert re.search(r"right +kept +gained +KL +KL median +KL p90 +KL > 1 *\n", out.getvalue())
    assert re.search(r"epic +0\.15 +62 +67 +12 +0\.56 +0\.35 +1\.30 +12 *\n", out.getvalue())
    assert "worst case" not in out.getvalue(), "which would say the same"
    several = [*figures, *rows("b", COUNTED, counted(exact()))]
    (line,) = (line for line in report.worst(several, by) if line["recipe"] == "epic")
    assert line["beside"] == {"qa": {"right": 0.625, "kept": pytest.approx(2 / 3, abs=1e-6)}}
    assert any("worst case over 2 models" in str(shown.title) for shown in report.tables(several, by))  # type: ignore[union-attr]


@pytest.mark.parametrize(("bare", "test"), [((), True), ((0, 1, 2, 3), False), (range(8), False)])
def test_a_set_that_a_model_answers_without_passages_is_no_test(bare: list[int], test: bool) -> None:
    figures, by = list(rows("a", COUNTED, counted(exact(*bare)))), {"qa": judged(COUNTED)}
    assert [(row.model, row.task) for row in untested(figures)] == [] if test else [("a", "qa")]
    *_, last = report.tables(figures, by)
    page = report.page(figures, by)
    said = "a on qa: this set is no test for this model. It answers 75% of the questions right with their passages, "
    assert (said in str(last), said in page) == (not test, not test)


def test_the_worst_model_counts_and_a_program_gets_the_same_table(figures: list[Row]) -> None:
    found = report.Figures(figures, BY)
    worst = found.worst("chain2", "prophetkv", 0.2, "exact_match")
    assert (worst.model, worst.score) == ("b", 0.75)
    assert found.cost("prophetkv", 0.2, "recomputed_tokens") == 20.0
    table = [("full_attention", 1.0), ("full_reuse", 0.0), ("epic", 0.15), ("prophetkv", 0.2)]
    assert [(name, r) for name, r, _ in found.table(0.2)] == table
    one_sided = [row for row in figures if row.model == "a" or row.recipe != "epic"]
    lines = [(line["recipe"], line["r"], line["scores"]["chain2"]) for line in report.worst(one_sided, BY)]
    assert lines[:3] == [("full_attention", 1.0, 1.0), ("full_reuse", 0.0, 0.125), ("epic", 0.15, None)]
    assert lines[3:] == [("prophetkv", 0.15, 0.625)]


def test_the_page_is_whole_and_holds_everything(figures: list[Row]) -> None:
    figures = [*figures, *rows(HARD, TASK, table(0))]
    text = report.page(figures, BY)
    page = Page(text)
    assert page.open == []
    assert not {name for _, attributes in page.seen for name in attributes} & {"src", "href", "onload"}
    assert "http" not in text
    assert "url(" not in text
    said = " ".join(page.text)
    assert HARD in said, "names are escaped"
    assert "Worst case over the models" in said
    assert re.search(r"prophetkv\s+0\.15\s+62\.5\s+30\.6\s+to\s+86\.3", said)
    assert re.search(r"prophetkv\s+0\.15\s+\d*\s*15\s+16", said), "recomputed tokens, and rows for scores"


def test_advice_is_the_recipe_that_keeps_most_and_then_the_cheapest() -> None:
    def found(*kept: tuple[str, float, Sequence[int]]) -> dict[Cell, Measured]:
        right = {cell("full_attention", 1.0): Measured({"exact_match": exact(*range(8))})}
        return right | {cell(name, r): Measured({"exact_match": exact(*held)}) for name, r, held in kept}

    def advised(**tasks: dict[Cell, Measured]) -> list[str]:
        made = [row for name, cells in tasks.items() for row in rows("m", replace(COUNTED, name=name), cells)]
        return [*report.advice(report.Figures(made, dict.fromkeys(tasks, "exact_match")))]

    cells = found(("full_reuse", 0.0, [0]), ("epic", 0.1, range(7)), ("epic", 0.3, range(8)), ("a3", 0.2, range(8)))
    assert advised(one=cells) == ["m has 8 right answers with full attention: too few to advise on a recipe"]
    assert advised(one=cells, two=cells) == ["for m, use a3 at 0.2: it keeps 16 of full attention's 16 right answers"]
    bare = {NO_CONTEXT: Measured({"exact_match": exact(*range(8))})}
    assert advised(one=cells | bare, two=cells | bare) == [], "no set is a test for this model"


def test_the_terminal_gets_the_middle_ratio(figures: list[Row]) -> None:
    out = StringIO()
    Console(file=out, width=100).print(*report.tables(figures, BY))
    assert re.search(r"worst case over 2 models", out.getvalue())
    assert re.search(r"prophetkv +0.15 +62.5", out.getvalue())
