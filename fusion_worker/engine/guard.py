"""Keeps a recipe's quality above a floor: what strays from full attention recomputes more, in the end everything."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from fusionkv.fusion_worker.methods.recipes import Recipe

# Answers that are looked at before the ratio is raised: with 20, a true share of 95% falls below 80% once in 400.
SAMPLES = 20
_LEAST = 0.15  # the first raised ratio, for a recipe that recomputes less
_MOST_KEYS = 1024


@dataclass(slots=True)
class _Seen:
    """The latest answers under one recipe over one corpus, same as full attention's or not, and how far it is up."""

    same: "deque[bool]" = field(default_factory=lambda: deque(maxlen=SAMPLES))
    level: int = 0
    why: str = ""


class Guard:
    """Raises ratios by recipe and corpus; never lowers one again while the worker lives.

    floor: the least share of answers that must be full attention's; 0 raises nothing.
    """

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._seen: OrderedDict[tuple[str, str], _Seen] = OrderedDict()

    def ratio(self, recipe: Recipe, corpus: str, asked: float) -> tuple[float, str]:
        """The ratio to use instead of the one asked for, and why it is another; empty when it is not."""
        seen = self._seen.get((recipe.name, corpus))
        if seen is None or seen.level == 0 or recipe.lossless:
            return asked, ""
        if seen.level == 1 and not recipe.fixed:
            raised = max(2 * asked, _LEAST)
            if raised < 1.0:
                return raised, seen.why
        return 1.0, seen.why

    def record(self, recipe: Recipe, corpus: str, same: bool) -> None:
        """One answer under `ratio`'s ratio, held against full attention's."""
        key = (recipe.name, corpus)
        seen = self._seen.setdefault(key, _Seen())
        self._seen.move_to_end(key)
        if len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)
        seen.same.append(same)
        share = sum(seen.same) / SAMPLES
        if len(seen.same) == SAMPLES and share < self._floor:
            seen.level += 1
            seen.why = f"{share:.0%} of {SAMPLES} answers were full attention's, below the floor of {self._floor:.0%}"
            seen.same.clear()
