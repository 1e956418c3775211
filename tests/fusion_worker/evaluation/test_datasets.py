"""The three formats read as their makers write them, and every fault named with its place."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionkv.fusion_worker.evaluate.data import datasets
from fusionkv.fusion_worker.evaluate.data.datasets import DatasetError, UnknownDataset, load

QA = ("f1", "exact_match", "contains")
NEEDLE = {
    "index": 0,
    "input": "A number is hidden here. Keep it.\nThe sea is calm.\nThe number of oak is 41.\nWhat is oak's number?",
    "outputs": ["41"],
    "length": 40,
}
STORY = {"context": "Ada met Bob.\nBob left.", "input": "Who left?", "answers": ["Bob", "bob"], "dataset": "musique"}
PAGES = {
    "ctxs": [{"title": "Oak", "text": "A tree."}, {"title": "", "text": "A lamp."}],
    "question": "What is oak?",
    "answers": ["a tree"],
}


def lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_ruler(tmp_path: Path) -> None:
    (task,) = load(lines(tmp_path / "niah_single_1/validation.jsonl", NEEDLE, {**NEEDLE, "answer_prefix": " It is"}))
    found = task.name, task.metrics, task.max_tokens, task.chat
    assert found == ("ruler/niah_single_1", ("string_match_all",), 128, 1)
    first, second = task.samples
    assert first.instruction == "A number is hidden here. Keep it.\n"
    assert first.passages == ("The sea is calm.\nThe number of oak is 41.",)
    assert (first.question, first.opening, second.opening) == ("\nWhat is oak's number?", "", " It is")
    assert first.instruction + first.passages[0] + first.question == NEEDLE["input"]
    (qa,) = load(lines(tmp_path / "qa_2.jsonl", NEEDLE))
    assert (qa.name, qa.metrics, qa.max_tokens) == ("ruler/qa_2", ("string_match_part",), 32)
    # An input without a line of instruction is all context.
    words = " ".join(["abc", "xyz"] * 100)
    (task,) = load(lines(tmp_path / "fwe.jsonl", {"input": f"{words}\nWhich words?", "outputs": ["abc", "xyz"]}))
    assert (task.samples[0].instruction, task.samples[0].passages) == ("", (words,))


def test_longbench(tmp_path: Path) -> None:
    (task,) = load(lines(tmp_path / "x.jsonl", STORY, STORY))
    assert (task.name, task.metrics, task.max_tokens) == ("longbench/musique", QA, 32)
    sample = task.samples[1]
    assert (sample.passages, sample.answers, sample.whole) == ((STORY["context"],), ("Bob", "bob"), True)
    assert sample.question == "\n\nQuestion: Who left?\nAnswer:"
    (few,) = load(lines(tmp_path / "s.jsonl", {**STORY, "dataset": "samsum_e", "input": "Dialogue: a"}))
    assert (few.name, few.metrics, few.chat, few.first_line) == ("longbench/samsum_e", ("rouge_l",), False, True)
    assert few.samples[0].question == "\n\nDialogue: a"


def test_cacheblend(tmp_path: Path) -> None:
    (task,) = load(lines(tmp_path / "musique_s.json", json.dumps([PAGES], indent=1)))
    assert (task.name, task.metrics, task.first_line) == ("cacheblend/musique_s", QA, True)
    assert task.samples[0].passages == ("Oak\n\nA tree.\n\n", "A lamp.\n\n")
    assert task.samples[0].question.endswith("\nQuestion: What is oak?\nAnswer:")
    (summary,) = load(lines(tmp_path / "samsum.json", json.dumps([PAGES])))
    assert (summary.metrics, summary.chat, summary.samples[0].question) == (("rouge_l",), False, "\n\nWhat is oak?")


def test_a_data_set_says_when_an_answer_is_right(tmp_path: Path) -> None:
    rules = {"nq": "contains", "mine": "contains", "wikimqa_s": "exact_match", "musique": "exact_match", "samsum": ""}
    for name, rule in rules.items():
        assert load(lines(tmp_path / f"{name}.json", json.dumps([PAGES])))[0].right == rule
    rules = {"hotpotqa": "contains", "2wikimqa_e": "exact_match", "gov_report": ""}
    for name, rule in rules.items():
        assert load(lines(tmp_path / "x.jsonl", {**STORY, "dataset": name}))[0].right == rule


def test_questions_for_long_answers(tmp_path: Path) -> None:
    for path, records in (("musique_s.json", [json.dumps([PAGES])]), ("x.jsonl", [STORY])):
        (short,), (long,) = (load(lines(tmp_path / path, *records), long=wanted) for wanted in (False, True))
        assert (long.name, long.metrics, long.right) == (f"{short.name} long", ("contains", "entities"), "contains")
        assert (long.compared, long.max_tokens, long.first_line) == (("rouge_l", "entities"), 96, False)
        (asked,), (briefly,) = ([s.instruction + s.question for s in task.samples] for task in (long, short))
        assert asked == briefly.replace(datasets._ANSWER, datasets._LONG_ANSWER) != briefly
        assert "as few words" not in asked
        assert {block.digest for block in long.blocks(1)} != {
            block.digest for block in replace(long, compared=()).blocks(1)
        }
    for name, record in (("samsum.json", json.dumps([PAGES])), ("vt.jsonl", NEEDLE)):
        with pytest.raises(UnknownDataset, match="has no questions that can be asked for a long answer"):
            load(lines(tmp_path / name, record), long=True)
    assert [task.name for task in load(tmp_path, long=True)] == [
        "cacheblend/musique_s long",
        "longbench/musique long",
    ]


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    lines(tmp_path / "ruler/vt/validation.jsonl", NEEDLE)
    lines(tmp_path / "data/a.jsonl", STORY)
    assert [task.name for task in load(tmp_path)] == ["longbench/musique", "ruler/vt"]
    assert load(tmp_path)[0].first(0).samples == ()


def test_a_folder_is_read_without_what_is_none_of_the_formats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines(tmp_path / "a.jsonl", STORY)
    lines(tmp_path / "dataset2prompt.json", {"qmsum\x1b[31m\n": "{context}"})
    lines(tmp_path / "new.jsonl", {**STORY, "dataset": "new"})
    assert [task.name for task in load(tmp_path)] == ["longbench/musique"]
    first, second = caplog.messages
    assert first.isprintable()
    assert first.startswith(f"left out: {tmp_path}/dataset2prompt.json:1: a record of none of the known formats")
    assert second.startswith(f"left out: {tmp_path}/new.jsonl:1: dataset 'new'")
    lines(tmp_path / "torn.jsonl", "{\n")
    with pytest.raises(DatasetError, match=r"torn\.jsonl:1: no JSON"):
        load(tmp_path)
    (tmp_path / "torn.jsonl").unlink()
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DatasetError, match="none of the 2 files in this folder could be read"):
        load(tmp_path)


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k != name}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], r"f\.jsonl: the file holds no record"),
        (["{\n"], r"f\.jsonl:1: no JSON at column 2: "),
        ([NEEDLE, "\n", "[1]\n"], r"f\.jsonl:3: expected a JSON object"),
        (
            [{"text": "x", "label": 1}],
            r"f\.jsonl:1: a record of none of the known formats \(ruler has .*text, label$",
        ),
        ([NEEDLE, without(NEEDLE, "outputs")], r"f\.jsonl:2: 'outputs' must be a list of strings, and not empty"),
        ([{**NEEDLE, "input": "one line"}], r"f\.jsonl:1: the input is one line"),
        ([STORY, {**STORY, "context": ""}], r"f\.jsonl:2: 'context' must be a string that is not empty"),
        ([STORY, without(STORY, "input")], r"f\.jsonl:2: 'input' must be a string$"),
        (
            [{**STORY, "dataset": "new"}],
            r"f\.jsonl:1: dataset 'new' is none of LongBench's that can be scored: hotpotqa",
        ),
        ([json.dumps([PAGES, {**PAGES, "ctxs": []}])], r"f\.jsonl: record 2: 'ctxs' must be a list of objects"),
        ([json.dumps([PAGES, 3])], r"f\.jsonl: record 2: a record must be a JSON object, not int"),
        (['[{"a": 1},\n {"b"}]'], r"f\.jsonl:2: no JSON at column"),
        ([STORY, {**STORY, "input": "\ud83d"}], r"f\.jsonl:2: a string contains half of a surrogate pair"),
        ([STORY, '{"input": ' + "[" * 100_000], r"f\.jsonl:2: can't be read: its values are nested too deeply$"),
    ],
)
def test_a_fault_is_named_with_its_place(records: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=message):
        load(lines(tmp_path / "f.jsonl", *records))


def test_a_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    for content in (json.dumps(STORY), json.dumps([PAGES])):
        (tmp_path / "f.json").write_text(content, encoding="utf-8-sig")
        assert len(load(tmp_path / "f.json")[0].samples) == 1


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no \.jsonl or \.json file in this folder"):
        load(tmp_path)
    with pytest.raises(DatasetError, match=r"gone\.jsonl: can't be read"):
        load(tmp_path / "gone.jsonl")
