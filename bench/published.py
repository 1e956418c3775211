"""Takes the rows of the last runs in build/ into docs/benchmarks/, whose figures README and docs quote.

Rows of the same machine and model are replaced, all others stay: a run on one machine says nothing of another.
`make bench` and `make bench-gpu` write the times to the first token, `make vllm` those beside vLLM, and
`fusionkv eval` with `--out build/answers` the answers. Rows of a GPU's kernels are added to earlier ones. What has
not run is left as it is. tests/deploy/test_figures.py then names every figure to change.
"""

import argparse
import csv
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_FULL = "full_attention"
_Rows = Sequence[Mapping[str, Any]]
_Line = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.bench.published", description=__doc__)
    parser.add_argument("--root", type=Path, default=_ROOT, help="folder of build/ and docs/ (default: the clone)")
    root = parser.parse_args().root
    for name, source, lines in (
        ("first-token", "bench/gpu/ttft.json", first_tokens),
        ("first-token", "bench/ttft.json", first_tokens),
        ("vllm", "bench/vllm.json", beside_vllm),
        ("answers", "answers/report.json", answers),
    ):
        file = root / "build" / source
        if not file.exists():
            print(f"{file} does not exist: {name}.csv stays as it is")
            continue
        rows = json.loads(file.read_text(encoding="utf-8"))
        day = time.strftime("%Y-%m-%d", time.gmtime(file.stat().st_mtime))
        table = root / f"docs/benchmarks/{name}.csv"
        made = [{"date": day} | line for line in lines(rows)]
        replace(table, made)
        print(f"{table}: {len(made)} rows of {file}")
    if (new := root / "build/bench/gpu/gpu.csv").exists():
        add(root / "docs/benchmarks/gpu.csv", new)


def add(table: Path, new: Path) -> None:
    """Adds the rows that a table lacks. Raises ValueError if they have other columns."""
    known, rows = table.read_text().splitlines(), new.read_text().splitlines()
    if known[0] != rows[0]:
        raise ValueError(f"{table} has the columns {known[0]}, and {new} {rows[0]}")
    made = [row for row in rows if row not in known]
    table.write_text("".join(f"{row}\n" for row in [*known, *made]))
    print(f"{table}: {len(made)} rows of {new}")


def replace(table: Path, made: Sequence[_Line]) -> None:
    """Writes rows to a table in place of those of the same machine and model.

    Raises:
        ValueError: a row has other columns than the table.
    """
    with table.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        columns, known = list(reader.fieldnames or ()), [*reader]
    if wrong := [line for line in made if [*line] != columns]:
        raise ValueError(f"{table} has the columns {columns}, and a row {[*wrong[0]]}")
    subjects = {_subject(line) for line in made}
    with table.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*made, *(line for line in known if _subject(line) not in subjects)])


def _subject(line: _Line) -> tuple[str, ...]:
    return line.get("machine", ""), line["model"]


def first_tokens(rows: _Rows) -> Iterator[_Line]:
    """Seconds to the first token. Full attention's are those beside the last recipe, whose speed-up is quoted."""
    last = {row["context"]: row for row in rows}
    full = [{**row, "name": _FULL, "r": 1.0, "value_s": row["baseline_s"]} for row in last.values()]
    for row in sorted([*full, *rows], key=lambda row: row["name"] != _FULL):
        about = {"machine": row["machine"], "model": row["model"], "recipe": row["name"]}
        yield about | {"ratio": f"{row['r']:g}", "context": str(row["context"]), "seconds": f"{row['value_s']:#.3g}"}


def beside_vllm(rows: _Rows) -> Iterator[_Line]:
    """Median seconds to the first token of each system, by case: first vLLM's, to which the others are compared."""
    for system in sorted({row["system"] for row in rows}, reverse=True):
        mine = [row for row in rows if row["system"] == system]
        about = {"machine": mine[0]["machine"], "model": mine[0]["model"], "system": system}
        yield about | {row["case"]: f"{row['ttft_median_s']:.2f}" for row in mine}


def answers(rows: _Rows) -> Iterator[_Line]:
    """What became of full attention's answers, by model and recipe, over all sets of questions."""
    cells = defaultdict[tuple[str, str, float], dict[str, list[tuple[float, int]]]](lambda: defaultdict(list))
    for row in rows:
        if row["score"] is not None and row["metric"] in _COUNTED:
            cells[row["model"], row["recipe"], row["r"]][row["metric"]].append((row["score"], row["n"]))
    for (model, recipe, ratio), found in cells.items():
        if recipe == "no_context" or not found["right"]:  # of sets whose answers are not counted
            continue
        full = recipe == _FULL
        questions = sum(n for _, n in found["right"])
        yield {
            "model": model,
            "questions": str(questions),
            "recipe": recipe,
            "ratio": f"{ratio:g}",
            "kept": str(_count(found["right" if full else "kept"])),
            "gained": "" if full else str(_count(found["gained"])),
            "f1": f"{100 * _total(found['f1']) / questions:.1f}",
            "kl_mean": "0" if full else f"{_total(found['answer_kl']) / questions:.3f}",
            "off": str(_count(found["answer_kl_above_1"])),
            "same": str(_count(found["answer_same"])),
        }


_COUNTED = ("right", "kept", "gained", "f1", "answer_kl", "answer_kl_above_1", "answer_same")


def _total(shares: Iterable[tuple[float, int]]) -> float:
    return sum(share * n for share, n in shares)


def _count(shares: Iterable[tuple[float, int]]) -> int:
    return round(_total(shares))


if __name__ == "__main__":
    main()
