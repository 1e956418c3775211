"""Metrics against values worked out by hand, intervals against published values and known coverage."""

import math

import numpy as np
import pytest

from fusionkv.fusion_worker.evaluate import metrics
from fusionkv.fusion_worker.evaluate.metrics import exact_match, kl
from fusionkv.fusion_worker.evaluate.report import statistics


def test_normalising_drops_case_signs_articles_and_spaces() -> None:
    assert metrics.normalize("The  Grand-Duke, a man of an Era.") == "grandduke man of era"
    assert exact_match("the Lamp!", ["rope", "lamp"]) == 1.0
    assert exact_match("two lamps", ["lamp"]) == 0.0
    assert exact_match("五三五。", ["五三五"]) == 1.0


SCORES = {
    "f1": [
        ("the green lamp", ["green lamp"], 1.0),
        ("green lamp of Ada", ["lamp"], 2 / 5),
        ("lamp lamp", ["lamp"], 2 / 3),  # a word counts as often as it stands in both
        ("rope", ["lamp"], 0.0),
        ("rope", ["lamp", "the rope"], 1.0),
        ("", ["lamp"], 0.0),
        ("a", ["the"], 1.0),  # nothing is left of either
        ("北京市", ["北京"], 4 / 5),
    ],
    "contains": [
        ("It is Columbus, Ohio.", ["Columbus Ohio"], 1.0),
        ("Ohio, Columbus", ["Columbus, Ohio"], 0.0),  # in order
        ("Columbus in Ohio", ["Columbus, Ohio"], 0.0),  # next to each other
        ("1950", ["195"], 0.0),  # whole words
        ("There is none.", ["no", "the one"], 0.0),
        ("Ada or Ben", ["Cid", "Ben"], 1.0),
        ("北京市", ["北京"], 1.0),
        ("รหัสคือห้าสามห้า", ["ห้าสามห้า"], 1.0),
        ("الرمز هو خمسة؟", ["خمسة"], 1.0),
        ("कोड पाँच है।", ["पाँच है"], 1.0),
        ("Le code : « Merrow »", ["«Merrow»"], 1.0),
        ("an", ["the"], 1.0),  # nothing is left of either
        ("lamp", ["the"], 0.0),
    ],
    # As RULER matches them.
    "string_match_all": [(" The numbers are 41,\x07 and SEVEN.", ["41", "seven", "9", "8"], 0.5)],
    "string_match_part": [("41,\x07 and SEVEN.", ["9", "seven"], 1.0), ("SEVEN", ["9"], 0.0)],
    "rouge_l": [
        ("police killed the gunman", ["police kill the gunman"], 3 / 4),  # Lin 2004, section 3.2
        ("the gunman kill police", ["x", "police kill the gunman"], 1 / 2),
        ("a b c d", ["d c b a"], 1 / 4),
        ("a, b; c!", ["A B C D"], 6 / 7),
        ("", ["a"], 0.0),
        ("мост через реку", ["мост"], 1 / 2),
        ("नदी का पुल", ["नदी का घर"], 2 / 3),
        ("สะพาน", ["สะพาน"], 1.0),
    ],
    "entities": [
        ("Ada was born in Rome in 1815.", ["In 1815, Ada lived in London."], 2 / 3),
        ('It is ada\u2019s, "(Rome)"', ["Ada's Rome"], 1.0),
        ("The Grand-Duke had 6,960 men", ["There the Grand-Duke of 6960 and However It"], 1.0),
        ("Nothing", ["Ada of Rome"], 0.0),
        ("Rome", ["Ada of Rome", "Rome"], 1.0),
        ("a heart attack killed him", ["heart attack"], 1.0),  # without entities, all of it is one
        ("a heart", ["the heart attack"], 0.0),
    ],
    "number_match": [("Paragraph 7, or 12", ["Paragraph 7"], 0.5), ("none", ["Paragraph 7"], 0.0)],
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in SCORES.items() for case in cases])
def test_a_text_is_scored_as_by_hand(name: str, case: tuple[str, list[str], float]) -> None:
    answer, expected, score = case
    assert metrics.SCORES[name](answer, expected) == pytest.approx(score)


def test_divergence() -> None:
    p, q = np.log(np.array([0.5, 0.25, 0.25])), np.log(np.array([0.25, 0.5, 0.25]))
    assert kl(p, q) == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert kl(p, p + 7) == pytest.approx(0.0, abs=1e-12)
    assert kl(np.array([1e4, 0.0]), np.array([0.0, 1e4])) == pytest.approx(1e4)


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
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


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
    assert (found.low, found.high) == pytest.approx((found.score - half, found.score + half), abs=0.1 * half)
    assert statistics.mean(values) == found  # seeded


def test_quantiles_are_interpolated_and_resampled_as_means_are() -> None:
    values = [0.3, 0.0, 2.0, 0.1, 0.4, 0.2]
    assert statistics.quantile(values, 0.5).score == pytest.approx(0.25)
    assert statistics.quantile(values, 0.9).score == pytest.approx(1.2)  # place 4.5 of 0..5: between 0.4 and 2.0
    # As many numbers at or below a bound as a binomial distribution allows (Conover 1999): here all but the ends.
    found = statistics.quantile([*range(101)], 0.5)
    assert (found.low, found.high, found.n) == (pytest.approx(40, abs=2), pytest.approx(60, abs=2), 101)
    assert statistics.quantile([0.7], 0.9) == statistics.Estimate(0.7, 0.7, 0.7, 1)
    with pytest.raises(ValueError, match="no values"):
        statistics.quantile([], 0.5)


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
