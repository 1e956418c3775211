"""`fusionkv check`: compares the engine with the model's own code, and finds which recipes are safe on a model.

Full attention answers questions about passages, and its answers are fed to every recipe. A recipe is safe if the KL
divergence of its next-token distributions from full attention is at most 0.1 nats, by a 95% interval; it is unsafe if
the divergence is larger; otherwise there is not enough evidence. Recommended is the cheapest safe one that keeps as
many answers as deeplayer+primed at 0.2. The questions are built in, or given by --data or --corpus.

All this is written to fusionkv-check.json in the model's directory. A worker that serves the model takes the
recommended recipe for `default`, and answers with full attention instead of an unsafe one. The exit code is 0,
whatever the verdicts, unless the engine differs from the model's own code.
"""

import argparse
import asyncio
import json
import math
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.evaluate import command
from fusionkv.fusion_worker.evaluate.data import datasets
from fusionkv.fusion_worker.evaluate.data.samples import Task
from fusionkv.fusion_worker.evaluate.judge import CANDIDATES, Tally, judge, recommend
from fusionkv.fusion_worker.evaluate.oracles import Oracles, compare
from fusionkv.fusion_worker.evaluate.report.cells import Cell
from fusionkv.fusion_worker.evaluate.runner import Runner
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.quality.verdict import FILE, SAFE, UNMEASURED, UNSAFE, Judged, Verdict
from fusionkv.protos.contract.capabilities import unusable
from fusionkv.protos.contract.recipes import RECIPES, find_recipe
from fusionkv.protos.runtime.settings import parse_bytes, positive

PASSAGES = Path(__file__).parent / "data/passages.json"
_CHUNK_TOKENS = 512


def main(argv: Sequence[str] | None = None, questions: Sequence[dict[str, Any]] = ()) -> int:
    """questions: records of CacheBlend's format to ask in place of those of --data, or none."""
    args = _parser().parse_args(argv)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # asyncio.run's own waits until something is awaited: for minutes, while a model is fetched and loaded.
        signal.signal(signal.SIGINT, lambda number, frame: signal.default_int_handler(number, frame))
    console = Console(stderr=True, highlight=False)
    return command.run("fusionkv check", lambda: asyncio.run(_check(args, console, questions)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusionkv check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--corpus NAME uses a gateway's corpus (--gateway ADDRESS ...): see `--corpus NAME --help`.",
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="model directory, *.gguf file, hub id or known name")
    about = "files of questions with passages, in a format of `fusionkv eval` (default: built-in questions)"
    add("--data", type=Path, nargs="+", action="extend", metavar="FILE", help=about)
    add("--n", type=positive, default=36, help="maximum questions of a file (default: %(default)s)")
    add("--minutes", type=positive, help="ask no more questions after this time, except for the first 12")
    command.add_engine(parser)
    add("--pool-bytes", type=parse_bytes, default=2 << 30, metavar="SIZE", help="size of the KV pool (default: 2GiB)")
    about = f"file for the verdicts (default: {FILE} in the model's directory, where workers look for it)"
    add("--out", type=Path, metavar="FILE", help=about)
    add("--json", action="store_true", help="print the verdicts as JSON")
    return parser


async def _check(args: argparse.Namespace, console: Console, questions: Sequence[dict[str, Any]] = ()) -> int:
    args.model, args.auxiliary = resolve(args.model), args.auxiliary and resolve(args.auxiliary)
    asked = [datasets.of_questions("corpus", questions)] if questions else []
    asked = asked or [task for path in args.data or [PASSAGES] for task in datasets.load(path)]
    tasks = [replace(task.first(args.n), graded=False) for task in asked]
    config = WorkerConfig(model=args.model, pool_bytes=args.pool_bytes)
    model = models.load(args.model, args.device, args.dtype)
    auxiliary = models.load(args.auxiliary, "cpu") if args.auxiliary else None
    oracles = await compare(args.model, model, config)
    cells, default = _cells(model, auxiliary), UNMEASURED
    judged: dict[str, tuple[Judged, ...]] = {}
    if oracles.held:
        why = "full attention by construction"
        judged = {c.recipe.name: (Judged(SAFE, c.ratio, why),) for c in cells if c.recipe.lossless}
        reusing = [cell for cell in cells if not cell.recipe.lossless]
        runner = Runner(model, config, _CHUNK_TOKENS, auxiliary)
        tallies = await _judge(runner, tasks, reusing, console, 60.0 * args.minutes if args.minutes else math.inf)
        default = recommend(tallies)
        for tally in tallies:
            judged[tally.choice.recipe] = (*judged.get(tally.choice.recipe, ()), tally.judge())
    else:
        error = max(oracles.full_attention, oracles.full_reuse)
        why = f"the engine's logits differ by {error:.1e} from those of the model's own code"
        judged = {cell.recipe.name: (Judged(UNSAFE, cell.recipe.ratio, why),) for cell in cells}
    verdict = Verdict(model.fingerprint.hex(), judged, auxiliary.fingerprint.hex() if auxiliary else "", default)
    # Printed before it is written, which fails if the model is on a read-only file system.
    if args.json:
        print(json.dumps({"oracles": asdict(oracles), **asdict(verdict)}), flush=True)
    else:
        Console().print(_table(model, oracles, verdict))
    path = args.out or args.model / FILE
    try:
        verdict.write(path)
    except OSError as error:
        raise OSError(
            f"can't write the verdicts: {error}; set another file with --out, but workers look for {FILE} in the "
            "model's directory"
        ) from error
    console.print(f"written to {path}")
    return 0 if oracles.held else 1


def _cells(model: Model, auxiliary: Model | None) -> list[Cell]:
    """The recipes that the model can follow, at their default ratios, and what may be recommended; by ratio."""
    described = model.described(auxiliary is not None)
    usable = [recipe for recipe in RECIPES.values() if not unusable(recipe, 0, described)]
    cells = dict.fromkeys(Cell(recipe, recipe.ratio) for recipe in usable)
    cells |= dict.fromkeys(Cell(find_recipe(choice.recipe), choice.ratio) for choice in CANDIDATES)
    return sorted(cells, key=lambda cell: cell.ratio)


async def _judge(
    runner: Runner, tasks: Sequence[Task], cells: Sequence[Cell], console: Console, seconds: float
) -> list[Tally]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("questions", total=sum(len(task.samples) for task in tasks))

            def on_round(asked: int, doubtful: int) -> None:
                progress.update(bar, completed=asked, description=f"questions, {doubtful} recipes and ratios go on")

            return await judge(runner, tasks, cells, on_round, seconds)
    finally:
        await runner.close()


def _table(model: Model, oracles: Oracles, verdict: Verdict) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        title=f"{model.name}: difference from its own code {oracles.full_attention:.1e} with full recomputation, "
        f"{oracles.full_reuse:.1e} with full reuse",
    )
    for column in ("recipe", "ratio", "verdict", "KL", "95%", "top-1", "n", "off", "kept"):
        left = column in ("recipe", "verdict")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "verdict")
    for name, judged in verdict.judged:
        figures = list[str]()
        if judged.agreement is not None:
            figures = [f"{judged.kl:.3f}", f"{judged.low:.3f}-{judged.high:.3f}", f"{judged.agreement:.0%}"]
            figures += map(str, (judged.answers, judged.off, judged.kept))
        table.add_row(name, f"{judged.ratio:g}", judged.verdict, *figures)
    if not oracles.held:
        table.caption = next(verdict.judged)[1].why
    else:
        default = verdict.default
        unsafe = verdict.unsafe(find_recipe(default.choice.recipe), default.choice.ratio)
        table.caption = f"for this model, use {'full_attention' if unsafe else default.choice}: {default.why}"
    return table
