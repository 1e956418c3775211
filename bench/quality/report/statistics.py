"""How sure a score is: intervals of 95%, unless a level is given, over the same samples for all recipes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_Z = 1.959963984540054  # of the normal distribution, both tails together 5%
RESAMPLES = 2000
_SEED = 20_261_120


@dataclass(frozen=True, slots=True)
class Estimate:
    """A score and its interval."""

    score: float
    low: float
    high: float
    n: int


def wilson(right: int, n: int) -> Estimate:
    """A proportion with Wilson's interval (1927), which stays within 0..1 and is not empty at 0 or n.

    Raises:
        ValueError: n is 0, or `right` is not within 0..n.
    """
    if not 0 <= right <= n or n == 0:
        raise ValueError(f"{right} of {n} is no proportion")
    share, z2 = right / n, _Z * _Z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At 0 and n the bound is exact, which rounding would miss by 1e-17.
    return Estimate(share, 0.0 if right == 0 else centre - half, 1.0 if right == n else centre + half, n)


def mean(values: Sequence[float]) -> Estimate:
    """The mean with Wilson's interval when all values are 0 or 1, with a bootstrap interval otherwise.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values")
    if all(v in (0.0, 1.0) for v in values):
        return wilson(round(sum(values)), len(values))
    return average(values)


def average(values: Sequence[float], level: float = 0.95) -> Estimate:
    """The mean with a bootstrap interval, for what is no share of anything."""
    return bootstrap(lambda means: means[0], values, level=level)


def difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Mean of `values - others`, sample by sample, with a paired bootstrap interval."""
    return bootstrap(lambda means: means[0] - means[1], values, others)


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray], *columns: Sequence[float], level: float = 0.95
) -> Estimate:
    """A function of the means of paired columns, with its percentile interval over resampled samples.

    statistic: from float64 [columns, ...] to [...]; nan where it is undefined. The draws of sample numbers depend on
    their count alone, so two statistics over the same samples are resampled alike.

    Raises:
        ValueError: no values, or columns of different lengths.
    """
    n = len(columns[0])
    if n == 0 or any(len(c) != n for c in columns):
        raise ValueError(f"columns of {[len(c) for c in columns]} values can't be resampled together")
    data = np.array(columns, dtype=np.float64)
    score = float(statistic(data.mean(1)))
    resampled = statistic(data @ _weights(n))
    known = resampled[np.isfinite(resampled)]
    # Where one resample in 20 has no value, the statistic has no interval that means something.
    if len(known) < 0.95 * RESAMPLES:
        return Estimate(score, float("nan"), float("nan"), n)
    low, high = np.quantile(known, ((1 - level) / 2, (1 + level) / 2))
    return Estimate(score, float(low), float(high), n)


@lru_cache(maxsize=4)
def _weights(n: int) -> np.ndarray:
    """float64 [n, RESAMPLES]: how often each sample is drawn, with replacement, over n."""
    draws = np.random.default_rng(_SEED).integers(0, n, (RESAMPLES, n))
    counts = [np.bincount(row, minlength=n) for row in draws]
    return np.ascontiguousarray(np.stack(counts, axis=1) / n)
