"""`fusionkv eval`: quality and cost of every recipe on tasks and models, with confidence intervals.

Without --data, the reference models' tasks are measured. Measurements are kept in OUT/cells.jsonl and not
repeated; OUT/report.json and OUT/report.html are written from them. Delete cells.jsonl when the code has changed.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fusionkv.fusion_worker.config import STORES, WorkerConfig
from fusionkv.fusion_worker.evaluate import command, jobs
from fusionkv.fusion_worker.evaluate.data import datasets, tasks
from fusionkv.fusion_worker.evaluate.data.samples import Task
from fusionkv.fusion_worker.evaluate.data.stories import CROSS_CHUNK, TASKS
from fusionkv.fusion_worker.evaluate.report import report
from fusionkv.fusion_worker.evaluate.report.cells import Cell, Store, Subject, locked, table
from fusionkv.fusion_worker.evaluate.report.rows import judged, rows, untested
from fusionkv.fusion_worker.library.cache import fingerprint, name_of
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.fusion_worker.models import on_cpu
from fusionkv.fusion_worker.quality.verdict import Verdict
from fusionkv.protos.contract.names import DEFAULT, full_name
from fusionkv.protos.contract.recipes import RECIPES, Versions, find_recipe
from fusionkv.protos.contract.selectors import SecondModel
from fusionkv.protos.runtime.errors import InvalidArgument
from fusionkv.protos.runtime.process import cores
from fusionkv.protos.runtime.settings import parse_bytes, positive

RATIOS = (0.05, 0.1, 0.15, 0.2)
# For questions over real texts, on which recipes lose and bring back more than on the models' own tasks.
_DATA_RATIOS = (0.05, 0.15, 0.3)
# Bytes of the pool: for the KV of a few samples, and with --data for that of a file's passages, which recur.
_POOL, _DATA_POOL = 256 << 20, 2 << 30
# Where full reuse loses nothing, one ratio is enough: that of most papers' tables.
_CONTROL_RATIO = 0.15
# Where the output is no terminal, a line is printed whenever this share more is measured.
_STEP = 0.02
# Recipes that need no specially trained model; among them, those that need no second model.
_UNTRAINED = [name for name, recipe in RECIPES.items() if not (recipe.in_place or recipe.links)]
_BY_ITSELF = [name for name in _UNTRAINED if RECIPES[name].needs != SecondModel()]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)

    def evaluate() -> int:
        with locked(args.out):
            # Wide enough for the table where the output is no terminal.
            width = None if sys.stderr.isatty() else 140
            return _evaluate(args, Console(stderr=True, highlight=False, width=width))

    return command.run("fusionkv eval", evaluate, resumed=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusionkv eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", type=Path, nargs="*", metavar="MODEL", help="as `fusionkv check` (default: the reference models)")
    about = "RULER, LongBench or CacheBlend files or folders"
    add("--data", type=Path, nargs="+", action="extend", default=[], metavar="PATH", help=about)
    add("--long", action="store_true", help="ask the questions of --data for two or three sentences")
    about = "reference tasks (default: all, or none with --data)"
    add("--tasks", nargs="+", action="extend", choices=TASKS, help=about)
    about = (
        "recipes, with or without modifiers; `default` is the model's (default: that one, and every recipe without "
        "modifiers that needs no specially trained model)"
    )
    add("--recipes", nargs="+", action="extend", metavar="RECIPE", help=about)
    about = f"shares to recompute (default: {RATIOS}; of --data {_DATA_RATIOS})"
    add("--ratios", nargs="+", action="extend", type=_ratio, metavar="R", help=about)
    add("--n", type=positive, default=500, help="maximum samples per task (default: %(default)s)")
    about = "size of chunks of an unsplit context (default: %(default)s)"
    add("--chunk-tokens", type=positive, default=512, help=about)
    add("--out", type=Path, default=Path("build/eval"), help="folder of the results (default: %(default)s)")
    command.add_engine(parser)
    about = "size of the KV pool of each process (default: 256MiB; with --data 2GiB)"
    add("--pool-bytes", type=parse_bytes, metavar="SIZE", help=about)
    about = "storage formats of KV (default: plain)"
    add("--store", nargs="+", action="extend", choices=STORES, default=[], help=about)
    add("--processes", type=positive, help="number of processes (default: one on a GPU, one per core on a CPU)")
    add("--json", action="store_true", help="print the worst scores and the paths of the reports as JSON")
    return parser


def _evaluate(args: argparse.Namespace, console: Console) -> int:
    started = time.monotonic()
    args.models, args.auxiliary = [*map(resolve, args.models)], args.auxiliary and resolve(args.auxiliary)
    known = Store(args.out / "cells.jsonl")
    plan = _plan(args)
    configs = {
        _subject(directory, store, args): _config(directory, store, args)
        for directory in args.models or tasks.shipped()
        for store in args.store or ["plain"]
    }
    _each_once("model", [subject.model for subject in configs])
    todo = [job for subject, config in configs.items() for job in jobs.missing(subject, config, plan, known)]
    _measure(todo, args.processes or (cores() if on_cpu(args.device) else 1), known, console)
    tables = [
        (subject.model, task, dict(table(subject, jobs.blocks(task), cells, known)))
        for subject in configs
        for task, cells in plan
    ]
    figures = [row for model, task, cells in tables for row in rows(model, task, cells)]
    by = {task.name: judged(task) for task, _ in plan}
    lines = ",\n".join(json.dumps(asdict(row)) for row in figures)
    (args.out / "report.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    (args.out / "report.html").write_text(report.page(figures, by), encoding="utf-8")
    if args.json:
        written = {kind: str(args.out / f"report.{kind}") for kind in ("json", "html")}
        no_test = [{"model": row.model, "task": row.task} for row in untested(figures)]
        print(json.dumps({"reports": written, "worst": report.worst(figures, by), "no_test": no_test}))
    else:
        for shown in report.tables(figures, by):
            console.print(shown)
    minutes = (time.monotonic() - started) / 60
    console.print(f"{len(figures)} figures in {args.out}/report.json, drawn in report.html; {minutes:.1f} minutes")
    return 0


def _plan(args: argparse.Namespace) -> list[tuple[Task, list[Cell]]]:
    """All tasks, each with its cells."""
    given = args.recipes or [*(_UNTRAINED if args.auxiliary else _BY_ITSELF), DEFAULT]
    verdicts = (Verdict.read(directory, fingerprint(directory)) for directory in args.models or tasks.shipped())
    defaults = dict.fromkeys(verdict.default.choice.recipe for verdict in verdicts)
    named = (full_name(name, default) for name in given for default in defaults)
    recipes = [find_recipe(name) for name in dict.fromkeys(["full_attention", "full_reuse", *named])]
    if history := [recipe.name for recipe in recipes if isinstance(recipe.encode, Versions)]:
        raise InvalidArgument(f"{history[0]} reuses KV of earlier questions, and each sample is measured by itself")
    if args.long and not args.data:
        raise InvalidArgument("--long says how the questions of --data are asked: give --data")
    asked = [task.first(args.n) for path in args.data for task in datasets.load(path, args.long)]
    asked += [tasks.reference(name, args.n) for name in dict.fromkeys(args.tasks or (() if args.data else TASKS))]
    _each_once("task", [task.name for task in asked])
    controls = set(TASKS) - set(CROSS_CHUNK)

    def ratios(task: Task) -> list[float]:
        asked_for = sorted(args.ratios or (_DATA_RATIOS if task.metrics else RATIOS))
        return [min(asked_for, key=lambda r: abs(r - _CONTROL_RATIO))] if task.name in controls else asked_for

    return [(task, jobs.cells_of(task, recipes, ratios(task))) for task in asked]


def _each_once(what: str, names: Sequence[str]) -> None:
    """Raises InvalidArgument if a name occurs twice: in a report, one would stand for both."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidArgument(
            f"there are two of the {what} {twice[0]}, which a report could not tell apart: evaluate each by itself, "
            "with an --out of its own"
        )


def _measure(todo: Sequence[jobs.Job], processes: int, store: Store, console: Console) -> None:
    """Runs the jobs, and stores each block as soon as it is measured."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    live, total, began, said = console.is_terminal, sum(map(_size, todo)), time.monotonic(), 0.0
    # Jobs can take minutes, and the time left is estimated from all of them.
    bars = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not live, speed_estimate_period=math.inf
    )
    with bars as progress:
        bar = progress.add_task("samples x cells", total=total)
        for job, measured in jobs.run(todo, processes, max(1, cores() // processes)):
            for part, cells in zip(job.parts, measured, strict=True):
                store.append(job.subject, part.block, zip(part.cells, cells, strict=True))
            progress.advance(bar, _size(job))
            done, minutes = progress.tasks[0].completed, (time.monotonic() - began) / 60
            if not live and done >= said + _STEP * total:
                more = minutes * (total - done) / done
                console.print(f"{done:.0f} of {total} samples x cells in {minutes:.1f} minutes; {more:.1f} left")
                said = done


def _size(job: jobs.Job) -> int:
    return sum(len(part.block.samples) * len(part.cells) for part in job.parts)


def _subject(directory: Path, store: str, args: argparse.Namespace) -> Subject:
    auxiliary = _digest(args.auxiliary) if args.auxiliary else ""
    name, digest = name_of(directory), _digest(directory)
    if store != "plain":
        name, digest = f"{name} ({store})", f"{digest}-{store}"
    # On a GPU, `auto` may be another dtype than on a CPU.
    dtype = args.dtype if on_cpu(args.device) else f"{args.dtype} on a GPU"
    return Subject(name, digest, dtype, args.chunk_tokens, auxiliary)


def _digest(directory: Path) -> str:
    return fingerprint(directory).hex()[:16]


def _config(directory: Path, store: str, args: argparse.Namespace) -> WorkerConfig:
    return WorkerConfig(
        model=directory,
        device=args.device,
        dtype=args.dtype,
        pool_bytes=args.pool_bytes or (_DATA_POOL if args.data else _POOL),
        auxiliary=str(args.auxiliary or ""),
        store=store,
    )


def _ratio(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is outside 0..1")
    return value
