"""The parts of the controller alone: chances, step times, choices, and a draft that rests."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.control.choice import choose, prefix, worth
from orchestrator.control.machine import Machine, _Probe
from orchestrator.control.regime import Way
from orchestrator.control.step_time import StepTime
from orchestrator.control.survival import SessionSurvival, Survival
from orchestrator.drafting import DraftSide
from orchestrator.events import Admitted, Command, DraftPlaced, PlaceDraft, ToDraft
from orchestrator.lookahead import Block, Lookahead
from orchestrator.pace import FixedPace
from specdec import terms
from specdec.hashing import prefix_hash
from specdec.terms import SamplingParams

PROMPT = (1, 2, 3)

# --- survival ---------------------------------------------------------------------------------------------------------


def taught(survival: Survival, chance: float, rounds: int, seed: int = 0, confidence: float = 0.7) -> SessionSurvival:
    """A session in which each slot stands with this chance."""
    draw, session = random.Random(seed), SessionSurvival(survival)
    for _ in range(rounds):
        accepted = 0
        while accepted < 4 and draw.random() < chance:
            accepted += 1
        session.learn((confidence,) * 4, 4, accepted)
    return session


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_a_session_learns_its_own_chance_in_few_rounds(chance: float) -> None:
    common = Survival()
    for i in range(20):
        taught(common, 0.5, 10, seed=i)
    (gain, *_) = taught(common, chance, 30, seed=99).gains((0.7,))
    assert gain == pytest.approx(chance, abs=0.2)
    (other, *_) = SessionSurvival(common).gains((0.7,))
    assert other == pytest.approx(0.5, abs=0.2), "what one session is like is not what all are like"


def test_before_anything_is_known_the_confidence_is_believed() -> None:
    assert SessionSurvival(Survival()).gains((0.9, 0.5)) == pytest.approx([0.9, 0.45])
    assert SessionSurvival(Survival(0.3)).gains((0.0,)) == pytest.approx([0.3])


@given(st.lists(st.floats(0.0, 1.0), max_size=8), st.floats(0.0, 1.2), st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_how_many_slots_are_worth_it_is_what_their_gains_say(confidences: list[float], threshold: float, seed: int) -> None:
    session = taught(Survival(), 0.6, seed % 7, seed=seed)
    assert session.worth(confidences, threshold) == worth(session.gains(confidences), threshold)


def test_slots_that_were_not_verified_teach_nothing() -> None:
    """Nor do those behind the first refused one: under the standard method a later round draws at their places with the same noise."""
    one, other = SessionSurvival(Survival()), SessionSurvival(Survival())
    for _ in range(10):
        one.learn((0.8, 0.5, 0.01, 0.99), 4, 1)
        other.learn((0.8, 0.5, 0.99, 0.01), 4, 1)
        one.learn((0.8, 0.5, 0.3), 1, 1)
        other.learn((0.8, 0.1, 0.9), 1, 1)
    for confidence in (0.01, 0.3, 0.5, 0.99):
        assert one.gains((confidence,) * 3) == other.gains((confidence,) * 3)
    assert one.expected(5) == other.expected(5)


def test_gains_only_fall() -> None:
    session = taught(Survival(), 0.8, 50)
    gains = session.expected(8)
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0 and gains[0] < 1


# --- step time --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 100.0)), min_size=1, max_size=60),
    st.lists(st.integers(0, 400), min_size=2, max_size=10),
)
@settings(max_examples=60, deadline=None)
def test_more_rows_never_take_less_time(seen: list[tuple[int, float]], asked: list[int]) -> None:
    curve = StepTime()
    for rows, ms in seen:
        curve.learn(rows, ms)
    times = [curve.at(rows) for rows in sorted(asked)]
    assert all(later >= earlier - 1e-9 for earlier, later in zip(times, times[1:], strict=False))
    assert min(ms for _, ms in seen) - 1e-9 <= curve.at(1)


def test_a_staircase_is_found_and_slow_steps_are_not_believed() -> None:
    draw, curve = random.Random(1), StepTime()
    for _ in range(2000):
        rows = draw.randint(1, 40)
        true = 20.0 + 8.0 * (-(-rows // 8) - 1)
        curve.learn(rows, true * (6.0 if draw.random() < 0.03 else draw.uniform(1.0, 1.04)))
    for rows in range(1, 41):
        near_an_edge = rows > 16 and rows % 8 in (0, 1, 2, 7)  # where neighbours lend each other their means
        assert curve.at(rows) == pytest.approx(20.0 + 8.0 * (-(-rows // 8) - 1), rel=0.2 if near_an_edge else 0.08), rows
    assert curve.at(80) > curve.at(40), "beyond what was seen it goes on rising"


def test_a_machine_that_became_slower_is_learned() -> None:
    curve = StepTime()
    for _ in range(100):
        curve.learn(4, 10.0)
    for _ in range(100):
        curve.learn(4, 30.0)
    assert curve.at(4) == pytest.approx(30.0, rel=0.05)


@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0.1, 100.0)), min_size=1, max_size=60),
    st.lists(st.integers(0, 250), min_size=1, max_size=10),
)
@example([(1, 2.0), (1, 2.0), (1, 2.0), (2, 1.0), (1, 2.0)], [0])  # no mean moves, and one weighs more among its neighbours
@settings(max_examples=60, deadline=None)
def test_who_asks_after_each_step_hears_the_same(seen: list[tuple[int, float]], asked: list[int]) -> None:
    """The curve is kept while its means have hardly moved."""
    kept, late = StepTime(), StepTime()
    for rows, ms in seen:
        for curve in (kept, late):
            curve.learn(rows, ms)
        kept.at(rows)
    for rows in asked:
        if rows <= max(rows for rows, _ in seen):  # beyond, a slope carries on what little they differ
            assert kept.at(rows) == pytest.approx(late.at(rows), rel=0.02)


def test_a_walk_upwards_says_what_each_number_of_rows_takes() -> None:
    curve = StepTime()
    assert curve.upwards(2, 3) == [0.0, 0.0, 0.0], "nothing is known"
    for rows, ms in ((2, 10.0), (5, 13.0), (9, 30.0)):
        curve.learn(rows, ms)
    assert curve.upwards(0.5, 13) == [curve.at(0.5 + m) for m in range(13)]
    assert curve.upwards(1, 10)[:5] == pytest.approx([10.0, 10.0, 11.0, 12.0, 13.0])


# --- choice -----------------------------------------------------------------------------------------------------------

gains = st.lists(st.floats(0.01, 1.0), max_size=6).map(lambda chances: [math.prod(chances[: i + 1]) for i in range(len(chances))])


@given(st.lists(gains, min_size=1, max_size=4), st.floats(1.0, 30.0), st.lists(st.floats(0.0, 10.0), min_size=30, max_size=30))
@settings(max_examples=150, deadline=None)
def test_no_other_choice_of_leading_slots_is_better(chains: list[list[float]], first_ms: float, more: list[float]) -> None:
    times = [first_ms + sum(more[:m]) for m in range(31)]
    waits = [0.0, *(0.7 * depth for depth in range(1, 7))]
    slots = sorted(((gain, depth) for chain in chains for depth, gain in enumerate(chain, 1)), reverse=True)
    deepest = max((depth for _, depth in slots), default=0)
    found = choose(len(chains), slots, times, waits[: deepest + 1])
    best = 0.0
    for depth in range(1, deepest + 1):
        for least in {gain for gain, _ in slots}:
            taken = [gain for gain, at in slots if at <= depth and gain >= least]
            if taken:
                best = max(best, (len(chains) + sum(taken)) / (times[len(taken)] + waits[depth]))
    assert found.rate >= best - 1e-9
    if slots:
        assert any(gain >= found.threshold for gain, _ in slots)


def test_a_depth_that_is_seldom_ready_is_not_wanted() -> None:
    """Where nobody waits, asking for more tokens means a block less often."""
    slots = sorted(((0.8**depth, depth) for depth in range(1, 6)), reverse=True)
    times, none = [10.0 + 0.1 * m for m in range(6)], [0.0] * 6
    assert choose(1, slots, times, none, [1.0] * 6).depth == 5
    seldom = choose(1, slots, times, none, [1.0, 0.6, 0.3, 0.2, 0.15, 0.1])
    assert seldom.depth == 1 and seldom.rate == pytest.approx(1.48 / 10.06)


def test_a_threshold_lies_where_a_slot_just_pays() -> None:
    slots = [(0.9, 1), (0.9, 1), (0.5, 2), (0.1, 3)]
    choice = prefix(2, slots, [10.0 + 0.5 * m for m in range(5)], 3)
    assert 0.1 < choice.threshold < 0.5
    assert choice.rate == pytest.approx(4.3 / 11.5)
    assert worth((0.9, 0.5, 0.1), choice.threshold) == 2
    assert worth((0.1, 0.9), choice.threshold) == 0, "a slot behind one that is not worth its row has none either"
    assert prefix(2, [], [10.0], 0).threshold == math.inf


# --- a draft that rests -----------------------------------------------------------------------------------------------


class Told(FixedPace):
    """Does as the test says."""

    def __init__(self, drafts: bool = True) -> None:
        super().__init__(4, 50.0)
        self.drafts = drafts


class Scene:
    def __init__(self, drafts: bool = True) -> None:
        request = Admitted("s", PROMPT, len(PROMPT), SamplingParams(max_tokens=100), 7, 1000, 4, 16, adaptive=True)
        self.pace = Told(drafts)
        self.side, self.tree, self.committed = DraftSide(request, self.pace), Lookahead(PROMPT), list(PROMPT)

    def place(self) -> list[Command]:
        return self.side.placed(DraftPlaced("d", 16), self.committed, self.tree, None)

    def commit(self, *tokens: int, drafts: bool = True, wanted: int = 4) -> list[Command]:
        self.pace.drafts, self.pace.wanted = drafts, wanted
        length, hash_ = self.tree.length, self.tree.hash
        self.committed += tokens
        self.tree.commit(tokens)
        return self.side.committed(length, hash_, tokens, self.tree)


def names(commands: list[Command]) -> list[str]:
    return [type(c.command).__name__ if isinstance(c, ToDraft) else type(c).__name__ for c in commands]


def sent(commands: list[Command], kind: type[terms.DraftCommand]) -> terms.DraftCommand:
    (found,) = [c.command for c in commands if isinstance(c, ToDraft) and isinstance(c.command, kind)]
    return found


def test_a_resting_draft_hears_nothing_and_then_all_of_it() -> None:
    scene = Scene()
    assert names(scene.place()) == ["Open"]
    assert names(scene.commit(4, drafts=False)) == ["Commit", "Pause"]
    assert scene.side.sent(scene.tree, Block((), ())) == []
    assert scene.commit(5, drafts=False) == [] == scene.commit(6, 7, drafts=False)
    told = scene.commit(8, wanted=2)
    assert names(told) == ["Commit", "Resume"]
    prefix_ = (*PROMPT, 4)
    assert sent(told, terms.Commit) == terms.Commit("s", 4, prefix_hash(prefix_), (5, 6, 7, 8), 2)
    assert names(scene.commit(9)) == ["Commit"]
    assert names(scene.side.sent(scene.tree, Block((1,), (None,)))) == ["Sent"]


def test_the_draft_hears_how_much_is_wanted() -> None:
    scene = Scene()
    scene.place()
    assert [sent(scene.commit(9, wanted=k), terms.Commit).num_speculative_tokens for k in (1, 3, 4)] == [1, 3, 0]  # type: ignore[union-attr]


def test_a_session_that_begins_at_rest_asks_for_a_draft_when_it_has_use_for_one() -> None:
    scene = Scene(drafts=False)
    assert scene.side.want() == [] == scene.commit(4, drafts=False)
    assert scene.commit(5) == [PlaceDraft("")]
    assert names(scene.place()) == ["Open"]
    assert sent(scene.side.open(scene.committed, scene.tree, None), terms.Open).tokens == (*PROMPT, 4, 5)  # type: ignore[union-attr]


def test_a_draft_that_is_placed_or_loses_the_thread_while_it_should_rest_is_opened_and_rests() -> None:
    scene = Scene()
    scene.pace.drafts = False
    assert names(scene.place()) == ["Open", "Pause"]
    assert scene.commit(4, drafts=False) == []
    assert names(scene.side.resync(scene.committed, scene.tree, None)) == ["Count", "Open", "Pause"]
    assert scene.commit(5, drafts=False) == []
    told = scene.commit(6)
    assert sent(told, terms.Commit) == terms.Commit("s", 4, prefix_hash((*PROMPT, 4)), (5, 6))


def test_a_draft_that_is_lost_at_rest_is_replaced() -> None:
    scene = Scene()
    scene.place()
    scene.commit(4, drafts=False)
    assert names(scene.side.lost(alive=False)) == ["Count", "PlaceDraft"]
    assert scene.commit(5, drafts=False) == [] == scene.commit(6)
    assert names(scene.place()) == ["Open"]


def test_what_the_resting_draft_does_not_know_is_told_with_the_next_block() -> None:
    scene = Scene()
    scene.place()
    scene.commit(4, drafts=False)
    scene.tree.assume((5, 6))
    scene.commit(5)
    told = scene.side.sent(scene.tree, Block((6,), (None,)))
    assert sent(told, terms.Sent).tokens == (6,)  # type: ignore[union-attr]


def test_one_bad_try_does_not_put_the_next_one_off_for_minutes() -> None:
    """It may have met a system that was just starting; one that goes on losing is tried ever more rarely all the same."""
    machine, intervals = Machine(), []
    load = machine._load
    for _ in range(4):
        load.probe = _Probe(Way.WAITING, 1)
        load.probe.took_ms = 2000.0
        machine._end_probe(load, load.probe, {Way.PLAIN: 1.0, Way.WAITING: 0.1}, machine._busy_ms)
        intervals.append(load.interval_ms)
    assert intervals == [8000.0, 32_000.0, 120_000.0, 120_000.0]


def test_the_more_sessions_the_less_often_all_their_slots_are_looked_at() -> None:
    machine, looks = Machine(), list[float]()
    machine._adaptive = 1
    machine._decide = looks.append  # type: ignore[method-assign]
    for sessions, elsewhere, apart_ms in ((2, 0, 50.0), (128, 0, 128.0), (2, 300, 302.0)):  # nobody speculates: 50 ms at first
        machine.elsewhere = elsewhere
        machine.seats = {object() for _ in range(sessions)}  # type: ignore[misc]
        looks.clear()
        for at_ms in range(10_000, 14_000):
            machine._stale = True
            machine.decide(float(at_ms))
        gaps = [b - a for a, b in zip(looks, looks[1:], strict=False)]
        assert gaps and max(gaps) - min(gaps) <= 1 and gaps[0] == apart_ms
        machine._chosen_ms = -1e9
