"""`fusionkv eval`: what every recipe answers right, at which cost, on tasks and models, with intervals.

Without --data the reference models' own tasks are asked. What was measured is kept in OUT/cells.jsonl and not
measured again; OUT/report.json and OUT/report.html are written from it. Delete cells.jsonl when the code has changed.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fusionkv.bench.quality import jobs
from fusionkv.bench.quality.data import datasets, tasks
from fusionkv.bench.quality.data.samples import Task
from fusionkv.bench.quality.report import report
from fusionkv.bench.quality.report.cells import Cell, Store, Subject, table
from fusionkv.bench.quality.report.rows import judged, rows
from fusionkv.fusion_worker.client import DEFAULT, DEFAULT_RECIPE
from fusionkv.fusion_worker.config import STORES, WorkerConfig
from fusionkv.fusion_worker.cores import cores
from fusionkv.fusion_worker.library.cache import name_of
from fusionkv.fusion_worker.library.fingerprint import fingerprint
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.fusion_worker.models import on_cpu
from fusionkv.fusion_worker.recipes import modifiers
from fusionkv.fusion_worker.recipes.recipes import RECIPES, Versions
from fusionkv.fusion_worker.select.base import SecondModel
from fusionkv.models.shipped import shipped
from fusionkv.models.tasks import CROSS_CHUNK, TASKS
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument, ServiceError
from fusionkv.protos.runtime.settings import SettingsError, parse_bytes, positive, share
from fusionkv.protos.runtime.shorten import shorten

RATIOS = (0.05, 0.1, 0.15, 0.2)
# Of questions over real texts, where more than the models' own tasks is lost and brought back.
_DATA_RATIOS = (0.05, 0.15, 0.3)
# KV of a few samples; beside it of a file's passages, which stand behind each other's neighbours again and again.
_POOL, _DATA_POOL = 256 << 20, 2 << 30
# Where full reuse loses nothing there is no curve to draw: the ratio of most papers' tables is enough.
_CONTROL_RATIO = 0.15
# Recipes that need no model trained for them, and those that need no second model either.
_UNTRAINED = [name for name, recipe in RECIPES.items() if not (recipe.in_place or recipe.links)]
_BY_ITSELF = [name for name in _UNTRAINED if RECIPES[name].needs != SecondModel()]


def main() -> int:
    args = _parser().parse_args()
    console = Console(stderr=True, highlight=False)
    try:
        return _evaluate(args, console)
    except (ServiceError, SettingsError, OSError, ValueError) as error:
        print(f"fusionkv eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fusionkv eval: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusionkv eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", type=Path, nargs="*", metavar="MODEL", help="model directories (default: the reference models)")
    add(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="RULER, LongBench or CacheBlend files or folders",
    )
    add("--prompts", type=Path, metavar="FILE", help="LongBench's dataset2prompt.json, to ask in its own words")
    add("--tasks", nargs="+", choices=TASKS, help="reference tasks (default: all, or none with --data)")
    add(
        "--recipes",
        nargs="+",
        metavar="RECIPE",
        help="with or without modifiers; `default`: the gateway's (default: all)",
    )
    add("--auxiliary", type=Path, metavar="MODEL", help="small second model, for the recipe cacheclip")
    add(
        "--ratios",
        nargs="+",
        type=_ratio,
        metavar="R",
        help=f"shares to recompute (default: {RATIOS}; of --data {_DATA_RATIOS})",
    )
    add("--n", type=positive, default=500, help="samples a task, at most (default: %(default)s)")
    add("--chunk-tokens", type=positive, default=512, help="of a context that is one text (default: %(default)s)")
    add(
        "--compress",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="of every passage to leave out before it is asked about, in whole sentences (default: none; needs sumy)",
    )
    add("--out", type=Path, default=Path("build/eval"), help="folder of what is measured (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda[:N] (default: %(default)s)")
    add(
        "--dtype",
        default="auto",
        help="float32, bfloat16, float16 or auto: the model's, where the device computes in it",
    )
    add(
        "--pool-bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="KV on the device, for each process (default: 256MiB; with --data 2GiB)",
    )
    add("--store", nargs="+", choices=STORES, default=["plain"], help="how chunks' KV is stored (default: plain)")
    add("--processes", type=positive, help="(default: one on a GPU, one a core on a CPU)")
    add("--json", action="store_true", help="print the worst scores, and where the reports are, as JSON")
    return parser


def _evaluate(args: argparse.Namespace, console: Console) -> int:
    started = time.monotonic()
    args.models, args.auxiliary = [*map(resolve, args.models)], args.auxiliary and resolve(args.auxiliary)
    known = Store(args.out / "cells.jsonl")
    plan = _plan(args)
    configs = {
        _subject(directory, store, args): _config(directory, store, args)
        for directory in args.models or shipped()
        for store in args.store
    }
    todo = [job for subject, config in configs.items() for job in jobs.missing(subject, config, plan, known)]
    _measure(todo, args.processes or (cores() if on_cpu(args.device) else 1), known, console)
    found = [
        (subject.model, task, dict(table(subject, [*task.blocks(jobs.BLOCK)], cells, known)))
        for subject in configs
        for task, cells in plan
    ]
    figures = [row for model, task, cells in found for row in rows(model, task, cells)]
    by = {task.name: judged(task) for task, _ in plan}
    lines = ",\n".join(json.dumps(asdict(row)) for row in figures)
    (args.out / "report.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    (args.out / "report.html").write_text(report.page(figures, by, found), encoding="utf-8")
    if args.json:
        written = {kind: str(args.out / f"report.{kind}") for kind in ("json", "html")}
        print(json.dumps({"reports": written, "worst": report.worst(figures, by)}))
    else:
        console.print(report.summary(figures, by))
    minutes = (time.monotonic() - started) / 60
    console.print(f"{len(figures)} figures in {args.out}/report.json, drawn in report.html; {minutes:.1f} minutes")
    return 0


def _plan(args: argparse.Namespace) -> list[tuple[Task, list[Cell]]]:
    """All tasks, each with its cells."""
    wanted = args.recipes or (_UNTRAINED if args.auxiliary else _BY_ITSELF)
    named = (DEFAULT_RECIPE if name == DEFAULT else name for name in wanted)
    recipes = [modifiers.find(name) for name in dict.fromkeys(["full_attention", "full_reuse", *named])]
    if history := [recipe.name for recipe in recipes if isinstance(recipe.encode, Versions)]:
        raise InvalidArgument(f"{history[0]} reuses what was asked before, and samples are measured each by itself")
    prompts = datasets.read_prompts(args.prompts) if args.prompts else None
    asked = [task.first(args.n) for path in args.data for task in datasets.load(path, prompts)]
    asked += [tasks.reference(name, args.n) for name in args.tasks or (() if args.data else TASKS)]
    if args.compress:
        once = cache(partial(shorten, left_out=args.compress))  # tasks share their contexts
        asked = [task.shortened(once) for task in asked]
    controls = set(TASKS) - set(CROSS_CHUNK)

    def ratios(task: Task) -> list[float]:
        wanted = sorted(args.ratios or (_DATA_RATIOS if task.metrics else RATIOS))
        return [min(wanted, key=lambda r: abs(r - _CONTROL_RATIO))] if task.name in controls else wanted

    return [(task, jobs.cells_of(task, recipes, ratios(task))) for task in asked]


def _measure(todo: Sequence[jobs.Job], processes: int, store: Store, console: Console) -> None:
    """Does what is to do, and keeps each block as soon as it is done."""
    left = Counter((job.subject.model, part.block.task.name) for job in todo for part in job.parts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("samples x cells", total=sum(_size(job) for job in todo))
        for job, measured in jobs.run(todo, processes, max(1, cores() // processes)):
            for part, found in zip(job.parts, measured, strict=True):
                store.append(job.subject, part.block, zip(part.cells, found, strict=True))
                name = (job.subject.model, part.block.task.name)
                left[name] -= 1
                if not left[name]:
                    console.print(f"{name[0]} {name[1]}: done")
            progress.advance(bar, _size(job))


def _size(job: jobs.Job) -> int:
    return sum(len(part.block.samples) * len(part.cells) for part in job.parts)


def _subject(directory: Path, store: str, args: argparse.Namespace) -> Subject:
    auxiliary = _fingerprint(args.auxiliary) if args.auxiliary else ""
    name, fingerprint = name_of(directory), _fingerprint(directory)
    if args.compress:
        name = f"{name} ({args.compress:g} left out)"
    if store != "plain":
        name, fingerprint = f"{name} ({store})", f"{fingerprint}-{store}"
    return Subject(name, fingerprint, args.dtype, args.chunk_tokens, auxiliary)


def _fingerprint(directory: Path) -> str:
    if not (directory / "config.json").is_file():
        raise FailedPrecondition(f"{directory} holds no config.json: give the directory of a Hugging Face model")
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


if __name__ == "__main__":
    sys.exit(main())
