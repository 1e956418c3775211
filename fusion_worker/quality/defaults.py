"""What the recipe `default` means on a model: what was measured to be best on it, or prophetkv at 0.2."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe at a ratio, for requests that set none."""

    recipe: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.recipe} at {self.ratio:g}"


@dataclass(frozen=True, slots=True)
class Default:
    """What `default` means on a model.

    Attributes:
        choice: what it means. If its recipe corrects, only where a correction was validated.
        uncorrected: what it means elsewhere; `choice` again if that corrects nothing.
        why: the reason, as a sentence.
    """

    choice: Choice
    uncorrected: Choice
    why: str

    def __str__(self) -> str:
        either = f", {self.uncorrected} without a validated correction" if self.uncorrected != self.choice else ""
        return f"{self.choice}{either}: {self.why}"


# The best by KL of those measured on SmolLM2, with a trained correction (docs/quality.md).
MIDLAYER = Choice("midlayer+corrected", 0.12)
# On Qwen2.5-Coder-0.5B it keeps 23 of 27 right answers, prophetkv 20 (docs/quality.md).
DEEPLAYER = Choice("deeplayer", 0.2)
# No correction can mislead it.
PROPHETKV = Choice("prophetkv", 0.2)
UNMEASURED = Default(PROPHETKV, PROPHETKV, "`fusionkv check` recommends nothing else for this model")
