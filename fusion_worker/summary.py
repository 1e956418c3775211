"""What a request took, as its answer's figures are made of it."""

from dataclasses import dataclass, field

import torch

from fusionkv.fusion_worker.load.placement import Stages
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.recipes.recipes import Recipe


@dataclass(slots=True)
class Summary:
    """What a request took. Seconds and counts as in answer.v1.Summary.

    laid: the prompt with what stands for its chunks, where that is not their text. degraded: why the cache was not
    used. raised: why the ratio is not the one asked for.
    """

    prompt: Prompt
    laid: Prompt
    recipe: Recipe
    ratio: float
    stages: Stages = field(default_factory=Stages)
    finish: str = ""
    lossless: int = 0
    recomputed: int = 0
    corrected: int = 0
    generated: int = 0
    degraded: str = ""
    raised: str = ""
    first_logits: torch.Tensor | None = None

    @property
    def kept(self) -> int:
        """Context tokens that stay for decoding, 0 for all: so it is when full attention takes the recipe's place."""
        replaced = self.degraded or (self.ratio == 1.0 and (self.raised or self.recipe.anchored))
        return 0 if replaced else self.recipe.kept(self.laid.context_tokens)

    @property
    def reused(self) -> int:
        return self.prompt.context_tokens - self.lossless - self.recomputed
