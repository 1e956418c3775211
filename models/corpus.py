"""Writes a corpus of held-out stories, one file per page: `python -m fusionkv.models.corpus --out DIR`."""

import argparse
import json
import random
from pathlib import Path

from fusionkv.models.tasks import PROMPT, story
from fusionkv.models.words import NamePool

_LONG_SHARE = 0.5  # of the names of people: no name is in two stories, so that a question finds its own


def write(out: Path, stories: int, pages: int, seed: int) -> tuple[int, int]:
    """Writes `stories` x `pages` page files and `questions.jsonl`; returns how many pages and questions.

    A page's file is named after its story and its place there (`velkorda-03.md`), so that file names sort
    in reading order. A line of `questions.jsonl` has `question`, `answer`, `task` and `needs`, the files
    that hold the answer in reading order.
    """
    rng = random.Random(seed)
    names = NamePool(rng, "heldout", _LONG_SHARE)
    out.mkdir(parents=True, exist_ok=True)
    lines, count = [], 0
    for _ in range(stories):
        made, questions = story(rng, names, pages, PROMPT)
        files = [f"{page.title.lower()}-{number:02d}.md" for number, page in enumerate(made, 1)]
        for file, page in zip(files, made, strict=True):
            (out / file).write_text(page.text + "\n", encoding="utf-8")
        count += len(files)
        for question in questions:
            needs = [files[page] for page in question.needs]
            line = {"question": question.text, "answer": question.answer, "task": question.task, "needs": needs}
            lines.append(json.dumps(line))
    (out / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return count, len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stories", type=int, default=40)
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    pages, questions = write(options.out, options.stories, options.pages, options.seed)
    print(f"wrote {pages} pages and {questions} questions to {options.out}")


if __name__ == "__main__":
    main()
