"""How much of a draft is needed: what idle time is filled with does not count, and what one session alone would cause does not either."""

from __future__ import annotations

import pytest

from draft_service.demand import Demand, Rounds
from tests.unit.draft.rig import Rig, other

pytestmark = pytest.mark.unit
LONG_S = 60.0  # many time constants


def settled(rounds: Rounds, *, needed: int, passes: int, busy_s: float, idle_s: float, sessions: int = 1) -> Demand:
    """A draft that has done the same for long: plans of `passes` in `busy_s`, and rests between them."""
    demand, now = Demand(rounds, 5.0), 0.0
    while now < LONG_S:
        demand.began(now)
        now += busy_s
        demand.ended(needed, passes, now)
        now += idle_s
        demand.period(sessions, now)
    return demand


def test_the_share_of_time_in_needed_passes() -> None:
    assert settled(Rounds(), needed=4, passes=4, busy_s=0.02, idle_s=0.0).needed_time_share > 0.99
    assert settled(Rounds(), needed=1, passes=4, busy_s=0.02, idle_s=0.0).needed_time_share == pytest.approx(0.25, abs=0.01)
    assert settled(Rounds(), needed=4, passes=4, busy_s=0.01, idle_s=0.03).needed_time_share == pytest.approx(0.25, abs=0.01)


def test_a_draft_that_is_busy_with_branches_alone_is_not_needed() -> None:
    """The broken twin, which takes how busy it is, says 1."""
    assert settled(Rounds(), needed=0, passes=4, busy_s=0.02, idle_s=0.0).needed_time_share == 0.0


def test_a_plan_that_came_to_nothing_and_a_beat_in_the_middle_of_one() -> None:
    demand = Demand(Rounds(), 5.0)
    demand.began(0.0)
    demand.period(1, 1.0)  # the plan may be needed: the beat does not decide that
    demand.ended(2, 2, 2.0)
    assert demand.needed_time_share > 0.3
    demand.began(2.0)
    demand.ended(2, 0, 3.0)
    assert 0.2 < demand.needed_time_share < 0.3


def lateness(sessions: int, late: bool, wanted: bool = True) -> float:
    rounds = Rounds()
    demand = Demand(rounds, 5.0)
    for beat in range(240):
        for _ in range(sessions):
            rounds.round(wanted, late, sessions)
        demand.period(sessions, beat / 4)
    return demand.late_demand


def test_late_rounds_weigh_what_another_replica_could_take_away() -> None:
    assert lateness(1, late=True) == 0.0, "alone: a replica more would not help"
    assert lateness(2, late=True) == pytest.approx(0.5, abs=0.01)
    assert lateness(10, late=True) == pytest.approx(0.9, abs=0.01)
    assert lateness(10, late=False) == 0.0
    assert lateness(10, late=True, wanted=False) == 0.0, "paused sessions want nothing"


def test_a_slow_target_holds_the_figure_and_an_idle_draft_comes_to_rest() -> None:
    rounds = Rounds()
    demand = Demand(rounds, 5.0)
    for beat in range(240):
        if beat % 3 == 0:  # a commit in every third period
            rounds.round(True, True, 4)
        demand.period(4, beat / 4)
    assert demand.late_demand == pytest.approx(0.75, abs=0.01)
    for beat in range(240, 480):
        demand.period(0, beat / 4)
    assert demand.late_demand < 0.01 and demand.needed_time_share == 0.0


def test_which_passes_are_needed() -> None:
    """A chain up to its first usable token; behind a block in flight that is the second one, since the first guesses the bonus. What
    follows, a chain that has one, and branches are not."""
    rig = Rig(fanout=8)
    rig.open(k=3)
    plan = rig.drafter.plan()
    assert plan is not None and (plan.steps, plan.needed) == (3, 1)
    rig.finish(plan, rig.run(plan))
    rig.sent(3)
    plan = rig.drafter.plan()
    assert plan is not None and plan.needed == min(2, plan.steps)
    rig.finish(plan, rig.run(plan))
    while (plan := rig.drafter.plan()) is not None and rig.session().usable < 2:
        assert plan.needed > 0
        rig.finish(plan, rig.run(plan))
    rest = 0
    while plan is not None:
        assert plan.needed == 0
        rest += len(plan.rows)
        rig.finish(plan, rig.run(plan))
        plan = rig.drafter.plan()
    assert rest > 0, "there was more to do than was needed"


def test_which_rounds_are_late() -> None:
    rig = Rig()
    rounds = rig.drafter.rounds
    rig.open(k=3)
    rig.open("t", k=3)
    rig.settle()
    first = rig.undecided()
    rig.sent(3)
    rig.settle()
    rig.commit([*first[:3], rig.undecided()[3]])
    assert (rounds.wanted, rounds.late) == (1, 0.0), "it had time to draft behind the block"
    block = rig.undecided()[:3]
    rig.sent(len(block))
    rig.commit([*block, other(0)])
    assert (rounds.wanted, rounds.late) == (2, 0.5), "it had none, and two sessions are here"
    rig.settle()
    rig.sent(1)
    rig.settle()
    rig.commit([other(rig.undecided()[0])])
    assert (rounds.wanted, rounds.late) == (3, 0.5), "a refused proposal is nobody's delay"
    rig.sent(0)
    rig.step(interrupted=True)
    rig.commit([other(rig.undecided()[0])])
    assert (rounds.wanted, rounds.late) == (4, 1.0), "all that there was in time is one guess of the token that was decided, a wrong one"
