"""What `fusionkv check` found out about a model: a file beside it, which a worker reads at start."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fusionkv.protos.errors import FailedPrecondition

FILE = "fusionkv-check.json"


@dataclass(frozen=True, slots=True)
class Judged:
    """One recipe at its own ratio. why: the figures behind it, in a sentence."""

    safe: bool
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Recipes by name, without modifiers; one that is not there was not checked, and is not refused."""

    fingerprint: str
    recipes: dict[str, Judged]

    def check(self, recipe: str) -> None:
        """Raises FailedPrecondition when the recipe, with or without modifiers, was found not to be safe."""
        judged = self.recipes.get(recipe.partition("+")[0])
        if judged is not None and not judged.safe:
            raise FailedPrecondition(
                f"recipe {recipe!r} failed `fusionkv check` on this model: {judged.why}. Use another recipe, or "
                f"delete {FILE} to do without the check"
            )

    def write(self, directory: Path) -> Path:
        path = directory / FILE
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        return path


def read(directory: Path, fingerprint: bytes) -> Verdict:
    """The verdict beside a model; one that refuses nothing when there is none.

    Raises:
        FailedPrecondition: it can't be read, or is of another model.
    """
    path = directory / FILE
    if not path.exists():
        return Verdict(fingerprint.hex(), {})
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict(found["fingerprint"], {name: Judged(**judged) for name, judged in found["recipes"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FailedPrecondition(f"can't read {path} ({error}): run `fusionkv check {directory}` again") from error
    if verdict.fingerprint != fingerprint.hex():
        raise FailedPrecondition(
            f"{path} is of another model, or this one was changed since: run `fusionkv check {directory}` again"
        )
    return verdict
