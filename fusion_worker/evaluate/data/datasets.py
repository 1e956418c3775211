"""Reads the datasets of the papers in their original formats: RULER, LongBench and CacheBlend.

The first record of a file determines its format:

RULER       JSON lines: input, outputs; newer files also answer_prefix. The task is the file's name, or its folder's
            if the file is called validation, test or dev. github.com/NVIDIA/RULER
LongBench   JSON lines: context, input, answers, dataset. github.com/THUDM/LongBench
CacheBlend  a JSON array: ctxs (each a title and a text), question, answers. github.com/YaoJiayi/CacheBlend
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusionkv.fusion_worker.evaluate.data.samples import Library, Sample, Task
from fusionkv.protos.runtime.errors import printable

log = logging.getLogger(__name__)
_SUBSETS = ("validation", "test", "dev")
# The first line of a RULER input is its instruction, unless it is longer than this: then it is the context.
_LONGEST_INSTRUCTION = 400
# Answer tokens of RULER's tasks, by prefix of their names.
_RULER_TOKENS = {"niah": 128, "vt": 30, "variable_tracking": 30, "cwe": 120, "fwe": 50, "qa": 32}
# Metrics and answer tokens of LongBench's datasets, without those of classes and of code.
_QA, _SUMMARY, _NUMBER = ("f1", "exact_match", "contains"), ("rouge_l",), ("number_match",)
_LONGBENCH: dict[str, tuple[tuple[str, ...], int]] = {
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa", "nq"), (_QA, 32)),
    **dict.fromkeys(("multifieldqa_en", "multifieldqa_zh"), (_QA, 64)),
    **dict.fromkeys(("narrativeqa", "qasper"), (_QA, 128)),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), (_SUMMARY, 512)),
    **dict.fromkeys(("samsum", "dureader"), (_SUMMARY, 128)),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh", "passage_count"), (_NUMBER, 32)),
}
# When a short answer is right, by data set; in others, and if it is a file of one's own, when it contains an expected
# one, since models answer with more words than were expected: "Columbus, Ohio, USA", or a sentence.
_RIGHT = {
    # Two of seven questions name the right answer beside a wrong one: an answer that repeats both contains it.
    "wikimqa": "exact_match",
    # Expected answers include "it", "no" and "us", which stand in sentences that say something else.
    "musique": "exact_match",
}
# Few-shot tasks: without a chat template, and the end of a line ends the answer.
_FEW_SHOT = ("triviaqa", "samsum")
_ANSWER = "Answer the question using the passages. Give only the answer, in as few words as possible."
# The same for --long, its answer tokens, and the metrics: against the expected answer, and against full attention's.
_LONG_ANSWER = "Answer the question using the passages, in two or three sentences."
_LONG_TOKENS, _LONG, _LONG_COMPARED = 96, ("contains", "entities"), ("rouge_l", "entities")
_INSTRUCTIONS = {
    _QA: _ANSWER,
    _SUMMARY: "Summarize the text.",
    _NUMBER: "Read the numbered paragraphs.",
}


class DatasetError(ValueError):
    """A file with an error; the message says where and why."""


class UnknownDataset(DatasetError):
    """A file of an unknown format, or of a dataset that can't be scored."""


def load(path: Path, long: bool = False) -> list[Task]:
    """Reads the tasks of a file, or of all .jsonl and .json files below a folder.

    In a folder, files of an unknown format or dataset are skipped with a warning.

    Args:
        path: the file or folder.
        long: whether to ask for two or three sentences, which only questions with short expected answers allow. Other
            files are of an unknown dataset then.

    Raises:
        DatasetError: there is no file, or a file has an error; the message names the file and the record.
    """
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in (".jsonl", ".json") and f.is_file())
        if not files:
            raise DatasetError(f"{path}: no .jsonl or .json file in this folder")
        tasks = []
        for file in files:
            try:
                tasks += load(file, long)
            except UnknownDataset as error:
                log.warning("left out: %s", printable(str(error)))
        if not tasks:
            raise DatasetError(f"{path}: none of the {len(files)} files in this folder could be read")
        return tasks
    records = _records(path)
    first_place, first = records[0]
    for needed, read in _FORMATS:
        if all(name in first for name in needed):
            task = read(path, records)
            task = _at_length(task, first_place) if long else task
            return [replace(task, library=Library(task.samples))]
    formats = "; ".join(f"{read.__name__[1:]} has {', '.join(needed)}" for needed, read in _FORMATS)
    has = ", ".join(first) or "nothing"
    raise UnknownDataset(f"{first_place}: a record of none of the known formats ({formats}): it has {has}")


def of_questions(name: str, records: Sequence[dict[str, Any]]) -> Task:
    """The task of records in CacheBlend's format. Raises DatasetError as `load` does."""
    places = [(f"{name}: record {i}", record) for i, record in enumerate(records, 1)]
    task = _cacheblend(Path(name), places)
    return replace(task, library=Library(task.samples))


def _ruler(path: Path, records: Sequence[tuple[str, dict[str, Any]]]) -> Task:
    name = _name(path)
    samples = []
    for place, record in records:
        text, outputs = _string(place, record, "input"), _strings(place, record, "outputs")
        # In all tasks of RULER the instruction is the first line, and the question the last one.
        head, _, question = text.rstrip("\n").rpartition("\n")
        if not head.strip():
            raise DatasetError(f"{place}: the input is one line; its last line should be the question")
        first, _, rest = head.partition("\n")
        if not rest or len(first) > _LONGEST_INSTRUCTION:
            first, rest = "", head
        opening = _string(place, record, "answer_prefix") if "answer_prefix" in record else ""
        instruction = f"{first}\n" if first else ""
        samples.append(Sample(instruction, (rest,), f"\n{question}", outputs, opening, whole=True))
    kind = next((kind for kind in _RULER_TOKENS if name.startswith(kind)), "niah")
    metric = "string_match_part" if kind == "qa" else "string_match_all"
    return Task(f"ruler/{name}", tuple(samples), (metric,), _RULER_TOKENS[kind], chat=True)


def _longbench(path: Path, records: Sequence[tuple[str, dict[str, Any]]]) -> Task:
    place, first = records[0]
    dataset = _string(place, first, "dataset") if first.get("dataset") else path.stem
    name = dataset.removesuffix("_e")
    if name not in _LONGBENCH:
        known = ", ".join(_LONGBENCH)
        raise UnknownDataset(f"{place}: dataset {dataset!r} is none of LongBench's that can be scored: {known}")
    metrics, max_tokens = _LONGBENCH[name]
    asks = "\n\nQuestion: {}\nAnswer:" if metrics == _QA and name not in _FEW_SHOT else "\n\n{}"
    instruction, samples = f"{_INSTRUCTIONS[metrics]}\n\n", []
    for place, record in records:
        context, question = _string(place, record, "context"), _string(place, record, "input", empty=True)
        answers = _strings(place, record, "answers")
        samples.append(Sample(instruction, (context,), asks.format(question), answers, whole=True))
    few, right = name in _FEW_SHOT, _right(metrics, name)
    return Task(f"longbench/{dataset}", tuple(samples), metrics, max_tokens, not few, first_line=few, right=right)


def _cacheblend(path: Path, records: Sequence[tuple[str, dict[str, Any]]]) -> Task:
    name = _name(path)
    summary = name.startswith(("samsum", "multi_news", "multinews"))
    samples = []
    for place, record in records:
        question, answers = _string(place, record, "question"), _strings(place, record, "answers")
        passages = record["ctxs"] if isinstance(record.get("ctxs"), list) else []
        if not passages or not all(isinstance(c, dict) and isinstance(c.get("text"), str) for c in passages):
            raise DatasetError(f"{place}: 'ctxs' must be a list of objects with a 'text', and not empty")
        titles = [f"{c['title']}\n\n" if c.get("title") else "" for c in passages]
        texts = tuple(f"{t}{c['text']}\n\n" for t, c in zip(titles, passages, strict=True))
        asked = f"\n\n{question}" if summary else f"{_ANSWER}\nQuestion: {question}\nAnswer:"
        instruction = "Summarize as the examples do.\n\n" if summary else f"{_ANSWER}\n\nPassages:\n"
        samples.append(Sample(instruction, texts, asked, answers))
    metrics, max_tokens = (_SUMMARY, 128) if summary else (_QA, 32)
    right = _right(metrics, name)
    return Task(f"cacheblend/{name}", tuple(samples), metrics, max_tokens, not summary, first_line=True, right=right)


def _at_length(task: Task, place: str) -> Task:
    """The task with the same questions, asked for two or three sentences."""
    if task.metrics != _QA or not task.chat:
        raise UnknownDataset(f"{place}: {task.name} has no questions that can be asked for a long answer")
    samples = [
        replace(
            sample,
            instruction=sample.instruction.replace(_ANSWER, _LONG_ANSWER),
            question=sample.question.replace(_ANSWER, _LONG_ANSWER),
        )
        for sample in task.samples
    ]
    return replace(
        task,
        name=f"{task.name} long",
        samples=tuple(samples),
        metrics=_LONG,
        max_tokens=_LONG_TOKENS,
        first_line=False,
        compared=_LONG_COMPARED,
        right="contains",
    )


def _right(metrics: tuple[str, ...], name: str) -> str:
    """When an answer to a question of a data set, or of a file that is named after it, is right."""
    known = (rule for part, rule in _RIGHT.items() if part in name)
    return next(known, "contains") if metrics == _QA else ""


Reader = Callable[[Path, Sequence[tuple[str, dict[str, Any]]]], Task]
_FORMATS: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("input", "outputs"), _ruler),
    (("context", "input", "answers"), _longbench),
    (("ctxs", "question", "answers"), _cacheblend),
)


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Reads all records with their places: file and line, or file and index in the array."""
    text = _text(path)
    if text.lstrip().startswith("["):
        records = [(f"{path}: record {i}", r) for i, r in enumerate(_parse(path, text, str(path), list), 1)]
    else:
        records = list(_lines(path, text))
    if not records:
        raise DatasetError(f"{path}: the file holds no record")
    for place, record in records:
        if not isinstance(record, dict):
            raise DatasetError(f"{place}: a record must be a JSON object, not {type(record).__name__}")
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # from an escape in JSON; tokenizers take no such text
            raise DatasetError(f"{place}: a string contains half of a surrogate pair") from error
    return records


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines, which also splits at separators that JSON allows within a string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _parse(path, line, place)


def _parse(path: Path, text: str, place: str, kind: type = dict) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"{path}:{error.lineno}" if place == str(path) else place
        raise DatasetError(f"{line}: no JSON at column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a number of too many digits
        raise DatasetError(f"{place}: can't be read: {error}") from error
    except RecursionError as error:
        raise DatasetError(f"{place}: can't be read: its values are nested too deeply") from error
    if not isinstance(value, kind):
        raise DatasetError(f"{place}: expected a JSON {'array' if kind is list else 'object'}")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: can't be read: {error}") from error


def _string(place: str, record: Mapping[str, Any], name: str, empty: bool = False) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise DatasetError(f"{place}: {name!r} must be a string{'' if empty else ' that is not empty'}")
    return value


def _strings(place: str, record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = record.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise DatasetError(f"{place}: {name!r} must be a list of strings, and not empty")
    return tuple(value)


def _name(path: Path) -> str:
    return path.parent.name if path.stem in _SUBSETS else path.stem
