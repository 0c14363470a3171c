"""A draft that talks without end has a share of the orchestrator's time, and one that says little is never made to wait. F51."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.toll import BROKEN, BURST_S, BYTE_S, FAIR, MAX_PAUSE_S, MESSAGE_S, Toll


@pytest.mark.parametrize(("broken", "share"), [(False, 1 / FAIR), (True, 1 / BROKEN)])
@pytest.mark.parametrize(("took_s", "size"), [(2e-5, 40), (0.005, 60_000), (0.3, 60 << 20)])
def test_a_flood_takes_its_share_and_no_more(took_s: float, size: int, broken: bool, share: float) -> None:
    toll, now, worked = Toll(), 0.0, 0.0
    for _ in range(int(2 + 20 / took_s**0.5)):
        work = took_s + MESSAGE_S + BYTE_S * size
        now += work
        worked += work
        now += toll.pause_s(took_s, size, broken, now)
    assert share * 0.9 * now <= worked <= share * now + BURST_S + work


@given(st.lists(st.tuples(st.floats(0, 0.001), st.booleans()), max_size=200))
def test_who_says_little_is_read_at_once(messages: list[tuple[float, bool]]) -> None:
    toll, now = Toll(), 0.0
    for took_s, broken in messages:
        now += 0.02
        assert toll.pause_s(took_s, 1000, broken, now) == 0.0


def test_a_pause_is_bounded() -> None:
    assert Toll().pause_s(1000.0, 0, True, 1000.0) == MAX_PAUSE_S
