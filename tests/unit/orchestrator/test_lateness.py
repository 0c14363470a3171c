"""A draft that is later than others, and drafts that are all late."""

from __future__ import annotations

import pytest

from orchestrator.lateness import CONSIDERABLE, FEW_ROUNDS, MEMORY_ROUNDS, Lateness


def told(lateness: Lateness, name: str, in_time: float, rounds: int, sessions: int = 1) -> None:
    """Rounds of which such a share found its block, evenly."""
    for number in range(rounds):
        lateness.round(name, int((number + 1) * in_time) == int(number * in_time), sessions)


@pytest.mark.parametrize(
    ("mine", "other", "far"),
    [
        (0.0, 0.0, False),  # all are late alike
        (0.0, CONSIDERABLE - 0.05, False),  # twice as often as never is not much
        (0.0, CONSIDERABLE + 0.05, True),
        (0.3, 0.5, False),
        (0.2, 0.5, True),
        (0.5, 0.9, False),  # better, and not twice as good
        (0.4, 0.9, True),
        (0.9, 0.1, False),
    ],
)
def test_far_better_is_twice_as_often_in_time_and_by_a_quarter_of_the_rounds(mine: float, other: float, far: bool) -> None:
    lateness = Lateness()
    told(lateness, "mine", mine, 2000)
    told(lateness, "other", other, 2000)
    assert lateness.far_better("mine") == (["other"] if far else [])


def test_few_rounds_say_nothing_of_either() -> None:
    few = int(FEW_ROUNDS) - 1
    lateness = Lateness()
    told(lateness, "good", 1.0, few)
    told(lateness, "bad", 0.0, few)
    assert lateness.far_better("bad") == [] and lateness.far_better("nobody") == [] and lateness.known() == []
    told(lateness, "bad", 0.0, 1)
    assert lateness.far_better("bad") == [], "the other may have been lucky"
    told(lateness, "good", 1.0, 1)
    assert lateness.far_better("bad") == ["good"] and lateness.known() == ["good", "bad"]


def test_a_draft_that_hangs_is_found_out_within_its_memory() -> None:
    lateness = Lateness()
    for name in ("hangs", "works"):
        told(lateness, name, 0.9, 500)
    rounds = 0
    while not lateness.far_better("hangs"):
        lateness.round("hangs", True)
        rounds += 1
    assert 32 < rounds < MEMORY_ROUNDS


def test_a_crowd_that_is_late_once_is_not_found_out() -> None:
    """Sessions of one target are late together: one message of it is not one bad draft."""
    for sessions, found in ((125, False), (1, True)):  # as if they were one session's rounds: the twin
        lateness = Lateness()
        for name in ("one", "other"):
            told(lateness, name, 0.6, 2000, 125)
        for _ in range(125):
            lateness.round("one", True, sessions)
        assert bool(lateness.far_better("one")) is found


def test_who_is_gone_is_forgotten() -> None:
    lateness = Lateness()
    told(lateness, "good", 1.0, 100)
    told(lateness, "bad", 0.0, 100)
    lateness.forget("good")
    lateness.forget("good")
    assert lateness.far_better("bad") == []
