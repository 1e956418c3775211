"""The file of `fusionkv check` in a model's directory: which recipes are safe, and what `default` means."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fusionkv.protos.contract.recipes import RECIPES, Recipe, find_recipe
from fusionkv.protos.contract.selectors import SecondModel
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument, printable

FILE = "fusionkv-check.json"
SAFE, UNSAFE, UNDECIDED = "safe", "unsafe", "not enough evidence"
# Of what all recipes do: a verdict says nothing of a recipe that has changed since.
_RECIPES = hashlib.sha256(repr([replace(r, description="") for r in RECIPES.values()]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe at a ratio, for requests that set none."""

    recipe: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.recipe} at {self.ratio:g}"


@dataclass(frozen=True, slots=True)
class Default:
    """What `default` means on a model. why: the reason, as a sentence."""

    choice: Choice
    why: str

    def __str__(self) -> str:
        return f"{self.choice}: {self.why}"


# Of the recipes that need nothing learned, the nearest to full attention at 0.2 on the few questions that SmolLM2 and
# Qwen2.5-Coder-0.5B were asked (docs/journal/encoding.md); docs/quality.md has what four models keep.
PRIMED = Choice("deeplayer+primed", 0.2)
UNMEASURED = Default(PRIMED, "`fusionkv check` recommends nothing else for this model")


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a recipe at a ratio.

    Attributes:
        verdict: SAFE, UNSAFE or UNDECIDED.
        why: the reason, as a sentence.
        kl: mean KL divergence of the next token's distribution from full attention's, over full attention's answers,
            in nats; None without answers.
        low, high: 95% confidence interval of `kl`.
        agreement: share of those answers' tokens that stay the most likely; None without answers.
        off: answers whose mean divergence is above 1 nat a token.
        kept: answers all of whose tokens stay the most likely.
    """

    verdict: str
    ratio: float
    why: str
    kl: float | None = None
    low: float | None = None
    high: float | None = None
    agreement: float | None = None
    answers: int = 0
    off: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for values that `fusionkv check` does not write."""
        right = isinstance(self.ratio, float) and isinstance(self.why, str)
        if self.verdict not in (SAFE, UNSAFE, UNDECIDED) or not right:
            raise ValueError(f"{self.verdict!r} at ratio {self.ratio!r} is not a verdict, or says not why")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdicts on a model's recipes.

    A recipe with modifiers that has no verdict gets that of the recipe without its last modifier. Recipes without any
    verdict are allowed.

    Attributes:
        fingerprint: of the model, in hex.
        recipes: verdicts by recipe, for one or more ratios, ascending.
        auxiliary: fingerprint in hex of the auxiliary model of the check; empty without one.
        default: what `default` means on the model.
        definitions: digest of what all recipes did at the time of the check.
    """

    fingerprint: str
    recipes: dict[str, tuple[Judged, ...]]
    auxiliary: str = ""
    default: Default = UNMEASURED
    definitions: str = _RECIPES

    @classmethod
    def read(cls, directory: Path, fingerprint: bytes, auxiliary: bytes = b"") -> "Verdict":
        """Reads the verdicts in a model's directory; there may be none.

        auxiliary: fingerprint of the auxiliary model in use. Verdicts that depend on another one are left out.
        Raises FailedPrecondition if the file can't be read, or is for another model or of recipes that have changed.
        """
        path, again = directory / FILE, f"run `fusionkv check {directory}` again"
        if not path.exists():
            return cls(fingerprint.hex(), {})
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            judged = {name: tuple(Judged(**one) for one in ratios) for name, ratios in data["recipes"].items()}
            chosen = data["default"]
            default = Default(Choice(**chosen["choice"]), chosen["why"])
            find_recipe(default.choice.recipe).ratio_for(default.choice.ratio)
            verdict = cls(data["fingerprint"], judged, data["auxiliary"], default, data["definitions"])
            "".join(verdict.lines()).encode()  # JSON may hold half of a surrogate pair, which no answer can
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidArgument) as error:
            raise FailedPrecondition(printable(f"can't read {path} ({error}): {again}")) from error
        if verdict.fingerprint != fingerprint.hex():
            raise FailedPrecondition(f"{path} is for another model, or this model has changed since: {again}")
        if verdict.definitions != _RECIPES:
            raise FailedPrecondition(f"{path} is of recipes that have changed since: {again}, or delete the file")
        if verdict.auxiliary != auxiliary.hex():
            for name in [n for n, r in RECIPES.items() if r.needs == SecondModel()]:
                verdict.recipes.pop(name, None)
        return verdict

    def unsafe(self, recipe: Recipe, ratio: float) -> str:
        """Why full attention has to replace a recipe; empty if the recipe is allowed.

        At a ratio of 1 without eviction, every recipe is full attention. A recipe is judged by its largest checked
        ratio up to `ratio`. Below its smallest one, it is judged like full_reuse.
        """
        name, judged = self._judged(recipe.name, ratio)
        if judged is None or recipe.lossless or (ratio == 1.0 and recipe.keep is None):
            return ""
        if judged.verdict != UNSAFE and ratio < judged.ratio:
            name, judged = self._judged("full_reuse", ratio)
        if judged is None or judged.verdict != UNSAFE:
            return ""
        judged_as = "" if recipe.name == name else f"recipe {recipe.name!r} at ratio {ratio:g} counts as {name!r}: "
        return f"{judged_as}recipe {name!r} is unsafe on this model by `fusionkv check`: {judged.why}"

    @property
    def judged(self) -> Iterator[tuple[str, Judged]]:
        """Every verdict, with the name of its recipe."""
        return ((name, one) for name, ratios in self.recipes.items() for one in ratios)

    def lines(self) -> Iterator[str]:
        for name, judged in self.judged:
            yield f"{name} at ratio {judged.ratio:g}: {judged.verdict}, {judged.why}"
        yield f"default is {self.default}"

    def write(self, path: Path) -> None:
        """Writes the verdicts to a file atomically. Raises OSError."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def _judged(self, name: str, ratio: float) -> tuple[str, Judged | None]:
        """The longest prefix of a recipe's name that has verdicts, and the one for a ratio."""
        while name not in self.recipes and "+" in name:
            name = name.rpartition("+")[0]
        judged = self.recipes.get(name, ())
        return name, next((one for one in reversed(judged) if one.ratio <= ratio), judged[0] if judged else None)
