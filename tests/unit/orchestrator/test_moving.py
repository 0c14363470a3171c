"""How long a session goes from target to target."""

from __future__ import annotations

from orchestrator.moving import Moving
from orchestrator.patience import MAX_FRUITLESS, MAX_REFUSED
from specdec.errors import InternalFault, Unavailable
from specdec.terms import Failed

STOPPING = Failed(Unavailable.code, "stopping")


def test_targets_that_refuse_cost_time_and_in_the_end_the_session() -> None:
    moving, pauses = Moving(1000.0), []
    for _ in range(MAX_REFUSED):
        assert moving.epoch() is None and moving.failed(STOPPING, 5) is None
        pauses.append(moving._patience.pause_ms)
    assert moving.epoch() is None
    error = moving.failed(STOPPING, 5)
    assert isinstance(error, Unavailable) and error.output_tokens == 5 and "stopping; 5 tokens were decided" in str(error)
    assert pauses[0] == 0.0 and pauses == sorted(pauses), "ever further apart"


def test_a_result_forgives_all_refusals() -> None:
    moving = Moving(1000.0)
    for _ in range(3 * MAX_REFUSED):
        assert moving.epoch() is None and moving.failed(STOPPING, 0) is None
        if moving._patience._refused == MAX_REFUSED:
            moving.decided()


def test_targets_that_are_lost_are_fewer() -> None:
    moving = Moving(1000.0)
    assert [moving.epoch() for _ in range(MAX_FRUITLESS - 1)] == [None] * (MAX_FRUITLESS - 1) and moving.lost(0) is None
    assert moving.epoch() is None and isinstance(moving.lost(0), Unavailable) and isinstance(moving.epoch(), InternalFault)
