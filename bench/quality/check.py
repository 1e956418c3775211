"""`fusionkv check`: holds a model to the oracles, and says which recipes are safe on it, by natural text.

Full attention answers questions over passages, and its answers are fed to every recipe. A recipe is safe if its
next-token distributions are at most 0.1 nats (KL) from full attention's, by an interval of 95%; unsafe if they are
further; otherwise the evidence is not enough. The questions are those that come with this program, or those of --data
or --corpus. The verdicts are written to fusionkv-check.json beside the model: a worker that serves it answers with
full attention in the place of an unsafe recipe.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusionkv.bench.quality.data import datasets
from fusionkv.bench.quality.data.samples import Task
from fusionkv.bench.quality.judge import judge
from fusionkv.bench.quality.oracles import Oracles, compare
from fusionkv.bench.quality.runner import Runner
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.client import DEFAULT_RECIPE
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.quality.verdict import FILE, SAFE, UNSAFE, Judged, Verdict
from fusionkv.fusion_worker.recipes import modifiers
from fusionkv.fusion_worker.recipes.recipes import RECIPES, Recipe
from fusionkv.fusion_worker.select.base import SecondModel
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.protos.runtime.settings import SettingsError, parse_bytes, positive

PASSAGES = Path(__file__).parent / "data/passages.json"
_CHUNK_TOKENS = 512


def main() -> int:
    args = _parser().parse_args()
    console = Console(stderr=True, highlight=False)
    try:
        return asyncio.run(_check(args, console))
    except (ServiceError, SettingsError, OSError, ValueError) as error:
        print(f"fusionkv check: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusionkv check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--corpus NAME takes a gateway's corpus (--gateway ADDRESS ...): `--corpus NAME --help` says how.",
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="directory of a Hugging Face causal language model")
    add(
        "--data",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="own questions and their passages, in a form that `fusionkv eval` takes (default: this program's)",
    )
    add("--auxiliary", type=Path, metavar="MODEL", help="small second model, to check the recipe cacheclip with")
    add("--n", type=positive, default=24, help="questions of a file, at most (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda[:N] (default: %(default)s)")
    add(
        "--dtype",
        default="auto",
        help="float32, bfloat16, float16 or auto: the model's, where the device computes in it",
    )
    add("--pool-bytes", type=parse_bytes, default=2 << 30, metavar="SIZE", help="KV on the device (default: 2GiB)")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"where to write the verdict (default: {FILE} beside the model, where workers look for it)",
    )
    add("--json", action="store_true", help="print the verdict as JSON")
    return parser


async def _check(args: argparse.Namespace, console: Console) -> int:
    args.model, args.auxiliary = resolve(args.model), args.auxiliary and resolve(args.auxiliary)
    tasks = [
        replace(task.first(args.n), graded=False) for path in args.data or [PASSAGES] for task in datasets.load(path)
    ]
    config = WorkerConfig(model=args.model, pool_bytes=args.pool_bytes)
    model = models.load(args.model, args.device, args.dtype)
    auxiliary = models.load(args.auxiliary, "cpu") if args.auxiliary else None
    oracles = await compare(args.model, model, config)
    recipes = _recipes(model, auxiliary)
    if oracles.held:
        judged = {r.name: Judged(SAFE, r.ratio, "full attention by construction") for r in recipes if r.lossless}
        reusing = [recipe for recipe in recipes if not recipe.lossless]
        judged |= await _judge(Runner(model, config, _CHUNK_TOKENS, auxiliary), tasks, reusing, console)
    else:
        why = f"the engine is off by {max(oracles.full_attention, oracles.full_reuse):.1e} from the model's own code"
        judged = {recipe.name: Judged(UNSAFE, recipe.ratio, why) for recipe in recipes}
    verdict = Verdict(model.fingerprint.hex(), judged, auxiliary.fingerprint.hex() if auxiliary else "")
    # Before it is written, which fails where the model is mounted to be read only: what was measured is said then.
    if args.json:
        print(json.dumps({"oracles": asdict(oracles), **asdict(verdict)}), flush=True)
    else:
        Console().print(_table(model, oracles, judged))
    path = args.out or args.model / FILE
    try:
        verdict.write(path)
    except OSError as error:
        raise OSError(
            f"the verdict is not written: {error}; --out FILE takes another place, and workers look for {FILE} "
            "beside the model"
        ) from error
    console.print(f"written to {path}")
    return 0 if oracles.held else 1


def _recipes(model: Model, auxiliary: Model | None) -> list[Recipe]:
    """What the model can follow of the table, and the gateway's default with and without its modifiers."""
    base = DEFAULT_RECIPE.partition("+")[0]
    named = dict.fromkeys([*RECIPES, DEFAULT_RECIPE, f"{base}+corrected"])
    found = [recipe for recipe in map(modifiers.find, named) if recipe.links <= max(map(len, model.links), default=0)]
    return [recipe for recipe in found if auxiliary is not None or recipe.needs != SecondModel()]


async def _judge(
    runner: Runner, tasks: Sequence[Task], recipes: Sequence[Recipe], console: Console
) -> dict[str, Judged]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("questions", total=sum(len(task.samples) for task in tasks))

            def on_round(asked: int, doubtful: int) -> None:
                progress.update(bar, completed=asked, description=f"questions, {doubtful} recipes in doubt")

            return await judge(runner, tasks, recipes, on_round)
    finally:
        await runner.close()


def _table(model: Model, oracles: Oracles, judged: dict[str, Judged]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        title=f"{model.name}: off from its own code by {oracles.full_attention:.1e} with all recomputed, "
        f"{oracles.full_reuse:.1e} with nothing",
    )
    for column in ("recipe", "ratio", "verdict", "KL", "95%", "top-1", "n"):
        table.add_column(column, justify="left" if column in ("recipe", "verdict") else "right")
    for name, found in judged.items():
        figures = []
        if found.agreement is not None:
            figures = [f"{found.kl:.3f}", f"{found.low:.3f}-{found.high:.3f}", f"{found.agreement:.0%}"]
            figures.append(str(found.answers))
        table.add_row(name, f"{found.ratio:g}", found.verdict, *figures)
    if not oracles.held:
        table.caption = next(iter(judged.values())).why
    return table


if __name__ == "__main__":
    sys.exit(main())
