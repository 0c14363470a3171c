"""When a target's next word is due, and when a draft rests for it."""

from __future__ import annotations

import pytest

from draft_service.rhythm import DUE, MIN_ROUNDS, OVERDUE, PAUSE, Rhythm


def steady(rounds: int = 2 * MIN_ROUNDS, took_ms: float = 10.0) -> Rhythm:
    rhythm = Rhythm()
    for i in range(rounds + 1):
        rhythm.committed(took_ms * i)
    return rhythm


def test_nothing_is_expected_before_a_few_rounds() -> None:
    for rounds in range(MIN_ROUNDS):
        assert steady(rounds).rest_ms(10.0 * rounds + 9.5) == 0.0
    assert Rhythm().rest_ms(5.0) == 0.0


def test_a_draft_rests_from_shortly_before_the_commit_until_it_is_overdue() -> None:
    rhythm, last = steady(), 10.0 * 2 * MIN_ROUNDS
    assert rhythm.rest_ms(last + 10.0 * DUE - 0.1) == 0.0, "there is time for a pass"
    assert abs(rhythm.rest_ms(last + 9.0) - (10.0 * OVERDUE - 9.0)) < 1e-6
    assert rhythm.rest_ms(last + 10.0 * OVERDUE) == 0.0, "it does not come: the time is of use again"


def test_a_pause_of_the_session_is_no_round() -> None:
    rhythm, last = steady(), 10.0 * 2 * MIN_ROUNDS
    rhythm.committed(last + 500.0)
    assert rhythm.rest_ms(last + 509.0) > 0.0


def test_a_slower_target_is_learned() -> None:
    rhythm, now = steady(), 10.0 * 2 * MIN_ROUNDS
    for _ in range(60):
        now += 20.0
        rhythm.committed(now)
    assert rhythm.rest_ms(now + 11.0) == 0.0 and rhythm.rest_ms(now + 18.0) > 0.0


def test_commits_that_came_together_are_no_round() -> None:
    """Results of rounds that a target begins by itself share a message: the first of all intervals may be as good as none."""
    rhythm, now = Rhythm(), 0.0
    for _ in range(2 * MIN_ROUNDS):
        rhythm.committed(now)
        rhythm.committed(now + 0.01)
        now += 10.0
    assert rhythm.rest_ms(now - 1.0) > 0.0


def test_what_always_takes_longer_is_a_slower_target_and_no_pause() -> None:
    rhythm, now = steady(), 10.0 * 2 * MIN_ROUNDS
    for _ in range(3 * MIN_ROUNDS):
        now += 60.0
        rhythm.committed(now)
    assert rhythm.rest_ms(now + 30.0) == 0.0 and rhythm.rest_ms(now + 54.0) > 0.0


def test_commits_of_several_sessions_are_nobodys_rhythm() -> None:
    rhythm, now = steady(), 10.0 * 2 * MIN_ROUNDS
    for _ in range(50):
        now += 5.0
        rhythm.mixed()
    rhythm.committed(now)
    assert rhythm.rest_ms(now + 7.0) == 0.0 and rhythm.rest_ms(now + 9.0) > 0.0, "what was known of one alone still is"


def test_so_many_rounds_are_enough() -> None:
    assert steady(MIN_ROUNDS).rest_ms(10.0 * MIN_ROUNDS + 9.0) > 0.0, "the first of them counts"


def test_a_pause_among_the_first_rounds_is_none_either() -> None:
    rhythm, now = steady(3), 30.0
    for took_ms in (500.0, *[10.0] * MIN_ROUNDS):
        now += took_ms
        rhythm.committed(now)
    assert rhythm.rest_ms(now + 7.9) == 0.0 < rhythm.rest_ms(now + 8.1) == pytest.approx(6.9)


def test_up_to_which_length_it_is_a_round() -> None:
    for took_ms, mean_ms in ((10.0 * PAUSE, 13.0), (10.0 * PAUSE + 0.1, 10.0)):
        rhythm, now = steady(), 10.0 * 2 * MIN_ROUNDS + took_ms
        rhythm.committed(now)
        assert rhythm.rest_ms(now + DUE * mean_ms - 0.1) == 0.0 < rhythm.rest_ms(now + DUE * mean_ms + 0.1)


def test_after_so_many_pauses_in_a_row_all_is_learned_anew() -> None:
    rhythm, now = steady(), 10.0 * 2 * MIN_ROUNDS
    for number in range(2 * MIN_ROUNDS - 1):
        assert number < MIN_ROUNDS or rhythm.rest_ms(now + 54.0) == 0.0, "too little is known of the slower one"
        now += 60.0
        rhythm.committed(now)
    assert rhythm.rest_ms(now + 47.9) == 0.0 < rhythm.rest_ms(now + 48.1) == pytest.approx(41.9), "nothing of the quick one is left"


def test_pauses_that_are_not_in_a_row_are_pauses() -> None:
    rhythm, now = steady(), 10.0 * 2 * MIN_ROUNDS
    for took_ms in [*[60.0] * (MIN_ROUNDS - 1), 10.0] * 3:
        now += took_ms
        rhythm.committed(now)
    assert rhythm.rest_ms(now + 7.9) == 0.0 < rhythm.rest_ms(now + 8.1)


def test_a_target_that_became_slower_after_long_is_learned_as_soon() -> None:
    rhythm, now = steady(200), 2000.0
    for _ in range(10):
        now += 20.0
        rhythm.committed(now)
    assert rhythm.rest_ms(now + 13.0) == 0.0 < rhythm.rest_ms(now + 13.5)


def test_where_several_are_nobody_rests() -> None:
    rhythm, last = steady(), 10.0 * 2 * MIN_ROUNDS
    assert rhythm.rest_ms(last + 9.0) > 0.0
    rhythm.mixed()
    assert rhythm.rest_ms(last + 9.0) == 0.0
