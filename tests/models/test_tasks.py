"""Samples are reproducible, and every answer follows from the pages' text."""

import json
import random
import re
from pathlib import Path

import pytest

from fusionkv.fusion_worker.evaluate.data import stories as tasks
from fusionkv.fusion_worker.evaluate.data import words
from fusionkv.fusion_worker.evaluate.data.stories import Sample, sample
from fusionkv.models import corpus

NAME = re.compile(r"\b(?:" + "|".join(words.FIRST) + r")(?:" + "|".join(words.SECOND + words.PLACE) + r")\w*")


def samples(count: int, seed: int = 5) -> list[Sample]:
    rng = random.Random(seed)
    return [sample(rng) for _ in range(count)]


def solve(pages: list[str], question: str) -> str | None:
    """Answers a question from the pages' text alone, following references backwards through them."""
    said = [line.strip() for page in pages for line in re.findall(r"[^.]+", page)]

    def find(pattern: str) -> list[tuple[int, str]]:
        found = [(i, re.fullmatch(pattern, line)) for i, line in enumerate(said)]
        return [(i, match[1]) for i, match in found if match]

    match = re.fullmatch(r"Report \w+: (age|codes?|items|city|score|choice) of (\w+)(?: and (\w+))?\?", question)
    assert match, question
    what, who, other = match[1], match[2], match[3]
    if what in ("age", "code"):
        return find(rf"The {what} of {who} is (\d+)")[0][1]
    if what == "codes":
        return " and ".join(find(rf"The code of {name} is (\d+)")[0][1] for name in (who, other))
    if what == "items":
        return " and ".join(item for _, item in find(rf"{who} owns the (\w+)"))
    if what == "city":
        hosts = find(rf"{who} stays with (\w+)")
        return find(rf"The city of {hosts[0][1] if hosts else who} is (\w+)")[0][1]
    if what == "score":
        while not (direct := find(rf"{who} scored (\d+)")):
            who = find(rf"{who} scored like (\w+)")[0][1]
        return direct[0][1]
    if by_name := find(rf"{who} chose the (\w+)"):
        return by_name[0][1]
    start, role = find(rf"The (\w+) is {who}")[0]
    return next(item for i, item in find(rf"The {role} chose the (\w+)") if i > start)


def test_samples_are_reproducible_by_seed() -> None:
    assert samples(5) == samples(5)
    assert samples(5) != samples(5, seed=6)


def test_every_answer_follows_from_the_text() -> None:
    made = samples(100)
    for story in made:
        pages = [page.text for page in story.pages]
        for question in story.questions:
            assert solve(pages, question.text) == question.answer, question
    assert {question.task for story in made for question in story.questions} == set(tasks.TASKS)


@pytest.mark.parametrize(("codes", "questions"), [(1, 0), (2, 1), (3, 1), (6, 3)])
def test_questions_about_two_codes(codes: int, questions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_CODES", codes)
    made = sample(random.Random(5))
    assert [q.task for q in made.questions].count("multiquery") == questions


def test_every_needed_page_is_needed_and_references_stand_on_later_pages() -> None:
    for made in samples(30):
        for question in made.questions:
            if question.task in tasks.CROSS_CHUNK:
                assert list(question.needs) == sorted(set(question.needs))
                assert len(question.needs) >= 2
            for page in set(question.needs):
                pages = [p.text for i, p in enumerate(made.pages) if i != page]
                try:
                    assert solve(pages, question.text) != question.answer
                except (IndexError, StopIteration):
                    continue


def test_corpus_files_sort_in_reading_order_and_hold_the_answers(tmp_path: Path) -> None:
    assert corpus.write(tmp_path, stories=6, pages=8, seed=4)[0] == 48
    pages = {path.name: path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("shelf-0[12]/*.md"))}
    assert len(pages) == 48
    titles = {name: name.split("-")[0] for name in pages}
    assert all(text.split()[1].lower().rstrip(".") == titles[name] for name, text in pages.items())
    lines = json.loads((tmp_path / "questions.json").read_text(encoding="utf-8"))
    assert {line["kind"] for line in lines} == set(tasks.TASKS)
    for line in lines:
        assert all((tmp_path / line["corpus"] / name).is_file() for name in line["documents"])
        story = [pages[name] for name in pages if titles[name] == titles[line["documents"][0]]]
        assert len(story) == 8
        assert solve(story, line["question"]) in line["answers"]


def test_no_person_is_in_two_stories_of_a_shelf(tmp_path: Path) -> None:
    corpus.write(tmp_path, stories=42, pages=8, seed=1)
    short = re.compile(r"\b(?:" + "|".join(words.SHORT) + r")\b")
    owners: dict[tuple[str, str], str] = {}
    for path in tmp_path.glob("*/*.md"):
        text = path.read_text(encoding="utf-8")
        for name in [n for n in NAME.findall(text) if n[3:] not in words.PLACE] + short.findall(text):
            story = path.name.split("-")[0]
            assert owners.setdefault((path.parent.name, name), story) == story
