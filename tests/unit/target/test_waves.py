"""Whom an engine step waits for: sessions that come back after a while, on machines whose steps depend on their rows or do not. All on a
clock of its own; what it gives is sessions in engine steps per second."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from target_service.batching import StepCost, Wave
from target_service.sessions import Key

STEPS = 500
GUESS = 0.2


class Held(Wave):
    """Twin: waits for all of them a fixed part of a step, until most of them come too late."""

    def __init__(self, part: float = 0.2, patience: float = 0.5) -> None:
        super().__init__()
        self._part, self._patience, self._share, self._gone_out = part, patience, 1.0, set[Key]()

    def begin(self, away: Iterable[Key], back: Iterable[Key], own: int, step_ms: float, once_ms: float, now_ms: float) -> None:
        for _ in self._gone_out:
            self._share -= 0.1 * self._share
        self._gone_out, self._until_ms = set(away), now_ms + self._part * step_ms

    def returned(self, key: Key, now_ms: float) -> None:
        if key in self._gone_out:
            self._gone_out.remove(key)
            self._share += 0.1 * (float(now_ms <= self._until_ms) - self._share)

    def hold_ms(self, queued: int, now_ms: float) -> float:
        return max(0.0, self._until_ms - now_ms) if queued and self._gone_out and self._share >= self._patience else 0.0


class Never(Wave):
    def hold_ms(self, queued: int, now_ms: float) -> float:
        return 0.0


@dataclass(frozen=True)
class World:
    """`streams` sessions, `own` of which go on by themselves, `slow` of which take five times as long as the others to come back."""

    once_ms: float
    row_ms: float
    streams: int
    gap_ms: float
    own: int = 0
    slow: int = 0

    def step_ms(self, rows: int) -> float:
        return self.once_ms + self.row_ms * rows


def per_second(world: World, wave: Wave, steps: int = STEPS) -> float:
    rng, cost, order = random.Random(3), StepCost(), itertools.count()
    for rows in (3, 64):
        cost.seen(rows, world.step_ms(rows))
    now, told, away, queued = 0.0, 0, list[tuple[float, int, Key]](), set[Key]()

    def leave(keys: Collection[Key]) -> None:
        for key in keys:
            number = int(key[1])
            if number < world.own:
                queued.add(key)
            else:
                gap_ms = world.gap_ms * (5 if number >= world.streams - world.slow else 1) * rng.uniform(0.7, 1.3)
                heapq.heappush(away, (now + gap_ms, next(order), key))

    def arrive(until_ms: float) -> None:
        while away and away[0][0] <= until_ms:
            at_ms, _, key = heapq.heappop(away)
            wave.returned(key, at_ms)
            queued.add(key)

    leave([("o", str(number)) for number in range(world.streams)])
    for _ in range(steps):
        while not queued or (hold_ms := wave.hold_ms(len(queued), now)) > 0:
            comes_ms = away[0][0] if away else math.inf
            now = comes_ms if not queued else min(comes_ms, now + hold_ms)
            arrive(now)
        batch = sorted(queued)
        queued.clear()
        rows = 3 * len(batch)
        took_ms = world.step_ms(rows) * rng.uniform(0.97, 1.03)
        arrive(now + took_ms)
        now, told = now + took_ms, told + len(batch)
        cost.seen(rows, took_ms)
        out = [key for key in batch if int(key[1]) >= world.own]
        step_ms, once_ms = cost.predicted_ms(rows), cost.once_ms(rows)
        back = list(queued)
        leave(batch)
        wave.begin(out, back, len(batch) - len(out), step_ms, GUESS * step_ms if once_ms is None else min(once_ms, step_ms), now)
    return 1000 * told / now


CPU, GPU = (4.9, 0.55), (40.0, 0.02)


@pytest.mark.parametrize("streams", [4, 8, 16])
def test_where_rows_cost_nothing_a_long_wire_is_waited_for(streams: int) -> None:
    """Two waves that take turns would use half of each step."""
    world = World(*GPU, streams, gap_ms=11.0)
    ours = per_second(world, Wave())
    assert ours > 1.4 * per_second(world, Held()), "the twin gives up and runs in turns"
    assert ours > 0.95 * streams / (0.001 * (world.step_ms(3 * streams) + 1.3 * world.gap_ms))


def test_where_rows_are_all_that_costs_two_waves_take_turns() -> None:
    world = World(0.5, 0.55, 8, gap_ms=9.0)
    assert per_second(world, Wave()) > 1.15 * per_second(world, Held(part=2.0, patience=0.0)), "the twin waits for everybody"


def test_nobody_waits_for_one_that_is_always_late() -> None:
    world = World(*GPU, 8, gap_ms=6.0, slow=1)
    assert per_second(world, Wave()) > 1.25 * per_second(world, Held(part=1.0, patience=0.0)), "the twin waits for the last"


def test_those_who_need_not_wait_do_not_lose_by_one_who_leaves() -> None:
    world = World(*GPU, 16, gap_ms=6.0, own=15)
    assert per_second(world, Wave()) > 1.08 * per_second(world, Held())


def test_who_changes_is_found_out() -> None:
    wave, now, key = Wave(), 0.0, ("o", "a")
    for gap_ms, waited in ((100.0, False), (1.0, True), (100.0, False)):
        for _ in range(80):
            wave.begin([key, ("o", "b")], [], 0, 10.0, 9.0, now)
            wave.returned(("o", "b"), now + 0.5)
            held = wave.hold_ms(1, now + 0.5) > 0
            wave.returned(key, now + gap_ms)
            now += 200.0
        assert held is waited


def test_one_whose_client_stopped_reading_holds_up_nobody() -> None:
    """It has left and is not gone: its next Step comes when its client has caught up."""
    wave, here, held = Wave(), ("o", "a"), ("o", "b")
    for turn in range(6):
        wave.begin([here, held], [], 0, 10.0, 9.0, 20.0 * turn)
        wave.returned(held, 20.0 * turn + 1)
        wave.returned(here, 20.0 * turn + 1)
    wave.begin([here, held], [], 0, 10.0, 9.0, 200.0)
    wave.returned(here, 200.5)
    assert 0 < wave.hold_ms(1, 200.5) <= 1, "it was always in time"
    wave.begin([here], [], 0, 10.0, 9.0, 220.0)
    wave.returned(here, 220.5)
    assert wave.hold_ms(1, 220.5) == 0


def test_a_session_that_left_for_good_is_not_remembered() -> None:
    wave = Wave()
    wave.begin([("o", "a"), ("o", "b")], [], 0, 10.0, 9.0, 0.0)
    wave.returned(("o", "a"), 1.0)
    for key in (("o", "a"), ("o", "b")):
        wave.gone(key)
    assert not wave._left and not wave._usual and not wave._waited
    assert wave.hold_ms(1, 1.0) == 0.0


@settings(max_examples=25, deadline=None)
@given(
    once_ms=st.floats(1, 60),
    row_ms=st.floats(0.01, 1),
    streams=st.integers(1, 12),
    gap_ms=st.floats(0.1, 80),
    own=st.integers(0, 4),
    slow=st.integers(0, 2),
)
def test_it_is_never_much_worse_than_not_to_wait(once_ms: float, row_ms: float, streams: int, gap_ms: float, own: int, slow: int) -> None:
    world = World(once_ms, row_ms, streams, gap_ms, min(own, streams - 1), slow)
    assert per_second(world, Wave(), 300) > 0.9 * per_second(world, Never(), 300)


# ------------------------------------------------------------ the figures themselves


A, B, C = ("o", "a"), ("o", "b"), ("o", "c")


def known(**usual_ms: float) -> Wave:
    """A wave of sessions that came back once, after so long."""
    wave = Wave()
    for name, took_ms in usual_ms.items():
        wave.begin([("o", name)], [], 0, 100.0, 0.0, 0.0)
        wave.returned(("o", name), took_ms)
    return wave


@pytest.mark.parametrize(
    ("own", "back", "waited_ms"), [(0, [], 0.4), (0, [B], 0.4), (3, [], 0.0)], ids=["two away", "one is here", "others go on"]
)
def test_waited_for_is_who_brings_the_most_sessions_per_ms(own: int, back: list[Key], waited_ms: float) -> None:
    """Sessions that are back after 0.4 and after 2 ms; those that are here, or go on by themselves, would wait as well."""
    wave = known(a=0.4, b=2.0)
    if back:
        wave = known(a=0.4, b=0.5, c=2.0)
        wave.begin([A, C], back, 0, 10.0, 6.0, 100.0)
    else:
        wave.begin([A, B], [], own, 10.0, 1.0, 100.0)
    assert wave.hold_ms(1, 100.0) == pytest.approx(waited_ms)


def test_who_left_some_steps_ago_is_due_from_then_on() -> None:
    wave = known(a=8.0, b=7.0)
    wave.begin([A], [], 0, 10.0, 10.0, 100.0)
    wave.begin([B], [], 0, 10.0, 10.0, 105.0)
    assert wave.hold_ms(1, 106.0) == pytest.approx(6.0)


def test_a_return_after_very_long_says_little() -> None:
    wave = Wave()
    wave.begin([A], [], 0, 10.0, 9.0, 0.0)
    wave.returned(A, 60_000.0)
    assert wave._usual[A] == (Wave.MOST_STEPS * 10.0, 0.0)
    wave.begin([A], [], 0, 10.0, 9.0, 100_000.0)
    wave.returned(A, 100_020.0)
    assert wave._usual[A] == (pytest.approx(38.0), pytest.approx(2.0))


def test_steps_that_take_no_time_at_all() -> None:
    wave, cost = Wave(), StepCost()
    wave.begin([], [], 1, 0.0, 0.0, 0.0)
    assert wave.hold_ms(1, 0.0) == 0.0
    cost.seen(4, 0.0)
    assert cost.predicted_ms(4) == 0.0
    cost.seen(4, 10.0)
    assert cost.predicted_ms(4) > 0.0, "it is no figure for ever"


def test_what_a_step_costs_once() -> None:
    cost = StepCost()
    assert cost.at(1) == StepCost.FIRST_GUESS_MS
    cost.seen(8, 80.0)
    assert (cost.at(1), cost.at(4), cost.once_ms(8)) == (20.0, 40.0, None), "one size tells little"
    cost.seen(64, 136.0)
    assert cost.once_ms(32) == pytest.approx(2 * cost.at(16) - cost.at(32)) == pytest.approx(72.0)
    assert cost.once_ms(1) == cost.at(1) == pytest.approx(73.0)
    steep = StepCost()
    steep.seen(4, 10.0)
    steep.seen(64, 1000.0)
    assert steep.once_ms(64) == 0.0
