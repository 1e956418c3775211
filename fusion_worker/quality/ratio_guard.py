"""Raises the ratios of recipes whose answers differ too often from full attention's."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from fusionkv.protos.contract.recipes import Recipe

# Number of latest answers that decide. With 20, a true share of 95% falls below 80% once in 400 decisions.
SAMPLES = 20
_MIN_RAISED = 0.15  # minimum of a raised ratio
_MAX_KEYS = 1024
# A recipe, a corpus, and whether the request's ratio was below the recipe's: low ratios are raised separately.
_Key = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class Allowed:
    """The ratio of a request.

    why: why it was raised; empty if it is the requested one. key, level: the key that the answer is recorded for, and
    its level at the time.
    """

    ratio: float
    why: str
    key: _Key
    level: int


@dataclass(slots=True)
class _Record:
    """The latest answers of a key at its current level, and whether each matched full attention."""

    same: "deque[bool]" = field(default_factory=lambda: deque(maxlen=SAMPLES))
    level: int = 0
    why: str = ""


class RatioGuard:
    """Raises ratios by recipe and corpus, and never lowers them.

    Only the 1,024 keys whose answers were compared, or ratios raised, last are remembered.
    """

    def __init__(self, floor: float) -> None:
        """floor: minimum share of answers that match full attention; 0 never raises a ratio."""
        self._floor = floor
        self._records: OrderedDict[_Key, _Record] = OrderedDict()

    def ratio(self, recipe: Recipe, corpus: str, requested: float) -> Allowed:
        """The ratio to use for a request that asks for `requested`."""
        key = (recipe.name, corpus, requested < recipe.ratio)
        record = self._records.get(key)
        if record is None or record.level == 0 or recipe.lossless:
            return Allowed(requested, "", key, 0)
        self._records.move_to_end(key)
        if record.level == 1 and not recipe.fixed:
            raised = max(2 * requested, _MIN_RAISED)
            if raised < 1.0:
                return Allowed(raised, record.why, key, record.level)
        return Allowed(1.0, record.why, key, record.level)

    def record(self, allowed: Allowed, same: bool) -> None:
        """Records whether an answer matched full attention; ignored if the ratio has been raised since."""
        record = self._records.setdefault(allowed.key, _Record())
        self._records.move_to_end(allowed.key)
        if len(self._records) > _MAX_KEYS:
            self._records.popitem(last=False)
        if allowed.level != record.level:
            return
        record.same.append(same)
        share = sum(record.same) / SAMPLES
        if len(record.same) == SAMPLES and share < self._floor:
            record.level += 1
            record.why = (
                f"{share:.0%} of {SAMPLES} answers matched full attention, below the floor of {self._floor:.0%}"
            )
            record.same.clear()
