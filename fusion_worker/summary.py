"""The figures of a request: tokens, seconds and reasons, from which the reply's summary is made."""

from dataclasses import dataclass, field

import torch

from fusionkv.fusion_worker.load.placement import Stages
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.fusion_worker.recipes.recipes import Recipe


@dataclass(slots=True)
class Summary:
    """The figures of a request. Seconds and counts are those of answer.v1.Summary.

    Attributes:
        laid: the prompt as it lies in the pool: anchor tokens replace the text of compressed chunks.
        degraded: why the cache was not used; empty if it was.
        raised: why the ratio is higher than the requested one; empty if it is not.
        first_logits: float [vocabulary] of the first token, kept for answers that are compared with full attention.
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
        """Context tokens kept for decoding; 0 keeps all, as when full attention replaces the recipe."""
        replaced = self.degraded or (self.ratio == 1.0 and (self.raised or self.recipe.anchored))
        return 0 if replaced else self.recipe.kept(self.laid.context_tokens)

    @property
    def reused(self) -> int:
        return self.prompt.context_tokens - self.lossless - self.recomputed
