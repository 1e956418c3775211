"""Judges which recipes match full attention's answers, by confidence intervals over as few questions as needed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import fsum

from fusionkv.bench.quality.data.samples import Block, Task
from fusionkv.bench.quality.report.cells import Cell
from fusionkv.bench.quality.report.statistics import Estimate, average
from fusionkv.bench.quality.runner import Runner
from fusionkv.fusion_worker.quality.fallback import SAFE, UNDECIDED, UNSAFE, Judged
from fusionkv.fusion_worker.recipes import RECIPES, Recipe

# Maximum KL divergence from full attention, in nats: full attention's tokens keep exp(-0.1), 90%, of their
# probability.
BOUND = 0.1
# Questions between two decisions; and questions before the first one, since fewer make intervals too narrow.
ROUND, LEAST = 6, 12
# Confidence level of early decisions: repeated decisions at 95% would err more often than once in 20.
_EARLY = 0.99


@dataclass(slots=True)
class Tally:
    """A recipe's results so far, over full attention's answers."""

    recipe: Recipe
    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)

    @property
    def decided(self) -> bool:
        """Whether more questions are unlikely to change the verdict."""
        return len(self.kl) >= LEAST and _verdict(average(self.kl, _EARLY)) != UNDECIDED

    def judge(self) -> Judged:
        """The verdict."""
        kl, agreement = average(self.kl), fsum(self.agreement) / len(self.agreement)
        verdict = _verdict(kl) if kl.n >= LEAST else UNDECIDED
        why = (
            f"KL {kl.score:.3f} ({kl.low:.3f} to {kl.high:.3f}) from full attention over {kl.n} of its answers, "
            f"bound {BOUND:g}; {agreement:.0%} of their tokens stay the most likely"
        )
        return Judged(verdict, self.recipe.ratio, why, kl.score, kl.low, kl.high, agreement, kl.n)


async def judge(
    runner: Runner, tasks: Sequence[Task], recipes: Sequence[Recipe], on_round: Callable[[int, int], None]
) -> dict[str, Judged]:
    """Judges recipes, each at its default ratio, over the tasks' samples in turn; returns the verdicts by name.

    on_round: called with the number of samples so far, and the number of undecided recipes. Raises as
    `Runner.measure`.
    """
    tallies = [Tally(recipe) for recipe in recipes]
    full, asked = Cell(RECIPES["full_attention"], 1.0), 0
    for block in _in_turn(tasks):
        doubtful = [tally for tally in tallies if not tally.decided]
        on_round(asked, len(doubtful))
        if not doubtful:
            break
        cells = [full, *(Cell(tally.recipe, tally.recipe.ratio) for tally in doubtful)]
        measured = await runner.measure(block, cells, timed=False, picture=False)
        for tally, found in zip(doubtful, measured[1:], strict=True):
            tally.kl += found.values["answer_kl"]
            tally.agreement += found.values["answer_agreement"]
        asked += len(block.samples)
    return {tally.recipe.name: tally.judge() for tally in tallies}


def _in_turn(tasks: Sequence[Task]) -> Iterator[Block]:
    """Yields blocks of all tasks in turn."""
    return (block for block in chain(*zip_longest(*(task.blocks(ROUND) for task in tasks))) if block is not None)


def _verdict(kl: Estimate) -> str:
    if kl.high <= BOUND:
        return SAFE
    return UNSAFE if kl.low > BOUND else UNDECIDED
