"""What `fusionkv check` found out about a model: a file beside it, which a worker reads at start."""

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
    """One recipe at a ratio, its own.

    verdict: SAFE, UNSAFE or UNDECIDED. why: in a sentence. kl: KL divergence of the next token's distribution from
    full attention's over its answers, in nats, the mean over the answers; low, high: its interval of 95%. agreement:
    share of those answers' tokens that stay the most likely. None where no answers were asked for.
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
        """Raises ValueError for what a file may hold and no check has written."""
        if self.verdict not in (SAFE, UNSAFE, UNDECIDED) or not isinstance(self.ratio, float):
            raise ValueError(f"{self.verdict!r} at ratio {self.ratio!r} is no verdict")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Recipes by name; one with modifiers that is not there has the verdict of the recipe without the last of them.

    What has no verdict was not judged, and is served.

    auxiliary: fingerprint of the second model that recipes which choose by one were checked with, empty without one.
    """

    fingerprint: str
    recipes: dict[str, Judged]
    auxiliary: str = ""

    def unsafe(self, recipe: Recipe, ratio: float) -> str:
        """Why full attention is to answer in a recipe's place; empty if the recipe may.

        All recomputed, and all kept, is full attention, whatever the recipe. Below the ratio at which a recipe was
        judged it is nearer to full reuse, and as unsafe as that.
        """
        name, judged = self._judged(recipe.name)
        if judged is None or recipe.lossless or (ratio == 1.0 and recipe.keep is None):
            return ""
        if judged.verdict != UNSAFE and ratio < judged.ratio:
            name, judged = self._judged("full_reuse")
        if judged is None or judged.verdict != UNSAFE:
            return ""
        asked = "" if recipe.name == name else f"recipe {recipe.name!r} at ratio {ratio:g} counts as {name!r}: "
        return f"{asked}recipe {name!r} is unsafe on this model by `fusionkv check`: {judged.why}"

    def lines(self) -> Iterator[str]:
        """What was found out, a recipe a line."""
        for name, judged in self.recipes.items():
            yield f"{name} at ratio {judged.ratio:g}: {judged.verdict}, {judged.why}"

    def write(self, path: Path) -> None:
        """Puts it into a file, in one step. Raises OSError."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def _judged(self, name: str) -> tuple[str, Judged | None]:
        """The verdict of the longest beginning of a name that has one, and that beginning."""
        while name not in self.recipes and "+" in name:
            name = name.rpartition("+")[0]
        return name, self.recipes.get(name)


def read(directory: Path, fingerprint: bytes, auxiliary: bytes = b"") -> Verdict:
    """The verdict beside a model; one about no recipe when there is none.

    auxiliary: fingerprint of the second model in use. What was judged with another one is left out.

    Raises:
        FailedPrecondition: it can't be read, or is of another model.
    """
    path = directory / FILE
    if not path.exists():
        return Verdict(fingerprint.hex(), {})
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        judged = {name: Judged(**judged) for name, judged in found["recipes"].items()}
        verdict = Verdict(found["fingerprint"], judged, found["auxiliary"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FailedPrecondition(f"can't read {path} ({error}): run `fusionkv check {directory}` again") from error
    if verdict.fingerprint != fingerprint.hex():
        raise FailedPrecondition(
            f"{path} is of another model, or this one was changed since: run `fusionkv check {directory}` again"
        )
    if verdict.auxiliary != auxiliary.hex():
        for name in [n for n, r in RECIPES.items() if r.needs == SecondModel()]:
            verdict.recipes.pop(name, None)
    return verdict
