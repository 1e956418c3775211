"""`fusionkv check`: holds a model to the oracles and to small needle sets, and says which recipes are safe on it.

Writes fusionkv-check.json beside the model; a worker that serves the model refuses recipes that failed, and ratios
below the one that was checked where full reuse failed. A recipe is safe when it keeps 90% of the answers that full
attention gets right at the recipe's own ratio, on the tasks that the model answers at all; when it answers none, when
90% of the first tokens are full attention's.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fusionkv.bench.quality.data.needles import KINDS, needles
from fusionkv.bench.quality.data.samples import Task
from fusionkv.bench.quality.data.tasks import reference
from fusionkv.bench.quality.oracles import Oracles, compare
from fusionkv.bench.quality.report.cells import Cell, Measured
from fusionkv.bench.quality.report.rows import primary
from fusionkv.bench.quality.runner import Runner
from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.quality.verdict import FILE, Judged, Verdict
from fusionkv.fusion_worker.recipes.recipes import RECIPES, Recipe
from fusionkv.fusion_worker.select.base import SecondModel
from fusionkv.models.tasks import TASKS
from fusionkv.protos.runtime.errors import ServiceError
from fusionkv.protos.runtime.settings import SettingsError, parse_bytes, positive

KEPT = 0.9
_ANSWERED = 0.8  # share that full attention must get right for a task to count


@dataclass(frozen=True, slots=True)
class Score:
    """A recipe on the tasks that count: answers kept of those full attention got right; first tokens that agree."""

    kept: int
    right: int
    agreed: int
    samples: int

    def judge(self, ratio: float) -> Judged:
        if self.right:
            why = f"it keeps {self.kept} of {self.right} right answers"
            return Judged(self.kept >= KEPT * self.right, ratio, why)
        why = f"the model answers no task; {self.agreed} of {self.samples} first tokens are full attention's"
        return Judged(self.agreed >= KEPT * self.samples, ratio, why)


def main() -> int:
    args = _parser().parse_args()
    console = Console(stderr=True, highlight=False)
    try:
        return asyncio.run(_check(args, console))
    except (ServiceError, SettingsError, OSError, ValueError) as error:
        print(f"fusionkv check: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusionkv check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="directory of a Hugging Face causal language model")
    add("--auxiliary", type=Path, metavar="MODEL", help="small second model, to check the recipe cacheclip with")
    add("--n", type=positive, default=20, help="samples a task (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda[:N] (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    add("--pool-bytes", type=parse_bytes, default=1 << 30, metavar="SIZE", help="KV on the device (default: 1GiB)")
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
    config = WorkerConfig(model=args.model, pool_bytes=args.pool_bytes)
    model = models.load(args.model, args.device, args.dtype)
    auxiliary = models.load(args.auxiliary, "cpu") if args.auxiliary else None
    oracles = await compare(args.model, model, config)
    recipes = [r for r in RECIPES.values() if not r.lossless and r.links <= max(map(len, model.links), default=0)]
    recipes = [r for r in recipes if auxiliary is not None or r.needs != SecondModel()]
    if oracles.held:
        judged = await _judge(Runner(model, config, 512, auxiliary), recipes, args.n, console)
    else:
        why = f"the engine is off by {max(oracles.full_attention, oracles.full_reuse):.1e} from the model's own code"
        judged = {recipe.name: Judged(False, recipe.ratio, why) for recipe in recipes}
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


async def _judge(runner: Runner, recipes: Sequence[Recipe], count: int, console: Console) -> dict[str, Judged]:
    tasks = [*(needles(kind, count) for kind in KINDS), *(reference(name, count) for name in TASKS)]
    cells = [Cell(RECIPES["full_attention"], 1.0), *(Cell(recipe, recipe.ratio) for recipe in recipes)]
    found: list[tuple[Task, list[Measured]]] = []
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            for task in progress.track(tasks, description="check"):
                (block,) = task.blocks(count)
                full = (await runner.measure(block, cells[:1], picture=False, timed=False))[0].values[primary(task)]
                if sum(full) >= _ANSWERED * count or task is tasks[0]:
                    found.append((task, await runner.measure(block, cells, picture=False, timed=False)))
    finally:
        await runner.close()
    return {cell.recipe.name: _score(found, i).judge(cell.ratio) for i, cell in enumerate(cells) if i}


def _score(found: Sequence[tuple[Task, Sequence[Measured]]], cell: int) -> Score:
    kept = right = agreed = samples = 0
    for task, measured in found:
        full, own = (measured[i].values[primary(task)] for i in (0, cell))
        if sum(full) >= _ANSWERED * len(full):
            right += sum(value == 1.0 for value in full)
            kept += sum(a == b == 1.0 for a, b in zip(full, own, strict=True))
        agreed += sum(value == 1.0 for value in measured[cell].values["agreement"])
        samples += len(full)
    return Score(kept, right, agreed, samples)


def _table(model: Model, oracles: Oracles, judged: dict[str, Judged]) -> Table:
    table = Table(
        title=f"{model.name}: off from its own code by {oracles.full_attention:.1e} with all recomputed, "
        f"{oracles.full_reuse:.1e} with nothing"
    )
    for column in ("recipe", "ratio", "safe", "because"):
        table.add_column(column, justify="right" if column == "ratio" else "left")
    for name, found in judged.items():
        table.add_row(name, f"{found.ratio:g}", "yes" if found.safe else "no", found.why)
    return table


if __name__ == "__main__":
    sys.exit(main())
