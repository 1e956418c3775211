"""Intervals against published values, known coverage and the bootstrap's own definition."""

import math

import numpy as np
import pytest

from fusionkv.bench.quality.report import statistics


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson(right: int, n: int, low: float, high: float) -> None:
    found = statistics.wilson(right, n)
    assert (found.score, found.n) == (right / n, n)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_what_is_no_proportion_is_refused() -> None:
    for right, n in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="not a proportion"):
            statistics.wilson(right, n)


def test_a_mean_takes_the_interval_that_fits() -> None:
    assert statistics.mean([1.0, 0.0, 1.0, 1.0]) == statistics.wilson(3, 4)
    values = np.random.default_rng(1).normal(3.0, 2.0, 400).tolist()
    found = statistics.mean(values)
    half = 1.96 * np.std(values) / math.sqrt(400)
    assert found.score == pytest.approx(np.mean(values))
    assert found.low == pytest.approx(found.score - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.score + half, abs=0.1 * half)
    assert statistics.mean(values) == found  # seeded


def test_pairs_are_resampled_together() -> None:
    noise = np.random.default_rng(2).normal(0.0, 5.0, 300)
    found = statistics.difference((noise + 0.25).tolist(), noise.tolist())
    # The samples differ much from each other, but each pair differs by the same.
    assert (found.low, found.score, found.high) == (pytest.approx(0.25),) * 3


def test_a_difference_that_is_none_has_zero_inside() -> None:
    random = np.random.default_rng(3)
    inside = 0
    for _ in range(100):
        a, b = (random.integers(0, 2, 60).astype(float).tolist() for _ in range(2))
        found = statistics.difference(a, b)
        inside += found.low <= 0 <= found.high
    assert 88 <= inside <= 100


def test_a_statistic_without_a_value_has_no_interval() -> None:
    found = statistics.bootstrap(lambda means: means[0] / np.where(means[1] > 0, 1.0, np.nan), [1.0], [0.0])
    assert all(map(math.isnan, (found.score, found.low, found.high)))
    with pytest.raises(ValueError, match="can't be resampled"):
        statistics.difference([1.0], [1.0, 2.0])
