"""When `up` starts a process again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.cli.restarts import BASE_S, MOST_ENDS, MOST_S, WINDOW_S, Again, GiveUp, Restarts


def test_twice_the_time_each_time_until_it_is_given_up() -> None:
    restarts = Restarts()
    first = [restarts.ended("target-0", float(now), 0.0) for now in range(MOST_ENDS)]
    assert first == [*(Again(BASE_S * 2**i, i + 1) for i in range(MOST_ENDS - 1)), GiveUp(MOST_ENDS)]
    assert restarts.ended("draft-0", 10.0, 0.999) == Again(BASE_S * (1 - 0.999 / 2), 1)  # each for itself


def test_what_lies_further_back_than_the_window_is_forgotten() -> None:
    restarts = Restarts()
    for now in range(MOST_ENDS - 1):
        restarts.ended("x", float(now), 0.0)
    assert restarts.ended("x", WINDOW_S, 0.0) == Again(BASE_S * 2 ** (MOST_ENDS - 2), MOST_ENDS - 1)
    assert restarts.ended("x", 3 * WINDOW_S, 0.0) == Again(BASE_S, 1)


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(0, 1, exclude_max=True)), max_size=40))
def test_never_more_often_than_the_window_allows(steps: list[tuple[float, float]]) -> None:
    restarts, now, kept = Restarts(), 0.0, []
    for after, chance in steps:
        now += after
        decision = restarts.ended("x", now, chance)
        if isinstance(decision, GiveUp):
            assert len([at for at in kept if at > now - WINDOW_S]) >= MOST_ENDS - 1
            return
        assert BASE_S / 2 <= decision.after_s <= MOST_S
        kept.append(now)
        assert len([at for at in kept if at > now - WINDOW_S]) < MOST_ENDS
