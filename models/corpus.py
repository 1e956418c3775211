"""Writes a corpus of held-out stories, one file per page: `python -m fusionkv.models.corpus --out DIR`."""

import argparse
import json
import random
from pathlib import Path

from fusionkv.fusion_worker.evaluate.data.stories import story
from fusionkv.fusion_worker.evaluate.data.words import NamePool

SHELF = 3  # stories of a folder, which share no person's name; single-token names do not suffice for more


def write(out: Path, stories: int, pages: int, seed: int) -> tuple[int, int]:
    """Writes `stories` x `pages` page files and `questions.json`; returns the numbers of pages and questions.

    Every `SHELF` stories fill a folder (`shelf-01`), which can be ingested as a corpus. A page's file is named after
    its story and number (`velkorda-03.md`), so that file names sort in reading order. An entry of `questions.json`
    has `corpus` (the folder), `question`, `answers`, `kind` (the task) and `documents` (the files with the answer, in
    reading order).
    """
    rng = random.Random(seed)
    names = NamePool(rng)
    lines, count = [], 0
    for number in range(stories):
        if number % SHELF == 0:
            names.release_short()
        shelf = f"shelf-{number // SHELF + 1:02d}"
        (out / shelf).mkdir(parents=True, exist_ok=True)
        made, questions = story(rng, names, pages)
        files = [f"{page.title.lower()}-{place:02d}.md" for place, page in enumerate(made, 1)]
        for file, page in zip(files, made, strict=True):
            (out / shelf / file).write_text(page.text + "\n", encoding="utf-8")
        count += len(files)
        for q in questions:
            needs = [files[page] for page in q.needs]
            line = {"corpus": shelf, "question": q.text, "answers": [q.answer], "kind": q.task, "documents": needs}
            lines.append(json.dumps(line))
    (out / "questions.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return count, len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stories", type=int, default=42)
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    pages, questions = write(options.out, options.stories, options.pages, options.seed)
    print(f"wrote {pages} pages and {questions} questions to {options.out}")


if __name__ == "__main__":
    main()
