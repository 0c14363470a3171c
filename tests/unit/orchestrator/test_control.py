"""The controller against a simulated machine: it finds the best block lengths, leaves speculation alone where it does not pay, comes back
to it, and spends little on finding out."""

from __future__ import annotations

import pytest

from orchestrator.control import Desk
from orchestrator.control.machine import HYSTERESIS
from orchestrator.control.regime import Way
from tests.unit.orchestrator.control_world import Machine, Session, World, adaptive, fixed_rates, stairs

HIGH, MIDDLE, LOW = (0.8, 1.0), (0.4, 0.9), (0.05, 0.4)  # bounds of the slots' chances
MOST = 5
SETTLED_MS, MEASURED_MS = 3000.0, 12_000.0

CASES = {
    "one sure session": (Machine(), [HIGH]),
    "one session": (Machine(), [MIDDLE]),
    "one unsure session": (Machine(), [LOW]),
    "eight sessions": (Machine(), [MIDDLE] * 8),
    "eight unsure sessions": (Machine(), [LOW] * 8),
    "many sessions": (Machine(), [HIGH] * 20),
    "both kinds": (Machine(), [HIGH, LOW] * 3),
    "rows in blocks of 16": (Machine(step_ms=stairs(16, 20, 12)), [MIDDLE] * 8),
    "rows in blocks of 16, one free": (Machine(step_ms=stairs(16, 20, 12)), [MIDDLE] * 15),
    "rows in blocks of 8": (Machine(step_ms=stairs(8, 20, 5)), [MIDDLE] * 4),
    "dear rows": (Machine(step_ms=stairs(1, 6, 2)), [MIDDLE] * 8),
    "the draft slows the target": (Machine(contention=1.4), [MIDDLE] * 8),
    "a slow draft": (Machine(draft_ms=25), [MIDDLE]),
    "a fast draft": (Machine(draft_ms=0.2, answer_ms=0.2), [HIGH]),
    "always ready": (Machine(ready=1.0), [MIDDLE] * 2),
}


@pytest.mark.parametrize("name", CASES)
def test_f100_as_good_as_the_best_fixed_length(name: str) -> None:
    """Within 3 %, probing and the spread of the simulation included: two standard errors of the shorter runs are added."""
    machine, confidences = CASES[name]
    rates = fixed_rates(machine, confidences, MOST, ms=MEASURED_MS)
    world = World(machine, seed=7, most=MOST)
    for confidence in confidences:
        world.add(confidence)
    world.run(SETTLED_MS)
    rate, best = world.run(MEASURED_MS), max(rates.values())
    spread = 2 * 1.3 * (len(confidences) * MEASURED_MS / 25) ** -0.5  # tokens of a round differ by about as much as there are
    assert rate > best * (0.97 - spread), (rate, rates)
    assert rate > rates[0] * (0.985 - spread / 4), "never much slower than without"


def test_goes_without_when_the_draft_slows_the_machine_and_comes_back() -> None:
    machine = Machine()
    world = World(machine, seed=2)
    for _ in range(6):
        world.add(MIDDLE)
    world.run(4000)
    machine.contention = 1.6
    world.run(4000)
    drafted = world.drafting_rounds
    world.run(8000)
    assert world.drafting_rounds - drafted < 0.1 * 8000 / 27, "it pays no more"
    machine.contention = 1.0
    world.run(30_000)
    drafted, rounds = world.drafting_rounds, world.rounds
    world.run(3000)
    assert world.drafting_rounds - drafted > 0.8 * (world.rounds - rounds), "it was tried again and found to pay"


def test_goes_without_at_high_load_and_comes_back_when_it_falls() -> None:
    world = World(Machine(step_ms=stairs(1, 10, 1.5)), seed=4)
    sessions = [world.add(MIDDLE) for _ in range(24)]
    world.run(8000)
    drafted, rounds = world.drafting_rounds, world.rounds
    world.run(4000)
    assert world.drafting_rounds - drafted < 0.15 * (world.rounds - rounds)
    for session in sessions[1:]:
        session.left = 1
    world.run(500)
    assert len(world.sessions) == 1
    world.run(3000)
    rounds, drafted = world.rounds, world.drafting_rounds
    world.run(5000)
    assert world.drafting_rounds - drafted > 0.7 * (world.rounds - rounds)


@pytest.mark.parametrize("confidence", [LOW, MIDDLE])
def test_f101_trying_the_other_way_costs_little_and_settles(confidence: tuple[float, float]) -> None:
    machine = Machine(contention=1.1)
    world = World(machine, seed=5)
    for _ in range(8):
        world.add(confidence)
    world.run(5000)
    changes, share, was = 0, 0, world.desk.machine("target").speculates
    for _ in range(60):
        world.run(500)
        now = world.desk.machine("target").speculates
        changes, was = changes + (now != was), now
        share += now
    assert changes <= 12, "no oscillation"
    assert share <= 0.1 * 60 or share >= 0.9 * 60


def test_short_requests_do_not_repeat_what_was_learned() -> None:
    """Each of a few tokens, one after the other: what one learned serves the next."""
    machine = Machine()
    world = World(machine, seed=6)
    for _ in range(60):
        world.add(HIGH, tokens=24)
        world.run(10_000)
    long = World(machine, seed=6)
    long.add(HIGH)
    assert world.tokens / world.now_ms * 1000 > 0.85 * long.run(world.now_ms)


def test_a_session_that_is_worth_no_row_rests_and_tries_again() -> None:
    world = World(Machine(draft_ms=1.0), seed=8)
    good, bad = [world.add((0.9, 1.0)) for _ in range(3)], [world.add((0.01, 0.1)) for _ in range(3)]
    world.run(4000)

    def drafting(sessions: list[Session], rounds: int) -> float:
        seen = 0
        for _ in range(rounds):
            world.run(1.0)
            seen += sum(session.pace.drafts for session in sessions)
        return seen / rounds / len(sessions)

    assert drafting(good, 100) > 0.85
    assert 0.0 < drafting(bad, 400) < 0.3
    for session in bad:
        session.confidence = (0.9, 1.0)
    world.run(16_000)
    assert drafting(bad, 100) > 0.7


def test_f102_plain_mode_asks_nothing_of_the_draft() -> None:
    world = World(Machine(contention=2.0), seed=9)
    world.add(LOW)
    world.run(6000)
    (pace,) = adaptive(world)
    assert not pace.speculates and not pace.drafts
    assert not world.desk.pace(world.request(None), 1).drafts, "the next session begins without one"
    assert HYSTERESIS < 0.05


def test_sessions_of_fixed_length_are_timed_and_left_alone() -> None:
    world = World(Machine(), seed=10)
    world.add(MIDDLE, k=0)
    world.run(2000)
    regime = world.desk.machine("target").regime
    assert regime.turns[Way.PLAIN].seen and not regime.turns[Way.WAITING].seen and not regime.turns[Way.GOING].seen
    assert regime.turn_ms(Way.PLAIN) == pytest.approx(22.8, rel=0.05)
    world.add(LOW, k=3)
    world.blocks.clear()
    world.run(1000)
    assert set(world.blocks) <= {0, 3}


def test_answers_that_never_come_are_not_waited_for_at_length() -> None:
    """The draft is placed and mute: the first waits are bounded, then it is as if there were none."""
    world = World(Machine(draft_ms=500.0, ready=0.0), seed=11)
    world.add(MIDDLE)
    world.run(3000)
    rate = world.run(5000)
    assert rate > 0.95 * fixed_rates(Machine(), [MIDDLE], 0)[0]


def test_a_desk_is_as_good_for_any_number_of_targets() -> None:
    desk = Desk(50.0)
    assert desk.machine("a") is desk.machine("a") is not desk.machine("b")


def test_F82_a_draft_that_answers_between_two_targets_teaches_nothing() -> None:
    """A session that moved sits nowhere until its first commit there; the draft's silence began at the target that is gone."""
    world = World(Machine(ready=0.0))
    pace = world.add((0.9, 1.0)).pace
    world.run(2000)
    assert pace.speculates
    pace.committed(ready=False)
    pace.moved("")
    pace.moved("another")
    pace.proposed()
    assert not world.desk.machine("another").regime.ready.seen


@pytest.mark.parametrize(
    ("step_ms", "draft_ms", "way"), [(40.0, 1.0, Way.WAITING), (7.0, 1.5, Way.WAITING), (6.0, 4.0, Way.GOING), (40.0, 30.0, Way.GOING)]
)
def test_a_draft_is_waited_for_where_that_is_worth_it(step_ms: float, draft_ms: float, way: Way) -> None:
    """A target that may go on by itself: behind a long step a quick draft's word is waited for, a slow one's is not."""
    machine = Machine(step_ms=stairs(1, step_ms, 0.1), draft_ms=draft_ms, answer_ms=draft_ms, ready=0.5, outside_ms=1.0)
    rates = {}
    for must_wait in (False, True):
        world = World(machine, seed=8, desk=Desk(200.0, ahead=not must_wait))
        world.add(HIGH)
        world.run(10_000)
        rates[must_wait] = world.run(30_000)
        if not must_wait:
            assert world.desk.machine("target").way is way
    assert rates[False] > 0.97 * rates[True]


def test_what_waiting_is_said_to_give_is_what_it_gives() -> None:
    """Where what was ready is often the beginning of a chain only: a promise of whole blocks is half as much again, of either way, and
    sessions would go the wrong one."""
    quick = Machine(step_ms=stairs(1, 20.0, 0.1), draft_ms=1.0, answer_ms=1.0, ready=0.6, begun=1)
    world = World(quick, seed=8, desk=Desk(200.0, ahead=True))
    world.add(HIGH)
    world.run(10_000)
    machine, given, promised = world.desk.machine("target"), list[float](), list[float]()
    for _ in range(20):
        rate = world.run(1000)
        if machine.way is Way.WAITING:
            given.append(rate / 1000)
            promised.append(machine._rates(machine._load)[Way.WAITING])
    assert len(given) > 10
    assert sum(promised) == pytest.approx(sum(given), rel=0.08)


def test_a_try_is_not_over_because_others_were_served_meanwhile() -> None:
    """The session that was to show it ended; one of a fixed length keeps the target busy until the next one comes."""
    world = World(Machine(draft_ms=0.2, answer_ms=0.2), seed=9, desk=Desk(50.0, ahead=True))
    world.add(HIGH, tokens=12)
    machine = world.desk.machine("target")
    while machine._load.probe is None:
        world.run(1.0)
    left = machine._load.probe.left
    world.sessions.clear()
    machine.leave(*[(seat, world.now_ms) for seat in machine.seats][0])
    world.add(LOW, k=0, tokens=200)
    world.run(10_000)
    assert not world.sessions and machine._busy_ms > 3000
    probe = machine._load.probe
    assert probe is not None and probe.left == left and probe.took_ms < 100
    world.add(HIGH)
    world.run(1000)
    assert machine.speculates
