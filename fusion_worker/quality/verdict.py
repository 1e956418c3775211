"""What `fusionkv check` found out about a model: a file beside it, which a worker reads at start."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fusionkv.fusion_worker.recipes.recipes import RECIPES, Recipe
from fusionkv.fusion_worker.select.base import SecondModel
from fusionkv.protos.runtime.errors import FailedPrecondition

FILE = "fusionkv-check.json"


@dataclass(frozen=True, slots=True)
class Judged:
    """One recipe. ratio: its own, at which it was asked. why: the figures behind it, in a sentence."""

    safe: bool
    ratio: float
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Recipes by name, without modifiers; one that is not there was not checked, and is not refused.

    auxiliary: fingerprint of the second model that recipes which choose by one were checked with, empty without one.
    """

    fingerprint: str
    recipes: dict[str, Judged]
    auxiliary: str = ""

    def check(self, recipe: Recipe, ratio: float) -> None:
        """Raises FailedPrecondition for a recipe, with or without modifiers, that is not known to be safe at a ratio.

        All recomputed, and all kept, is full attention, whatever the recipe. Below the ratio at which a recipe was
        checked it is nearer to full reuse, which has to be safe then.
        """
        judged = self.recipes.get(recipe.name.partition("+")[0])
        if judged is None or (ratio == 1.0 and recipe.keep is None):
            return
        if not judged.safe:
            raise FailedPrecondition(
                f"recipe {recipe.name!r} failed `fusionkv check` on this model: {judged.why}. Use another recipe, or "
                f"delete {FILE} to do without the check"
            )
        reuse = self.recipes.get("full_reuse")
        if ratio < judged.ratio and not (reuse is not None and reuse.safe):
            raise FailedPrecondition(
                f"recipe {recipe.name!r} is safe on this model at ratio {judged.ratio:g} by `fusionkv check`, and "
                f"full reuse is not: ask for {judged.ratio:g} or more instead of {ratio:g}, or delete {FILE} to do "
                "without the check"
            )

    def write(self, path: Path) -> None:
        """Puts it into a file, in one step. Raises OSError."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def read(directory: Path, fingerprint: bytes, auxiliary: bytes = b"") -> Verdict:
    """The verdict beside a model; one that refuses nothing when there is none.

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
