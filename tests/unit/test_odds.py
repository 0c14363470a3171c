"""Which branches are worth drafting: the paper's rule to begin with, counts from then on."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from specdec.odds import BONUS, RANKS, Ending, Odds


def test_before_anything_is_counted_the_places_share_as_the_paper_says() -> None:
    """F_k in proportion to a^(k / 2) for a constant acceptance a and r = 1."""
    a, most = 0.6, 20
    wishes = Odds().wishes([a, a, a], most, 0.0)
    share = Counter(wish.place for wish in wishes)
    corrections = most - share[3]
    weights = [a ** (k / 2) for k in range(3)]
    for k in range(3):
        assert abs(share[k] - corrections * weights[k] / sum(weights)) <= 1
    assert wishes == sorted(wishes, key=lambda wish: -wish.chance) and share[0] >= share[1] >= share[2]


def test_chances_of_all_outcomes_are_at_most_one() -> None:
    for confidences in ([], [0.0], [1.0, 1.0], [0.3, None, 0.9]):
        wishes = Odds().wishes(confidences, 1000, 0.0)
        assert sum(wish.chance for wish in wishes) <= 1.0 + 1e-9
        assert len({(wish.place, wish.rank) for wish in wishes}) == len(wishes)
    assert {wish.place for wish in Odds().wishes([None, None], 99, 0.0)} == {2}  # nothing to guess at tokens from elsewhere


def test_a_plain_round_is_all_bonus() -> None:
    (best, *rest) = Odds().wishes([], 4, 0.0)
    assert best == (pytest.approx(BONUS), 0, 0) and [wish.rank for wish in rest] == [1, 2, 3]


@pytest.mark.parametrize("most, floor, expected", [(0, 0.0, 0), (-1, 0.0, 0), (5, 0.0, 5), (5, 1.1, 0)])
def test_bounds(most: int, floor: float, expected: int) -> None:
    assert len(Odds().wishes([0.5, 0.5], most, floor)) == expected


def test_counts_overrule_the_beginning() -> None:
    odds, draw = Odds(), random.Random(1)
    ranks = [0.1, 0.4, 0.05]
    for _ in range(3000):
        accepted = draw.random() < 0.8
        rank = next(iter(draw.choices([0, 1, 2, None], [*ranks, 0.45])))
        odds.learn(Ending((0.05,), not accepted, None if accepted else rank))
    assert odds.accepted(0.05) == pytest.approx(0.8, abs=0.06)
    assert [odds.right(False, rank) for rank in range(3)] == pytest.approx(ranks, abs=0.05)
    assert odds.accepted(0.95) == pytest.approx(0.95)  # other bins know nothing of it
    wishes = odds.wishes([0.05], 3, 0.0)
    assert (0, 1) in [(wish.place, wish.rank) for wish in wishes] and odds.right(True, 1) < 0.1


def test_an_old_belief_gives_way() -> None:
    odds = Odds()
    for rank in [0] * 2000 + [3] * 2000:
        odds.learn(Ending((0.5,), True, rank))
    assert odds.right(False, 3) > 0.9 > 0.1 > odds.right(False, 0)


def test_ranks_beyond_those_told_apart_are_worth_nothing() -> None:
    assert Odds().right(False, RANKS) == 0.0 == Odds().right(True, RANKS)
