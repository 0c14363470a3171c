"""The statistics against numpy, scipy and simulated rounds."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import scipy.stats

from specdec.bench import figures
from specdec.bench.figures import Seen
from specdec.terms import Origin

pytestmark = pytest.mark.unit
A, C, B, P = Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS, Origin.PLAIN


def test_percentiles_are_those_of_numpy() -> None:
    draw = random.Random(1)
    for count in (1, 2, 3, 10, 101):
        values = [draw.expovariate(1) for _ in range(count)]
        for share in (0.0, 0.25, 0.5, 0.9, 0.99, 1.0):
            assert figures.percentile(values, share) == pytest.approx(float(np.percentile(values, 100 * share)))
    assert figures.percentile([], 0.5) == 0.0


def test_students_t_is_that_of_scipy() -> None:
    for freedom in (*range(1, 31), 99, 100):
        for t in (0.0, 0.1, 1.0, 2.5, 12.0):
            assert figures.student_within(t, freedom) == pytest.approx(1 - 2 * scipy.stats.t.sf(t, freedom), abs=1e-12)
        for confidence in (0.5, 0.9, 0.95, 0.999):
            assert figures.student_quantile(freedom, confidence) == pytest.approx(
                scipy.stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-9
            )


def test_a_ratio_and_its_interval_are_those_of_scipy_on_logarithms() -> None:
    ours, others = [30.0, 33.0, 28.0, 40.0, 31.0], [20.0, 21.0, 20.0, 22.0, 19.0]
    got = figures.ratio(ours, others)
    logs = np.log(np.array(ours) / np.array(others))
    low, high = scipy.stats.t.interval(0.95, len(logs) - 1, logs.mean(), scipy.stats.sem(logs))
    assert got is not None and got.low is not None and got.high is not None
    assert got.mean == pytest.approx(scipy.stats.gmean(np.array(ours) / np.array(others)))
    assert (got.low, got.high, got.pairs) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)), 5)


def test_a_ratio_turned_round_is_its_inverse() -> None:
    ours, others = [1.0, 2.0, 4.0], [2.0, 2.5, 3.0]
    one, other = figures.ratio(ours, others), figures.ratio(others, ours)
    assert one is not None and other is not None and one.low is not None and other.high is not None
    assert one.mean == pytest.approx(1 / other.mean) and one.low == pytest.approx(1 / other.high)


def test_few_pairs() -> None:
    assert figures.ratio([], []) is None
    assert figures.ratio([0.0], [1.0]) is None
    assert figures.ratio([3.0], [2.0]) == figures.Ratio(pytest.approx(1.5), None, None, 1)


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Slow seconds hit both of a pair: without pairing the interval would be far too wide, with it 95 % of them hold the truth."""
    draw = np.random.default_rng(3)
    truth, covered, wide = 1.5, 0, 0
    for _ in range(400):
        machine = np.exp(draw.normal(0, 0.5, 6))
        others = 20 * machine
        ours = truth * 20 * machine * np.exp(draw.normal(0, 0.05, 6))
        got = figures.ratio(list(ours), list(others))
        assert got is not None and got.low is not None and got.high is not None
        covered += got.low < truth < got.high
        wide += got.high / got.low > 1.3
    assert 0.92 <= covered / 400 <= 0.98 and wide < 40


# ---------------------------------------------------------------- acceptance


def test_rounds_from_origins() -> None:
    assert figures.rounds_seen([P, A, A, B, A, C, C, P, B, A]) == [
        Seen(2, False), Seen(1, True), Seen(0, True), Seen(0, False), Seen(1, False),
    ]  # fmt: skip
    assert figures.rounds_seen([P, P]) == [] == figures.rounds_seen([])


def test_survival_of_blocks_that_differ_in_length() -> None:
    """The plain share accepted / drafted would count the slots behind a refusal; this one finds what was put in."""
    draw, alphas = random.Random(5), (0.8, 0.6, 0.3)
    rounds = []
    for _ in range(40_000):
        length = draw.choice((1, 2, 3))
        accepted = 0
        while accepted < length and draw.random() < alphas[accepted]:
            accepted += 1
        rounds.append(Seen(accepted, accepted < length))
    assert figures.survival(rounds) == pytest.approx(alphas, abs=0.02)
    assert figures.survival([]) == [] == figures.survival([Seen(0, False)])
    assert figures.survival([Seen(0, True)]) == [0.0]


def test_expected_length_is_the_sum_of_a_geometric_series() -> None:
    for alpha, k in ((0.5, 3), (0.9, 5), (0.0, 2), (0.7, 0)):
        assert figures.expected_length([alpha] * k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_the_formulas_meet_at_their_ends() -> None:
    """Always a block and no host time: the ceiling. Never a block: nothing gained."""
    assert figures.expected_gain(2.5, 1.0, 20.0, 23.0, 0.0) == pytest.approx(figures.ceiling(2.5, 20.0, 23.0))
    assert figures.expected_gain(2.5, 0.0, 20.0, 23.0, 4.0) == pytest.approx(1.0)
    assert figures.expected_gain(2.5, 0.6, 20.0, 23.0, 4.0) < figures.ceiling(2.5, 20.0, 23.0)
