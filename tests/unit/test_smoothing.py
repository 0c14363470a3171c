import math

import pytest

from specdec.smoothing import Smoothed

pytestmark = pytest.mark.unit


def test_a_level_that_stays_is_reached_by_the_time_constant_however_often_it_is_noted() -> None:
    for notes in (1, 10, 1000):
        smoothed = Smoothed(10.0)
        for i in range(notes + 1):
            smoothed.note(2.0, 100.0 + 10.0 * i / notes)
        assert math.isclose(smoothed.value, 2.0 * (1 - math.exp(-1)))


def test_it_begins_at_zero_comes_to_rest_and_forgets_nothing_when_a_clock_stands() -> None:
    smoothed = Smoothed(1.0)
    smoothed.note(5.0, 7.0)
    assert smoothed.value == 0.0
    smoothed.note(5.0, 20.0)
    before = smoothed.value
    assert 4.99 < before < 5.0
    smoothed.note(0.0, 20.0)
    smoothed.note(0.0, 19.0)  # a clock that goes back is one that stands
    assert smoothed.value == before
    smoothed.note(0.0, 40.0)
    assert smoothed.value < 1e-6
