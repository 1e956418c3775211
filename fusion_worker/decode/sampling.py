"""Samples tokens from logits: greedy, or with temperature, top-k and top-p."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusionkv.protos.contract.requests import signed_seed
from fusionkv.protos.runtime.errors import FailedPrecondition

# Tokens among which those of a top_p are looked for first.
_LIKELY = 1024


class NotFinite(FailedPrecondition):
    """Logits that hold NaN or infinity, from which no token can be drawn."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits for this prompt are not finite (NaN or infinity): its weights are damaged, or "
            "numbers exceed its dtype; verify the files of the model, or set --dtype float32"
        )


class Best(NamedTuple):
    """The minimum and maximum of logits, NaN if one of them is, and the first token that has the maximum."""

    low: float
    high: float
    token: int


def best(logits: torch.Tensor) -> list[Best]:
    """Of each row of logits [rows, vocabulary]. Copied together: on a GPU, each copy waits for the step."""
    return best_of(figures(logits))


def figures(logits: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 3]: the numbers of `Best` of each row of logits, on their device."""
    return torch.stack([logits.amin(-1).double(), logits.amax(-1).double(), logits.argmax(-1).double()], dim=1)


def best_of(found: torch.Tensor) -> list[Best]:
    """Of the `figures` of each row."""
    return [Best(low, high, int(token)) for low, high, token in found.tolist()]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0 and top_p 0 or 1 disable the filter; seed None is random."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Sampler:
    """Samples the tokens of one request."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = torch.Generator()
        if params.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(signed_seed(params.seed))

    @property
    def greedy(self) -> bool:
        return self._params.temperature == 0.0

    def draw(self, logits: torch.Tensor, known: Best | None = None) -> int:
        """Samples a token id from logits, float32 [vocabulary]. known: their `best`, if it is known already.

        Raises NotFinite if one of them is NaN or infinite.
        """
        params = self._params
        if self.greedy:
            low, high, token = known or best(logits[None])[0]
            _check_finite(low, high)
            return token
        # float64, relative to the maximum: below a temperature of 1e-36 float32 would give inf - inf.
        logits = logits.cpu().double()
        _check_finite(*torch.stack(logits.aminmax()).tolist())
        logits, ids = logits.sub_(logits.max()).div_(params.temperature), torch.arange(len(logits))
        if 0 < params.top_k < len(logits):
            logits, ids = logits.topk(params.top_k)
        weights = logits.exp_()
        if 0.0 < params.top_p < 1.0:
            weights, places = _fewest(weights, params.top_p)
            ids = ids[places]
        # By one random number: torch.multinomial takes one for each token of the vocabulary, and 5 ms for 151,936.
        sums, drawn = weights.cumsum(0), torch.rand(1, generator=self._random, dtype=torch.float64)
        return int(ids[torch.searchsorted(sums, drawn * sums[-1], right=True).clamp_(max=len(ids) - 1)])


def _fewest(weights: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest of the largest weights that sum to a share of all of them, at least one; and their indices."""
    enough = share * weights.sum()
    # To order all of 151,936 takes 20 times as long, and every answer waits for it.
    for count in sorted({min(_LIKELY, len(weights)), len(weights)}):
        largest, places = weights.topk(count)
        fewest = max(1, int((largest.cumsum(0) - largest < enough).sum()))
        if fewest < count:
            break
    return largest[:fewest], places[:fewest]


def _check_finite(*numbers: float) -> None:
    if not all(map(math.isfinite, numbers)):
        raise NotFinite
