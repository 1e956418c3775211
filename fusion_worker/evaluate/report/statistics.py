"""Confidence intervals of scores, 95% unless a level is given, over the same samples for all recipes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_Z = 1.959963984540054  # two-sided 95% quantile of the normal distribution
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
    """A proportion with Wilson's interval (1927), which is within 0..1 and not empty at 0 or n.

    Raises ValueError if n is 0, or `right` is not within 0..n.
    """
    if not 0 <= right <= n or n == 0:
        raise ValueError(f"{right} of {n} is not a proportion")
    share, z2 = right / n, _Z * _Z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At 0 and n the exact bound, without a rounding error of 1e-17.
    return Estimate(share, 0.0 if right == 0 else centre - half, 1.0 if right == n else centre + half, n)


def mean(values: Sequence[float]) -> Estimate:
    """The mean, with Wilson's interval if all values are 0 or 1, otherwise with a bootstrap interval.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    if all(v in (0.0, 1.0) for v in values):
        return wilson(round(sum(values)), len(values))
    return average(values)


def average(values: Sequence[float], level: float = 0.95) -> Estimate:
    """The mean with a bootstrap interval, for values that are not shares."""
    return bootstrap(lambda means: means[0], values, level=level)


def difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Mean of `values - others`, sample by sample, with a paired bootstrap interval."""
    return bootstrap(lambda means: means[0] - means[1], values, others)


def quantile(values: Sequence[float], q: float) -> Estimate:
    """The q-quantile, interpolated between samples, with its percentile interval over the draws of `bootstrap`.

    Raises ValueError without values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("no values")
    data = np.array(values, dtype=np.float64)
    low, high = np.quantile(np.quantile(data[_draws(n)], q, axis=1), (0.025, 0.975))
    return Estimate(float(np.quantile(data, q)), float(low), float(high), n)


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray], *columns: Sequence[float], level: float = 0.95
) -> Estimate:
    """A function of the means of paired columns, with its percentile interval over resampled samples.

    Args:
        statistic: maps float64 [columns, ...] to [...]; nan if undefined.
        columns: values of the same samples. Resampling depends only on their number, so all statistics over the same
            samples are resampled alike.
        level: confidence level.

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
    # Without a value in more than 5% of the resamples, the interval is not meaningful.
    if len(known) < 0.95 * RESAMPLES:
        return Estimate(score, float("nan"), float("nan"), n)
    low, high = np.quantile(known, ((1 - level) / 2, (1 + level) / 2))
    return Estimate(score, float(low), float(high), n)


@lru_cache(maxsize=4)
def _weights(n: int) -> np.ndarray:
    """float64 [n, RESAMPLES]: how often each sample is drawn, with replacement, divided by n."""
    counts = [np.bincount(row, minlength=n) for row in _draws(n)]
    return np.ascontiguousarray(np.stack(counts, axis=1) / n)


def _draws(n: int) -> np.ndarray:
    """int64 [RESAMPLES, n]: the numbers of the samples of each draw."""
    return np.random.default_rng(_SEED).integers(0, n, (RESAMPLES, n))
