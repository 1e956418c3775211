"""Keeps a recipe's quality above a floor: what strays from full attention recomputes more, in the end everything."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from fusionkv.fusion_worker.recipes.recipes import Recipe

# Answers that are looked at before the ratio is raised: with 20, a true share of 95% falls below 80% once in 400.
SAMPLES = 20
_LEAST = 0.15  # the first raised ratio, for a recipe that recomputes less
_MOST_KEYS = 1024
# A recipe, a corpus, and whether less than the recipe's own ratio was asked for: who asks for little raises it for
# those who do the same, and for nobody else.
_Key = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class Allowed:
    """The ratio that a request gets. why: what it was raised for, empty when it is the one asked for.

    key, level: what its answer counts for, and how far that was up.
    """

    ratio: float
    why: str
    key: _Key
    level: int


@dataclass(slots=True)
class _Seen:
    """The latest answers at one level, same as full attention's or not, and how far it is up."""

    same: "deque[bool]" = field(default_factory=lambda: deque(maxlen=SAMPLES))
    level: int = 0
    why: str = ""


class Fallback:
    """Raises ratios by recipe and corpus; lowers none again, but forgets all but the 1,024 that were asked for last.

    floor: the least share of answers that must be full attention's; 0 raises nothing.
    """

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._seen: OrderedDict[_Key, _Seen] = OrderedDict()

    def ratio(self, recipe: Recipe, corpus: str, asked: float) -> Allowed:
        """The ratio to use for a request that asks for `asked`."""
        key = (recipe.name, corpus, asked < recipe.ratio)
        seen = self._seen.get(key)
        if seen is None or seen.level == 0 or recipe.lossless:
            return Allowed(asked, "", key, 0)
        self._seen.move_to_end(key)
        if seen.level == 1 and not recipe.fixed:
            raised = max(2 * asked, _LEAST)
            if raised < 1.0:
                return Allowed(raised, seen.why, key, seen.level)
        return Allowed(1.0, seen.why, key, seen.level)

    def record(self, allowed: Allowed, same: bool) -> None:
        """One answer at that ratio, held against full attention's; dropped when the ratio was raised since."""
        seen = self._seen.setdefault(allowed.key, _Seen())
        self._seen.move_to_end(allowed.key)
        if len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)
        if allowed.level != seen.level:
            return
        seen.same.append(same)
        share = sum(seen.same) / SAMPLES
        if len(seen.same) == SAMPLES and share < self._floor:
            seen.level += 1
            seen.why = f"{share:.0%} of {SAMPLES} answers were full attention's, below the floor of {self._floor:.0%}"
            seen.same.clear()
