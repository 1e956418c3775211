"""Judges which recipes match full attention's answers, and recommends one, over as few questions as needed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import fsum, inf

from fusionkv.fusion_worker.evaluate.data.samples import Task
from fusionkv.fusion_worker.evaluate.report.cells import Cell
from fusionkv.fusion_worker.evaluate.report.statistics import Estimate, average
from fusionkv.fusion_worker.evaluate.runner import Runner
from fusionkv.fusion_worker.quality.verdict import (
    PRIMED,
    SAFE,
    UNDECIDED,
    UNMEASURED,
    UNSAFE,
    Choice,
    Default,
    Judged,
)
from fusionkv.protos.contract.recipes import RECIPES

# Maximum KL divergence from full attention, in nats: full attention's tokens keep exp(-0.1), 90%, of their
# probability.
BOUND = 0.1
# An answer whose mean divergence is above this many nats a token is another answer.
OFF = 1.0
# Questions between two decisions; and questions before the first one, since fewer make intervals too narrow.
ROUND, LEAST = 6, 12
# Confidence level of early decisions: repeated decisions at 95% would err more often than once in 20.
_EARLY = 0.99
# What may be recommended: recipes that choose by the question's attention, which cost no pass over all tokens.
CANDIDATES = tuple(
    Choice(name, ratio)
    for name, ratios in {
        "full_reuse": (0.0,),
        "full_reuse+primed": (0.0,),
        "prophetkv": (0.2, 0.3),
        "prophetkv+primed": (0.1, 0.2, 0.3),
        "deeplayer": (0.2, 0.3),
        "deeplayer+primed": (0.05, 0.1, 0.15, 0.2, 0.3),
    }.items()
    for ratio in ratios
)


@dataclass(slots=True)
class Tally:
    """A cell's results so far, over full attention's answers."""

    cell: Cell
    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)

    @property
    def choice(self) -> Choice:
        return Choice(self.cell.recipe.name, self.cell.ratio)

    @property
    def decided(self) -> bool:
        """Whether more questions are unlikely to change the verdict. Safe candidates go on, to be compared."""
        early = _verdict(average(self.kl, _EARLY)) if len(self.kl) >= LEAST else UNDECIDED
        if self.choice == PRIMED:
            return False
        return early == UNSAFE or (early == SAFE and self.choice not in CANDIDATES)

    @property
    def off(self) -> int:
        """Number of answers that are not full attention's any more. NaN counts."""
        return sum(not kl <= OFF for kl in self.kl)

    @property
    def kept(self) -> int:
        """Number of answers all of whose tokens stay the most likely: greedily, they are full attention's."""
        return sum(share == 1.0 for share in self.agreement)

    @property
    def order(self) -> tuple[float, int, float]:
        """Cheaper ones first, by the share of the context that is recomputed; then those that keep more answers."""
        return self.cell.ratio, -self.kept, fsum(self.kl)

    def judge(self) -> Judged:
        """The verdict."""
        kl, agreement = average(self.kl), fsum(self.agreement) / len(self.agreement)
        verdict = _verdict(kl) if kl.n >= LEAST else UNDECIDED
        why = (
            f"KL {kl.score:.3f} ({kl.low:.3f} to {kl.high:.3f}) from full attention over {kl.n} of its answers, "
            f"bound {BOUND:g}; {agreement:.0%} of their tokens stay the most likely"
        )
        figures = kl.score, kl.low, kl.high, agreement, kl.n, self.off, self.kept
        return Judged(verdict, self.cell.ratio, why, *figures)


async def judge(
    runner: Runner,
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    on_round: Callable[[int, int], None],
    seconds: float = inf,
) -> list[Tally]:
    """Measures cells over the tasks' samples in turn, each until it is decided.

    on_round: called with the number of samples so far, and the number of undecided cells. seconds: no round begins
    later, except for the first ones up to `LEAST` samples. Raises as `Runner.measure`.
    """
    tallies = [Tally(cell) for cell in cells]
    full, asked, began = Cell(RECIPES["full_attention"], 1.0), 0, time.monotonic()
    for block in filter(None, chain(*zip_longest(*(task.blocks(ROUND) for task in tasks)))):
        doubtful = [tally for tally in tallies if not tally.decided]
        on_round(asked, len(doubtful))
        if not doubtful or (asked >= LEAST and time.monotonic() - began > seconds):
            break
        measuring = [full, *(tally.cell for tally in doubtful)]
        measured = await runner.measure(block, measuring)
        for tally, cell in zip(doubtful, measured[1:], strict=True):
            tally.kl += cell.values["answer_kl"]
            tally.agreement += cell.values["answer_agreement"]
        asked += len(block.samples)
    return tallies


def recommend(tallies: Sequence[Tally]) -> Default:
    """The cheapest candidate that is safe, keeps no fewer answers than `PRIMED`, and has no more of them off."""
    (base,) = (tally for tally in tallies if tally.choice == PRIMED)
    answers = len(base.kl)
    if answers < LEAST:
        return UNMEASURED
    good = [
        tally
        for tally in tallies
        if tally.choice in CANDIDATES and len(tally.kl) == answers and tally.judge().verdict == SAFE
        if tally.kept >= base.kept and tally.off <= base.off
    ]
    if not good:
        why = f"of {answers} answers no recipe up to a ratio of 0.3 is safe and keeps as many as {PRIMED}"
        replaced = ", which is unsafe: full attention answers instead" * (base.judge().verdict == UNSAFE)
        return Default(PRIMED, f"by `fusionkv check`, {why}{replaced}")
    best = min(good, key=lambda tally: tally.order)
    why = (
        f"by `fusionkv check`, the cheapest safe recipe of those that keep at least as many of {answers} answers as "
        f"{PRIMED}: {best.kept} and {base.kept}, with {best.off} and {base.off} off by more than {OFF:g} nat"
    )
    return Default(best.choice, why)


def _verdict(kl: Estimate) -> str:
    if kl.high <= BOUND:
        return SAFE
    return UNSAFE if kl.low > BOUND else UNDECIDED
