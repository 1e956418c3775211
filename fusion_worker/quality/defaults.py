"""What the recipe `default` means on a model: what `fusionkv check` recommended for it, or `UNMEASURED`."""

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
    """What `default` means on a model. why: the reason, as a sentence."""

    choice: Choice
    why: str

    def __str__(self) -> str:
        return f"{self.choice}: {self.why}"


# Of the recipes that need nothing learned, the nearest to full attention at 0.2 on the few questions that SmolLM2 and
# Qwen2.5-Coder-0.5B were asked; not measured on other models (docs/journal/encoding.md).
PRIMED = Choice("deeplayer+primed", 0.2)
UNMEASURED = Default(PRIMED, "`fusionkv check` recommends nothing else for this model")
