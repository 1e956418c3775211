"""The verdicts of `fusionkv check` on a model's recipes: a file in the model's directory, read by workers."""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fusionkv.fusion_worker.recipes.recipes import RECIPES, Recipe
from fusionkv.fusion_worker.select.base import SecondModel
from fusionkv.protos.runtime.errors import FailedPrecondition

log = logging.getLogger(__name__)
FILE = "fusionkv-check.json"
SAFE, UNSAFE, UNDECIDED = "safe", "unsafe", "not enough evidence"


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a recipe at its default ratio.

    Attributes:
        verdict: SAFE, UNSAFE or UNDECIDED.
        why: the reason, as a sentence.
        kl: mean KL divergence of the next token's distribution from full attention's, over full attention's answers,
            in nats; None without answers.
        low, high: 95% confidence interval of `kl`.
        agreement: share of those answers' tokens that stay the most likely; None without answers.
    """

    verdict: str
    ratio: float
    why: str
    kl: float | None = None
    low: float | None = None
    high: float | None = None
    agreement: float | None = None
    answers: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for values that `fusionkv check` does not write."""
        if self.verdict not in (SAFE, UNSAFE, UNDECIDED) or not isinstance(self.ratio, float):
            raise ValueError(f"{self.verdict!r} at ratio {self.ratio!r} is not a verdict")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdicts on a model's recipes.

    A recipe with modifiers that has no verdict gets that of the recipe without its last modifier. Recipes without any
    verdict are allowed. fingerprint, auxiliary: fingerprints in hex of the model and of the auxiliary model of the
    check; the latter is empty without one.
    """

    fingerprint: str
    recipes: dict[str, Judged]
    auxiliary: str = ""

    def unsafe(self, recipe: Recipe, ratio: float) -> str:
        """Why full attention has to replace a recipe; empty if the recipe is allowed.

        At a ratio of 1 without eviction, every recipe is full attention. Below its checked ratio, a recipe is judged
        like full_reuse.
        """
        name, judged = self._judged(recipe.name)
        if judged is None or recipe.lossless or (ratio == 1.0 and recipe.keep is None):
            return ""
        if judged.verdict != UNSAFE and ratio < judged.ratio:
            name, judged = self._judged("full_reuse")
        if judged is None or judged.verdict != UNSAFE:
            return ""
        judged_as = "" if recipe.name == name else f"recipe {recipe.name!r} at ratio {ratio:g} counts as {name!r}: "
        return f"{judged_as}recipe {name!r} is unsafe on this model by `fusionkv check`: {judged.why}"

    def lines(self) -> Iterator[str]:
        for name, judged in self.recipes.items():
            yield f"{name} at ratio {judged.ratio:g}: {judged.verdict}, {judged.why}"

    def write(self, path: Path) -> None:
        """Writes the verdicts to a file atomically. Raises OSError."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def _judged(self, name: str) -> tuple[str, Judged | None]:
        """The longest prefix of a recipe's name that has a verdict, and the verdict."""
        while name not in self.recipes and "+" in name:
            name = name.rpartition("+")[0]
        return name, self.recipes.get(name)


def read(directory: Path, fingerprint: bytes, auxiliary: bytes = b"") -> Verdict:
    """Reads the verdicts in a model's directory; without a file, there are none.

    auxiliary: fingerprint of the auxiliary model in use. Verdicts that depend on another one are left out.

    Raises:
        FailedPrecondition: the file can't be read, or is for another model.
    """
    path = directory / FILE
    if not path.exists():
        return Verdict(fingerprint.hex(), {})
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        judged = {name: Judged(**judged) for name, judged in data["recipes"].items()}
        verdict = Verdict(data["fingerprint"], judged, data["auxiliary"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FailedPrecondition(f"can't read {path} ({error}): run `fusionkv check {directory}` again") from error
    if verdict.fingerprint != fingerprint.hex():
        raise FailedPrecondition(
            f"{path} is for another model, or this model has changed since: run `fusionkv check {directory}` again"
        )
    if verdict.auxiliary != auxiliary.hex():
        for name in [n for n, r in RECIPES.items() if r.needs == SecondModel()]:
            verdict.recipes.pop(name, None)
    return verdict
