"""`fusionkv check`: holds a model to the oracles and to small needle sets, and says which recipes are safe on it.

Writes fusionkv-check.json beside the model; a worker that serves the model refuses recipes that failed. A recipe is
safe when it keeps 90% of the answers that full attention gets right at the recipe's own ratio, on the tasks that the
model answers at all; when it answers none, when 90% of the first tokens are full attention's.
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

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.evaluation.cells import Cell, Measured
from fusionkv.fusion_worker.evaluation.needles import KINDS, needles
from fusionkv.fusion_worker.evaluation.oracles import Oracles, compare
from fusionkv.fusion_worker.evaluation.rows import primary
from fusionkv.fusion_worker.evaluation.runner import Runner
from fusionkv.fusion_worker.evaluation.samples import Task
from fusionkv.fusion_worker.evaluation.tasks import reference
from fusionkv.fusion_worker.methods.recipes import RECIPES, Recipe
from fusionkv.fusion_worker.methods.scoring import AuxiliaryAttention
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.verdict import Judged, Verdict
from fusionkv.models.tasks import TASKS
from fusionkv.protos.errors import ServiceError
from fusionkv.protos.settings import SettingsError, parse_bytes

KEPT = 0.9
_ANSWERED = 0.8  # share that full attention must get right for a task to count


@dataclass(frozen=True, slots=True)
class Score:
    """A recipe on the tasks that count: answers kept of those full attention got right; first tokens that agree."""

    kept: int
    right: int
    agreed: int
    samples: int

    def judge(self) -> Judged:
        if self.right:
            return Judged(self.kept >= KEPT * self.right, f"it keeps {self.kept} of {self.right} right answers")
        why = f"the model answers no task; {self.agreed} of {self.samples} first tokens are full attention's"
        return Judged(self.agreed >= KEPT * self.samples, why)


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
    add("--n", type=int, default=20, help="samples a task (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda[:N] (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    add("--pool-bytes", type=parse_bytes, default=1 << 30, metavar="SIZE", help="KV on the device (default: 1GiB)")
    add("--json", action="store_true", help="print the verdict as JSON")
    return parser


async def _check(args: argparse.Namespace, console: Console) -> int:
    config = WorkerConfig(model=args.model, pool_bytes=args.pool_bytes)
    model = models.load(args.model, args.device, args.dtype)
    oracles = await compare(args.model, model, config)
    recipes = [r for r in RECIPES.values() if not r.lossless and not isinstance(r.score, AuxiliaryAttention)]
    recipes = [r for r in recipes if r.links <= max(map(len, model.links), default=0)]
    if oracles.held:
        judged = await _judge(model, config, recipes, args.n, console)
    else:
        why = f"the engine is off by {max(oracles.full_attention, oracles.full_reuse):.1e} from the model's own code"
        judged = {recipe.name: Judged(False, why) for recipe in recipes}
    verdict = Verdict(model.fingerprint.hex(), judged)
    path = verdict.write(args.model)
    if args.json:
        print(json.dumps({"oracles": asdict(oracles), **asdict(verdict)}))
    else:
        Console().print(_table(model, oracles, judged))
        console.print(f"written to {path}")
    return 0 if oracles.held else 1


async def _judge(
    model: Model, config: WorkerConfig, recipes: Sequence[Recipe], count: int, console: Console
) -> dict[str, Judged]:
    tasks = [*(needles(kind, count) for kind in KINDS), *(reference(name, count) for name in TASKS)]
    cells = [Cell(RECIPES["full_attention"], 1.0), *(Cell(recipe, recipe.ratio) for recipe in recipes)]
    runner = Runner(model, config, chunk_tokens=512)
    found: list[tuple[Task, list[Measured]]] = []
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            for task in progress.track(tasks, description=f"check {model.name}"):
                (block,) = task.blocks(count)
                full = (await runner.measure(block, cells[:1], picture=False, timed=False))[0].values[primary(task)]
                if sum(full) >= _ANSWERED * count or task is tasks[0]:
                    found.append((task, await runner.measure(block, cells, picture=False, timed=False)))
    finally:
        await runner.close()
    return {cell.recipe.name: _score(found, i).judge() for i, cell in enumerate(cells) if i}


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
        table.add_row(name, f"{RECIPES[name].ratio:g}", "yes" if found.safe else "no", found.why)
    return table


if __name__ == "__main__":
    sys.exit(main())
