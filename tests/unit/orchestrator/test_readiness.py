"""F83: when an orchestrator may be sent sessions."""

from __future__ import annotations

from orchestrator.readiness import Readiness


def test_from_the_first_target_on_until_nobody_waits_for_one_any_more() -> None:
    readiness = Readiness(wait_ms=30_000)
    steps = [(0, 0, False), (0, 100, False), (1, 101, True), (0, 102, True), (0, 131, True), (0, 131.1, False), (2, 140, True)]
    assert [readiness.may_take(targets, now) for targets, now, _ in steps] == [want for _, _, want in steps]
