"""Requests per second and at once of one caller: a page of arithmetic against a slower and dumber one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import Overloaded
from specdec.runtime import limits
from specdec.runtime.limits import Limits


def refused(table: Limits, who: str, now: float) -> int:
    """How long to wait, ms; 0 = let in."""
    try:
        table.enter(who, now)
    except Overloaded as error:
        assert error.retry_after_ms > 0
        return error.retry_after_ms
    return 0


def test_a_burst_and_then_the_rate() -> None:
    table = Limits(per_s=4, at_once=0)
    assert [refused(table, "a", 10.0) for _ in range(5)] == [0, 0, 0, 0, 250]
    assert refused(table, "b", 10.0) == 0  # another caller's bucket is its own
    assert refused(table, "a", 10.249) == 1
    assert refused(table, "a", 10.25) == 0
    assert refused(table, "a", 10.25) == 250


def test_who_comes_back_when_told_is_let_in() -> None:
    table, now = Limits(per_s=0.3, at_once=0), 0.0
    for _ in range(20):
        while wait := refused(table, "a", now):
            now += wait / 1000
    assert now == pytest.approx(19 / 0.3, rel=1e-3)


def test_open_requests() -> None:
    table = Limits(per_s=0, at_once=2)
    assert [bool(refused(table, "a", 0)) for _ in range(3)] == [False, False, True]
    table.leave("a")
    assert not refused(table, "a", 0) and refused(table, "a", 0)


def test_a_refusal_costs_nothing() -> None:
    table = Limits(per_s=2, at_once=1)
    table.enter("a", 0)
    assert all(refused(table, "a", 0) for _ in range(50))
    table.leave("a")
    assert not refused(table, "a", 0)  # the second of the burst is still there


@given(st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=60), st.floats(0.1, 20), st.integers(0, 4))
def test_never_more_than_the_window_allows(steps: list[tuple[float, bool]], per_s: float, at_once: int) -> None:
    table, now, let_in, is_open = Limits(per_s, at_once), 0.0, [], 0
    for pause, ends in steps:
        now += pause
        if ends and is_open:
            table.leave("a")
            is_open -= 1
        elif not refused(table, "a", now):
            let_in.append(now)
            is_open += 1
        assert not at_once or is_open <= at_once
    for first in range(len(let_in)):
        for last in range(first, len(let_in)):
            assert last - first + 1 <= table.burst + (let_in[last] - let_in[first]) * per_s + 1e-6


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CALLERS", 8)
    table = Limits(per_s=1, at_once=1)
    for i in range(8):
        table.enter(f"busy-{i}", 0)
    assert refused(table, "late", 100) and len(table) == 8  # all have open requests
    table.leave("busy-3")
    assert not refused(table, "late", 100) and len(table) == 8  # a full bucket is as good as none
    table.leave("late")
    assert refused(table, "later", 100)  # an empty bucket is remembered: leaving and coming back does not fill it
    assert not refused(table, "later", 101)
