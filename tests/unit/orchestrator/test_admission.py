"""Who starts when: priority that ages, deadlines, bounds, targets without room. Time is made up. Broken twins beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import admission
from orchestrator.admission import (
    ASKING_MS,
    FULL_MS,
    MAX_ARRIVING_BYTES,
    MAX_ASKING,
    MAX_ASKING_FULL,
    MAX_KNOCKING,
    MAX_LEVEL,
    MOST_RETRY_MS,
    Admission,
)
from specdec.errors import DeadlineExceeded, Overloaded

pytestmark = pytest.mark.unit
AGE_MS = 100.0


def wait_beside_urgent(room: Admission, priority: int, urgent: int, most_ms: float) -> float:
    """One place, given back every 10 ms, and an urgent request every 10 ms: how long one of the given priority waits."""
    assert room.ask(["first"], urgent, now_ms=0)
    assert not room.ask(["patient"], priority, now_ms=0)
    runs, now_ms = "first", 0.0
    while now_ms < most_ms:
        room.ask([f"u{now_ms}"], urgent, now_ms=now_ms)
        now_ms += 10.0
        (runs,) = room.leave(runs, now_ms)
        if runs == "patient":
            return now_ms
    return now_ms


@pytest.mark.parametrize(("patient", "urgent", "levels"), [(1, 0, 1), (3, -2, 5), (0, 0, 0), (2**31 - 1, -(2**31), 2 * MAX_LEVEL)])
def test_a_stream_of_urgent_requests_holds_up_others_for_a_bounded_time(patient: int, urgent: int, levels: int) -> None:
    waited_ms = wait_beside_urgent(Admission(1, 10_000, age_ms=AGE_MS), patient, urgent, 10_000)
    assert levels * AGE_MS <= waited_ms <= levels * AGE_MS + 20


def test_twin_strict_priority_holds_them_up_for_ever() -> None:
    assert wait_beside_urgent(Admission(1, 10_000, age_ms=1e12), 1, 0, 10_000) >= 10_000


@given(st.lists(st.tuples(st.integers(-40, 40), st.integers(1, 3), st.floats(0, 50)), min_size=1, max_size=30), st.integers(3, 5))
def test_all_start_in_the_order_of_their_ranks_and_the_counts_come_back_to_nothing(
    asked: list[tuple[int, int, float]], places: int
) -> None:
    room = Admission(places, 1000, age_ms=AGE_MS)
    now_ms, waits, running = 0.0, {}, []
    for number, (priority, n, after_ms) in enumerate(asked):
        now_ms += after_ms
        names = [f"{number}.{i}" for i in range(n)]
        if room.ask(names, priority, tokens=number, now_ms=now_ms):
            running += names
        else:
            waits[names[0]] = (max(-MAX_LEVEL, min(MAX_LEVEL, priority)) * AGE_MS + now_ms, number)
    began: list[str] = []
    while running:
        assert room.running == len(running) <= places
        started = room.leave(running.pop(0), now_ms)
        began += [name for name in started if name in waits]
        running += started
    assert began == sorted(waits, key=lambda name: waits[name])
    assert (room.running, room.waiting, room.waiting_tokens, len(room._queue)) == (0, 0, 0, 0)


def busy(places: int = 2, hold_ms: float = 1000.0, max_waiting: int = 100, **more: float) -> Admission:
    """All places are taken, and each was held for `hold_ms` of late."""
    room = Admission(places, max_waiting, **more)  # type: ignore[arg-type]
    room.ask(["before"], 0, now_ms=-hold_ms)
    room.leave("before", 0.0)
    assert room.ask([f"r{i}" for i in range(places)], 0)
    return room


def test_who_cannot_start_in_time_is_turned_away_with_the_expected_wait() -> None:
    room = busy()
    assert not room.ask(["a"], 0, until_ms=501.0), "the next place is expected in half a second"
    with pytest.raises(Overloaded, match="would wait about 1000 ms and may wait 999") as caught:
        room.ask(["b"], 0, until_ms=999.0)
    assert caught.value.retry_after_ms == 1000
    assert not room.ask(["urgent"], -5, until_ms=501.0), "what stands behind it does not count"
    with pytest.raises(DeadlineExceeded):
        room.ask(["late"], 0, now_ms=10.0, until_ms=10.0)
    with pytest.raises(DeadlineExceeded):
        room.arrive(1, 0, 0, 10.0, 10.0)
    assert (room.running, room.waiting) == (2, 2)


def test_the_expected_wait_follows_the_measured_one() -> None:
    fast, slow = busy(hold_ms=20.0), busy(hold_ms=20_000.0)
    assert fast.expected_wait_ms(10) * 1000 == slow.expected_wait_ms(10)
    with pytest.raises(Overloaded):
        slow.arrive(1, 0, 0, 0.0, 5000.0)
    fast.arrived(fast.arrive(1, 0, 0, 0.0, 5000.0))
    for i in range(100):
        slow.leave(f"r{i % 2}", 20.0 * i)
        slow.ask([f"r{i % 2}"], 0, now_ms=20.0 * i)
    slow.arrived(slow.arrive(1, 0, 0, 2000.0, 7000.0))


def test_F138_who_is_past_its_time_never_starts() -> None:
    room = busy(places=1, hold_ms=10.0)
    for i in range(5):
        room.ask([f"short{i}"], 0, until_ms=60.0 + i)
    room.ask(["long"], 0, until_ms=5000.0)
    assert room.leave("r0", 1000.0) == ["long"]
    for i in range(5):
        assert room.leave(f"short{i}", 1000.0) == []
    assert (room.running, room.waiting) == (1, 0)


def test_the_waiting_room_is_bounded_in_generations_tokens_and_bytes() -> None:
    room = busy(max_waiting=3, max_waiting_tokens=100)
    room.ask(["a"], 0, tokens=90)
    with pytest.raises(Overloaded, match="SPECDEC_MAX_WAITING_TOKENS"):
        room.ask(["b"], 0, tokens=11)
    room.ask(["b"], 0, tokens=10)
    arrival = room.arrive(1, MAX_ARRIVING_BYTES - 1, 0, 0.0)
    with pytest.raises(Overloaded, match="SPECDEC_MAX_WAITING"):
        room.arrive(1, 0, 0, 0.0)
    room.arrived(arrival)
    assert (room.arriving, room.arriving_bytes) == (0, 0)
    with pytest.raises(Overloaded, match="n: 3 answers never run") as caught:
        room.arrive(3, 0, 0, 0.0)
    assert caught.value.retry_after_ms == MOST_RETRY_MS
    assert [room.leave(name) for name in ("a", "b")] == [[], []] and room.waiting_tokens == 0
    first = room.arrive(1, MAX_ARRIVING_BYTES - 1, 0, 0.0)
    with pytest.raises(Overloaded, match="bytes of requests"):
        room.arrive(1, 2, 0, 0.0)
    room.arrived(first)


def test_a_long_prompt_alone_is_not_too_long_to_wait() -> None:
    assert not busy(max_waiting_tokens=100).ask(["a"], 0, tokens=1000)


def knock(room: Admission, count: int) -> None:
    for i in range(count):
        assert room.ask([f"k{i}", f"l{i}"], 0)
    for i in range(count):
        room.no_room(f"k{i}")
        room.no_room(f"l{i}")


def test_who_finds_no_room_at_the_targets_keeps_others_from_asking() -> None:
    room = Admission(1000, 1000)
    knock(room, MAX_KNOCKING)
    assert not any(room.ask([name], 0) for name in "abc"), "places are free and of no use"
    assert room.has_room("k0") == [], "the other answer of its request still has none"
    assert room.has_room("l0") == ["a", "b", "c"] and room.has_room("l0") == []
    room.no_room("b", 1.0)
    assert not room.ask(["d"], 0, now_ms=1.0) and room.leave("a", 2.0) == [] and room.leave("b", 3.0) == ["d"]
    room.no_room("d", 100.0)
    room.no_room("never heard of")
    assert not room.ask(["e"], 0, now_ms=100.0) and room.start(ASKING_MS - 1) == []
    assert room.start(ASKING_MS) == ["e"] and room.waiting == 0, "who heard nothing is in"
    room.targets = 2
    assert room.ask(["other target"], 0, now_ms=ASKING_MS)


def test_a_burst_does_not_ask_at_once_before_anybody_knows_whether_there_is_room() -> None:
    room = Admission(1000, 1000)
    assert sum(room.ask([f"s{i}"], 0) for i in range(200)) == MAX_ASKING
    room.no_room("s0", 10.0)
    assert room.has_room("s1", 20.0) == []
    assert room.start(ASKING_MS) == [f"s{i}" for i in range(MAX_ASKING, MAX_ASKING + MAX_ASKING_FULL - 1)], "s0 asks again"
    assert len(room.start(FULL_MS + ASKING_MS)) == MAX_ASKING, "word of full targets is old"


def test_twin_everybody_asks_the_targets_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_KNOCKING", 10_000)
    room = Admission(1000, 1000)
    knock(room, MAX_KNOCKING)
    assert room.ask(["waits"], 0)
