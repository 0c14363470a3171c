"""Drafting past a block only where it is likely to be of use."""

from __future__ import annotations

import random

import pytest

from draft_service.outlook import Outlook
from tests.unit.draft.rig import Rig, other, proposals


def test_before_anything_is_known_the_product_is_the_chance() -> None:
    outlook = Outlook(0.1)
    assert outlook.chance(0.3) == pytest.approx(0.3) and outlook.chance(1.0) == pytest.approx(1.0)
    assert outlook.worthwhile(0.1) and not outlook.worthwhile(0.09)
    assert Outlook(0.0).worthwhile(0.0)


@pytest.mark.parametrize("truth", [0.0, 0.3, 1.0])
def test_what_is_seen_overrules_what_the_draft_believes(truth: float) -> None:
    outlook, draw = Outlook(0.1), random.Random(1)
    for _ in range(400):
        outlook.learn(0.03, draw.random() < truth)
    assert outlook.chance(0.03) == pytest.approx(truth, abs=0.1)
    assert outlook.chance(0.9) == pytest.approx(0.9)  # other bins know nothing of it


def test_an_old_belief_gives_way() -> None:
    outlook = Outlook(0.1)
    for full in [True] * 300 + [False] * 300:
        outlook.learn(0.4, full)
    assert outlook.chance(0.4) < 0.1


def opened(floor: float) -> Rig:
    rig = Rig(lookahead_floor=floor, window=2000)
    rig.open(k=3)
    rig.settle()
    return rig


def test_a_hopeless_block_is_not_looked_past_and_the_next_one_comes_after_the_commit() -> None:
    rig = opened(floor=1.0)
    rig.sent(3)
    assert rig.drafter.plan() is None
    block = rig.undecided()
    rig.commit([block[0], other(block[1])])
    (told,) = proposals(rig.settle())
    assert list(told.tokens) == rig.naive(rig.committed["s"], 3)
    assert rig.drafter.tally.wasted_tokens == 0


def test_a_whole_block_after_all_is_only_a_later_proposal() -> None:
    rig = opened(floor=1.0)
    true = rig.naive([1, 2, 3], 4)
    rig.sent(3)
    rig.settle()
    assert rig.commit(true) == []
    (told,) = proposals(rig.settle())
    assert list(told.tokens) == rig.naive(rig.committed["s"], 3)


def test_a_draft_that_is_right_against_its_own_belief_looks_ahead_after_a_few_rounds() -> None:
    rig = opened(floor=0.3)
    looked = []
    for _ in range(60):
        rig.sent(3)
        looked.append(rig.session().ahead)
        rig.settle()
        rig.commit(rig.naive(rig.committed["s"], 4))
        rig.settle()
    assert not all(looked[:20]) and all(looked[-10:])


def test_a_draft_that_is_never_right_stops_looking_ahead() -> None:
    rig = opened(floor=0.1)
    for _ in range(250):
        rig.sent(3)
        rig.settle()
        rig.commit([other(rig.undecided()[0])])
        rig.settle()
    spent = rig.drafter.tally.wasted_tokens
    for _ in range(20):
        rig.sent(3)
        rig.settle()
        rig.commit([other(rig.undecided()[0])])
        rig.settle()
    assert rig.drafter.tally.wasted_tokens == spent


def test_part_of_a_block_verified_teaches_nothing() -> None:
    rig = opened(floor=0.0)
    outlook = rig.drafter._outlook[True]
    before = list(outlook._seen)
    rig.sent(3)
    rig.commit(rig.undecided()[:2])  # the target took two of the three slots
    assert outlook._seen == before
    rig.sent(0)
    rig.commit([5])
    assert outlook._seen == before


def test_the_guess_of_the_bonus_token_alone_is_not_told() -> None:
    rig = Rig()
    rig.open(k=3, budget=4)
    rig.settle()
    rig.sent(3)
    assert proposals(rig.settle()) == []
    assert len(rig.undecided()) == 4
