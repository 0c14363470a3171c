"""Means that the controller keeps: what a single value may move, and what is kept within bounds."""

from __future__ import annotations

import pytest

from orchestrator.control.adaptive import LOOKED_PRIOR, AdaptivePace
from orchestrator.control.desk import Desk
from orchestrator.control.machine import AT_REST_MS, CHOOSE_EVERY_MS, EACH_MS, Machine
from orchestrator.control.regime import MEMORY_ROUNDS, OUTLIER, Answer, CalmMean, Mean, Regime, Way
from orchestrator.control.step_time import StepTime
from orchestrator.control.survival import LAST_STEP, LEAST, MOST_SHIFT, OWN_MEMORY, POSITIONS, SessionSurvival, Survival
from orchestrator.events import Admitted
from specdec import terms
from tests.unit.orchestrator.scripted_pools import Pools, answer_of, fetch, prompt_of


def learned(mean: Mean, *values: float, memory: float = 100.0) -> float:
    for value in values:
        mean.learn(value, memory)
    return mean.value


def test_a_mean_is_of_all_values_and_then_of_the_newest() -> None:
    assert learned(Mean(), 1.0, 2.0, 6.0) == pytest.approx(3.0)
    mean = Mean()
    assert learned(mean, 0.0, 0.0, 0.0, 4.0, memory=2.0) == pytest.approx(2.0), "the last of two"
    assert mean.seen == 2.0
    mean.doubt(1.0)
    assert learned(mean, 8.0) == pytest.approx(5.0)


def test_one_slow_round_does_not_move_a_calm_mean_far_and_a_slow_machine_does() -> None:
    assert learned(CalmMean(), 1.0, 1.0, 1.0, 1.0, 1000.0) == pytest.approx((4.0 + OUTLIER) / 5)
    assert learned(CalmMean(), 1.0, 1.0, 1.0, 1000.0) == pytest.approx(1003.0 / 4), "few say nothing of what is usual"
    assert learned(CalmMean(), 1.0, 1.0, 1.0, 1.0, OUTLIER - 0.5) == pytest.approx((4.0 + OUTLIER - 0.5) / 5)
    assert learned(CalmMean(), *[0.0] * 4, 10.0) == pytest.approx(2.0), "nothing has no multiple"
    assert learned(CalmMean(), *[1.0] * 24, *[100.0] * 200, memory=24.0) == pytest.approx(100.0, rel=0.01)


def test_times_are_calm_and_shares_are_not() -> None:
    """A share that is nearly always 0 is no outlier when it is 1; a round that took ten times as long is."""
    regime = Regime()
    for value in (0.1, 0.1, 0.1, 0.1, 1.0):
        regime.learn(Way.GOING, value, 1)
        regime.learn_share(Way.GOING, 3, value, 1)
        regime.looked.learn(value, MEMORY_ROUNDS)
    assert regime.turns[Way.GOING].value == pytest.approx((0.4 + 0.1 * OUTLIER) / 5)
    assert regime.share(Way.GOING, 3) == regime.looked.value == pytest.approx(1.4 / 5)
    answer = Answer()
    for value in (1.0, 1.2, 0.8, 1.2, 0.8, 1.2, 1000.0):
        answer.learn(value, MEMORY_ROUNDS)
    assert answer.mean.value < 2.0 and answer.spread.value < 1.0
    for found in (True, *[False] * 19, True):
        regime.learn_answer(3, None if found else 1.0, 1)
    assert regime.ready.value == pytest.approx(2 / 21)


# --- survival ---------------------------------------------------------------------------------------------------------


def test_a_chance_is_never_quite_none_nor_certain() -> None:
    """Else no evidence would move it any more."""
    for confidence, chance in ((0.0, LEAST), (1.0, 1 - LEAST)):
        assert SessionSurvival(Survival()).gains((confidence,)) == [chance]


@pytest.mark.parametrize("stands", [True, False])
def test_a_session_that_changes_is_learned_anew(stands: bool) -> None:
    """What it differs by from others is bounded, both ways, and a step never gets too small to leave again."""
    session = SessionSurvival(Survival(0.5))
    for stood in (stands, not stands):
        for _ in range(400):
            session.learn((0.5,), 1, int(stood))
            for _ in range(20):
                session._common.learn(0, 0.5, not stood)  # of others the contrary is true
        assert session._shift == pytest.approx(MOST_SHIFT if stood else -MOST_SHIFT) and session._step == LAST_STEP


def test_positions_are_told_apart_and_the_late_ones_counted_as_the_last() -> None:
    common = Survival(0.5)
    for _ in range(300):
        for position in range(POSITIONS + 3):
            common.learn(position, 0.5, position >= POSITIONS - 1)
    first, last = common.chance(0, 0.5), common.chance(POSITIONS - 1, 0.5)
    assert first < 0.1 and last > 0.9
    assert common.chance(POSITIONS - 2, 0.5) < 0.1
    assert common.chance(POSITIONS, 0.5) == common.chance(POSITIONS + 7, 0.5) == last
    assert common.chance(POSITIONS, 0.95) > 0.1, "of another confidence: what is true of all of it"


def test_where_little_was_seen_the_wider_estimate_holds() -> None:
    common = Survival(0.5)
    for _ in range(300):
        common.learn(0, 0.5, True)
    assert common.chance(3, 0.5) > 0.9, "of this confidence elsewhere"
    common.learn(3, 0.5, False)
    assert 0.8 < common.chance(3, 0.5) < common.chance(0, 0.5)


def test_what_a_session_learns_is_known_to_the_next_one_and_to_itself_before_the_chain_is_there() -> None:
    common = Survival(0.5)
    session = SessionSurvival(common)
    for _ in range(100):
        session.learn((0.95, 0.95), 2, 2)
    assert session.expected(2) == pytest.approx(session.gains((0.95, 0.95)), abs=0.05) and session.expected(2)[1] > 0.9
    follower, stranger = SessionSurvival(common), SessionSurvival(Survival(0.5))
    assert follower.gains((0.95,))[0] > 0.9 and follower.expected(1)[0] > 0.9
    assert stranger.gains((0.95,)) == stranger.expected(1) == [0.5]


def test_what_is_usual_of_a_session_follows_it() -> None:
    """By the slots that were reached, a mean of the newest; a position that nobody reached is worth what the one before is."""
    usual = SessionSurvival(Survival(0.5))._usual
    for chance in (0.2, 0.4):
        usual.meet(0, chance)
    usual.meet(2, 0.9)
    assert usual.means == pytest.approx([0.3]), "a gap is none of ours"
    for _ in range(200):
        usual.meet(0, 0.8)
    assert usual._seen == [OWN_MEMORY] and usual.means == pytest.approx([0.8], abs=0.001)


# --- step times -------------------------------------------------------------------------------------------------------


def test_a_curve_that_is_asked_for_all_the_time_follows_a_machine_that_becomes_slower() -> None:
    """At any age: its means no longer weigh more than they did, and move all the same."""
    asked, quiet = StepTime(), StepTime()
    for step, took_ms in enumerate([10.0] * 60 + [14.0] * 90):
        for times in (asked, quiet):
            times.learn(4, took_ms)
        assert asked.at(4) == pytest.approx(10.0 if step < 60 else asked._mean[4], rel=0.02)
    assert asked.at(4) == pytest.approx(quiet.at(4), rel=0.02) == pytest.approx(14.0, rel=0.1)


# --- the machine ------------------------------------------------------------------------------------------------------


class Sitting:
    """A seat."""

    rows, adaptive, must_wait = 1, False, False


def seated(machine: Machine, count: int) -> None:
    for _ in range(count):
        machine.join(Sitting(), 0.0)  # type: ignore[arg-type]


def test_what_is_known_at_one_load_is_not_taken_for_true_at_another() -> None:
    machine, regimes = Machine(), []
    for _ in range(9):
        seated(machine, 1)
        regimes.append(machine.regime)
    apart = [next(i for i, one in enumerate(regimes) if one is regime) + 1 for regime in regimes]
    assert apart == [1, 2, 3, 3, 5, 5, 5, 5, 9]
    for seat in list(machine.seats):
        machine.leave(seat, 0.0)
        assert machine.regime is regimes[max(0, len(machine.seats) - 1)]


@pytest.mark.parametrize(("way", "tried", "later"), [(Way.PLAIN, True, True), (Way.PLAIN, False, False), (Way.GOING, True, False)])
def test_where_it_did_not_pay_with_fewer_it_is_not_tried_at_once_with_more(way: Way, tried: bool, later: bool) -> None:
    machine = Machine()
    machine._load.way = way
    if tried:
        machine._load.regime.learn(Way.GOING, 1.0, 1)
    seated(machine, 2)
    assert (machine._load.due_ms > machine._busy_ms) is later


def test_a_look_is_rarer_the_more_sessions_other_targets_have() -> None:
    desk, machines = Desk(0.0), []
    for name, count in (("a", 3), ("b", 20), ("c", 400)):
        seated(desk.machine(name), count)
        machines.append(desk.machine(name))
    result = terms.Result(3, 4, 0, 0, (7,))
    for name in "abc":
        desk.heard(name, 4, 10_000, (terms.Answer("s", 1, 1, result),))
    assert [machine.elsewhere for machine in machines] == [420, 403, 23]


@pytest.mark.parametrize("twin", [False, True])
async def test_targets_that_are_gone_are_forgotten_with_their_last_session(monkeypatch: pytest.MonkeyPatch, twin: bool) -> None:
    """Each of them would cost every step of the others something, and count as one that shares the load."""
    if twin:
        monkeypatch.setattr(Desk, "keep", lambda self, targets: None)
    pools = Pools(monkeypatch, targets=2)
    desk, there, gone = pools.driver._desk, {"t0:1", "t1:1"}, {f"10.0.0.{number}:1" for number in range(20)}
    machines = {name: desk.machine(name) for name in there | gone}
    seated(machines["10.0.0.7:1"], 1)
    assert await fetch(pools.start("s")) == answer_of(prompt_of("s"), 20)
    assert set(desk._machines) == there | (gone if twin else {"10.0.0.7:1"})
    machines["10.0.0.7:1"].seats.clear()
    assert await fetch(pools.start("another")) == answer_of(prompt_of("another"), 20)
    assert set(desk._machines) == there | (gone if twin else set())
    assert all(desk.machine(name) is machines[name] for name in there), "what is known of those that are there stays"


@pytest.mark.parametrize(
    ("way", "sessions", "elsewhere", "apart_ms"),
    [
        (Way.PLAIN, 2, 0, AT_REST_MS),
        (Way.GOING, 2, 0, CHOOSE_EVERY_MS),
        (Way.GOING, 2, 25, 27 * EACH_MS),
        (Way.GOING, 1, 0, 1.0),  # whoever is alone loses by every round that goes the wrong way, and is looked at for little
        (Way.PLAIN, 1, 500, 1.0),
    ],
)
def test_how_long_it_is_from_one_look_to_the_next(way: Way, sessions: int, elsewhere: int, apart_ms: float) -> None:
    machine, looks = Machine(), list[float]()
    seated(machine, sessions)
    machine._adaptive, machine._load.way, machine.elsewhere = 1, way, elsewhere
    machine._decide = looks.append  # type: ignore[method-assign]
    for at_ms in range(1000, 2000):
        machine._stale = True
        machine.decide(float(at_ms))
    assert looks[1] - looks[0] == looks[-1] - looks[-2] == apart_ms
    machine.decide(5000.0)
    seen = len(looks)
    machine.decide(9000.0)
    assert len(looks) == seen, "nothing was learned since"


@pytest.mark.parametrize("source", ["draft", "ngram"])
def test_no_block_is_longer_than_was_asked_for_however_much_is_offered(source: str) -> None:
    pace = Desk(0.0).pace(Admitted("s", (1, 2), 2, terms.SamplingParams(), 7, 100, 3, 8, adaptive=True), 1)
    assert isinstance(pace, AdaptivePace) and pace.machine is None
    offered = (0.99,) * 10
    assert pace.length(source, offered) == 3, "at no target yet"
    pace.moved("t")
    assert pace.machine is not None and pace.machine.row_threshold == 0.0
    assert pace.length(source, offered) == 3 and pace.length(source, offered[:2]) == 2
    pace.machine.row_threshold = 1.0
    assert pace.length(source, offered) == 0, "none is worth a row"


def test_a_lookup_that_seldom_stands_and_then_at_length_counts_in_full() -> None:
    pace = Desk(0.0).pace(Admitted("s", (1, 2), 2, terms.SamplingParams(), 7, 100, 3, 8, adaptive=True), 1)
    assert isinstance(pace, AdaptivePace)
    for tokens in (0.0, 0.0, 1.0, 0.0, 0.0, 9.0):
        pace._mean_looked.learn(tokens, 100.0)
    assert pace.looked == pytest.approx(10.0 / (6 + LOOKED_PRIOR))
