"""The README's table in one go: times to the first token, questions a second at the same p99, and quality.

A real model answers questions about the passages of files that `fusionkv eval` reads: with full attention, full reuse
and the default recipe. `worker.bench`, `worker.throughput` and `fusionkv eval` measure in turn. Finished parts are
kept in --json and not repeated by the same command on the same commit; the table is printed as Markdown.
"""

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from fusionkv.bench import command
from fusionkv.bench.worker import bench, throughput
from fusionkv.bench.worker.passages import Passages
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.evaluate.command import run as run_command
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.fusion_worker.quality.verdict import PRIMED
from fusionkv.protos.contract.recipes import find_recipe
from fusionkv.protos.runtime.process import cores

_ROOT = Path(__file__).parents[1]
_DEFAULT = find_recipe(PRIMED.recipe)
# The columns: recipes and their ratios.
RECIPES = (("full_attention", 1.0), ("full_reuse", 0.0), (PRIMED.recipe, _DEFAULT.ratio))
# Shares of full reuse's loss that `fusionkv eval` reports, with their titles.
_RECOVERED = {
    "answer_kl_back": "quality recovered, by KL divergence",
    "gold_nll_back": "quality recovered, by the likelihood of the right answer",
}
_Rows = Sequence[Mapping[str, Any]]


def main() -> None:
    parser = command.parser_of("table", __doc__)
    command.add_model(parser)
    parser.set_defaults(json=Path("build/bench/table.json"))
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, metavar="FILE", help="questions with passages")
    add("--contexts", default="1280,2250,4200", help="tokens of passages, for the first token (%(default)s)")
    add("--repeats", type=int, default=3, help="runs of each recipe, for the first token (%(default)s)")
    add("--base", type=int, default=128, help="passages of the knowledge base (%(default)s)")
    add("--chunks", type=int, default=12, help="chunks in each prompt under load (%(default)s)")
    add("--requests", type=int, default=12, help="minimum requests at each rate (%(default)s)")
    add("--n", type=int, default=50, help="questions of each file, for quality (%(default)s)")
    args = parser.parse_args()
    print(markdown(measure(args, Console(stderr=True))))


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures the parts that --json lacks, and writes each as soon as it is measured.

    Returns: `about`, what the parts depend on; the date; and the parts: `first` and `quality`, rows of the time to
    the first token and of `fusionkv eval`; `load NAME` for each recipe, rows of the throughput.
    """
    # Readers have the files in other folders.
    names = {str(file): file.name for file in args.data}
    about = {
        "command": shlex.join(["python", "-m", "fusionkv.bench.table", *(names.get(a, a) for a in sys.argv[1:])]),
        "commit": _commit(),
        "processor": _processor(),
        "model": args.model,
    }
    record: dict[str, Any] = {"about": about, "date": time.strftime("%Y-%m-%d"), "parts": {}}
    if args.json.exists() and (known := json.loads(args.json.read_text()))["about"] == about:
        record = known
    parts = record["parts"]
    measures = {"first": partial(_first, args, console)}
    measures |= {f"load {name}": partial(_load, args, console, name, ratio, parts) for name, ratio in RECIPES}
    measures["quality"] = partial(_quality, args, about["commit"])
    for number, (name, measured) in enumerate(measures.items(), 1):
        if name not in parts:
            console.print(f"part {number} of {len(measures)}: {name}", highlight=False)
            started = time.monotonic()
            parts[name] = measured()
            command.write(record, args.json)
            console.print(f"{name}: {(time.monotonic() - started) / 60:.1f} minutes", highlight=False)
    return record


def _first(args: argparse.Namespace, console: Console) -> _Rows:
    contexts = [int(part) for part in args.contexts.split(",")]
    model, passages = asyncio.run(_opened(args))
    return asyncio.run(bench.bench(model, passages, contexts, args.repeats, console, RECIPES[1:]))


def _load(args: argparse.Namespace, console: Console, name: str, ratio: float, parts: Mapping[str, _Rows]) -> _Rows:
    """Loads one recipe at rising rates. All are held to the bound of the first."""
    model, passages = asyncio.run(_opened(args))
    traffic = throughput.Traffic(passages, args.chunks)
    tokens = round(statistics.mean(prompt.context_tokens for prompt in traffic.prompts(100, 0)))
    bound = parts.get(f"load {RECIPES[0][0]}", [{"bound_s": 0.0}])[0]["bound_s"]
    about = resolve(args.model), traffic, [(name, ratio)], args.requests, console, bound
    return [{**row, "context": tokens} for row in asyncio.run(throughput.bench(model, *about))]


async def _opened(args: argparse.Namespace) -> tuple[models.Model, Passages]:
    model = models.load(resolve(args.model), "cpu")
    return model, await Passages.of(model, args.data, args.base)


def _quality(args: argparse.Namespace, commit: str) -> _Rows:
    # Cells of another commit are not reused.
    out = args.json.parent / args.json.stem / commit
    argv = [sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "eval", args.model, "--data", *args.data]
    argv += ["--recipes", PRIMED.recipe, "--ratios", _DEFAULT.ratio, "--n", args.n, "--out", out]
    subprocess.run([*map(str, argv)], check=True)
    wanted = {*_RECOVERED, "f1"}
    rows = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return [row for row in rows if row["metric"] in wanted]


def markdown(record: Mapping[str, Any]) -> str:
    """The table and its caption."""
    about, parts = record["about"], record["parts"]
    lines: list[tuple[str, ...]] = [
        (f"{about['model']}, {about['processor']}", "full attention", "full reuse", "the default")
    ]
    lines.append(("tokens of the context computed", "all", "none", f"{_DEFAULT.ratio:.0%}"))
    lines += [*_first_tokens(parts["first"]), _questions(parts), *_qualities(parts["quality"])]
    lines.insert(1, ("---",) * len(lines[0]))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    quality = parts["quality"]
    files = len({row["task"] for row in quality})
    bound = parts[f"load {RECIPES[0][0]}"][0]["bound_s"]
    caption = (
        f"`{about['command']}`, {record['date']}, commit {about['commit']}. Questions a second: at a p99 of the time "
        f"to the first token of {bound:.1f} s. Quality: mean (lowest to highest) of {files} files with "
        f"{max(row['n'] for row in quality)} questions each."
    )
    return f"{table}\n\n{caption}"


def _first_tokens(rows: _Rows) -> Iterator[tuple[str, ...]]:
    for context in dict.fromkeys(row["context"] for row in rows):
        reuse, default = (row for row in rows if row["context"] == context)
        seconds = (default["baseline_s"], reuse["value_s"], default["value_s"])
        title = f"seconds to the first token, {context:,} tokens of context"
        yield title, *(f"{value:.2f}" for value in seconds)


def _questions(parts: Mapping[str, _Rows]) -> tuple[str, ...]:
    context = parts[f"load {RECIPES[0][0]}"][0]["context"]
    rates = [throughput.capacity([*map(dict, parts[f"load {name}"])], name) for name, _ in RECIPES]
    title = f"questions a second at the same p99, {context:,} tokens of context"
    return title, *(f"{'at least ' * more}{rate:.2f}" for rate, more in rates)


def _qualities(rows: _Rows) -> Iterator[tuple[str, ...]]:
    for metric, title in _RECOVERED.items():
        found = [row["score"] for row in rows if row["metric"] == metric and row["recipe"] == PRIMED.recipe]
        known = [score for score in found if score is not None]
        yield title, "100%", "0%", _shares(statistics.mean(known), known) if known else "undefined"
    scores = [
        [row["score"] for row in rows if row["metric"] == "f1" and row["recipe"] == name] for name, _ in RECIPES
    ]
    if sum(full := scores[0]):
        shares = [[own / best for own, best in zip(of, full, strict=True) if best] for of in scores[1:]]
        relative = (_shares(sum(of) / sum(full), own) for of, own in zip(scores[1:], shares, strict=True))
        yield "F1 of the answers, relative", "100%", *relative


def _shares(whole: float, parts: Sequence[float]) -> str:
    return f"{whole:.0%}" + f" ({100 * min(parts):.0f} to {100 * max(parts):.0f})" * (len(parts) > 1)


def _commit() -> str:
    argv = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    """The processor's name, its instructions for matrices, and the number of cores that this process may use."""
    fields = dict[str, str]()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    units = [label for flag, label in (("avx512f", "AVX-512"), ("amx_tile", "AMX")) if flag in flags]
    number = cores()
    name = fields.get("model name", "CPU").replace("(R)", "").replace("(TM)", "")
    return " ".join([f"{number} core{'s' * (number > 1)} of", name, f"({', '.join(units)})" * bool(units)]).strip()


if __name__ == "__main__":
    sys.exit(run_command("table", main, RuntimeError, subprocess.CalledProcessError, resumed=True))
