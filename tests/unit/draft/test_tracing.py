"""The draft's engine steps in traces: linked to the sessions they served, seldom enough, and for nothing where nobody records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from draft_service.drafter import Drafter
from draft_service.metrics import Metrics
from draft_service.plan import DraftPlan, PlanOutcome
from draft_service.tracing import Tracing
from specdec.hashing import prefix_hash
from specdec.runtime.session_spans import SessionSpans
from specdec.runtime.telemetry import Telemetry
from specdec.terms import Refused, Resync, Sent
from tests.collector import Collector, collector
from tests.unit.draft.rig import Rig
from tests.unit.draft.test_limits import GOOD


def header(number: int) -> str:
    return f"00-{number:032x}-{number:016x}-01"


class Traced:
    """A draft of which every session, and every step at `now`, is told to a collector; `traced` of them have a trace."""

    def __init__(self, url: str, sessions: int, traced: int, **limits: Any) -> None:
        self.rig, self.now = Rig(**limits), 0.0
        self.telemetry = Telemetry("draft", otlp_endpoint=url)
        self.spans = SessionSpans(self.telemetry, "draft", lambda: self.now)
        self.tracing = Tracing(self.spans)
        self.metrics = Metrics(self.telemetry, self.rig.drafter, self.tracing)
        for i in range(sessions):
            command = replace(GOOD, session_id=f"s{i}", traceparent=header(i + 1) if i < traced else "")
            self.tracing.obeyed(1, command)
            self.rig.apply(command)

    def step(self, fault: str = "") -> tuple[DraftPlan, PlanOutcome]:
        drafter: Drafter = self.rig.drafter
        plan = drafter.plan()
        assert plan is not None
        outcome = PlanOutcome((), fault=fault) if fault else self.rig.stepper.run(plan, lambda: False)
        self.metrics.stepped(plan, outcome, 0.25)
        drafter.commit_step(plan, outcome)
        return plan, outcome

    def close(self) -> None:
        self.tracing.end()
        self.telemetry.close()


@pytest.fixture
def kept() -> Iterator[Collector]:
    with collector() as made:
        yield made


def test_a_step_is_linked_once_to_each_session_that_has_a_trace(kept: Collector) -> None:
    """Branches are rows of their own: their session is linked once all the same."""
    draft = Traced(kept.url, sessions=3, traced=2, fanout=4)
    draft.step()
    for i in range(3):
        draft.rig.apply(Sent(f"s{i}", 3, prefix_hash([1, 2, 3]), 3))
    draft.now = 1.0
    plan, outcome = draft.step()
    assert len(plan.rows) > 3, "no branches"
    draft.close()
    sessions = {span["attributes"]["session"]: span["spanId"] for span in kept.named("draft")}
    assert set(sessions) == {"s0", "s1"}
    first, second = kept.named("engine step")
    for step in (first, second):
        assert sorted(link["spanId"] for link in step["links"]) == sorted(sessions.values()) and "parentSpanId" not in step
        assert 0.2e9 < int(step["endTimeUnixNano"]) - int(step["startTimeUnixNano"]) < 2e9
    told = {name: int(second["attributes"][name]) for name in ("rows", "steps", "drafted")}
    drafted = sum(len(row.drafts) for row in outcome.rows)
    assert told == {"rows": sum(len(row.tokens) for row in plan.rows), "steps": outcome.steps, "drafted": drafted}


def test_steps_are_told_ten_times_a_second_at_most_and_a_failed_one_says_so(kept: Collector) -> None:
    draft = Traced(kept.url, sessions=1, traced=1)
    for _ in range(2):
        draft.step()
        draft.rig.apply(Sent("s0", 3, prefix_hash([1, 2, 3]), 3))
    draft.now = 0.11
    draft.rig.apply(replace(GOOD, session_id="s1"))
    draft.step()  # of a session without a trace alone
    draft.rig.apply(replace(GOOD, session_id="s0", epoch=2))
    draft.step(fault="EngineFault")
    draft.close()
    first, failed = kept.named("engine step")
    assert "error.type" not in first["attributes"] and failed["attributes"]["error.type"] == "EngineFault"


def test_a_session_that_is_no_longer_here_has_ended(kept: Collector) -> None:
    """A word about an older placement ends nothing of the newer one."""
    draft = Traced(kept.url, sessions=3, traced=3)
    draft.tracing.told([Refused("s0", 1, "secret", 0), Resync("s1", 1, 3), Resync("s2", 0, 0), Resync("nobody", 0, 0)])
    draft.tracing.obeyed(1, replace(GOOD, session_id="s1", epoch=2, traceparent=header(2)))
    draft.tracing.told([Refused("s1", 1, "secret", 0)])
    draft.close()
    ends = {(span["attributes"]["session"], int(span["attributes"]["epoch"])): span["attributes"]["end"] for span in kept.named("draft")}
    assert ends == {("s0", 1): "refused", ("s1", 1): "resync", ("s1", 2): "process ended", ("s2", 1): "process ended"}
    assert "secret" not in str(kept.spans)


def test_nobody_looks_for_sessions_where_no_trace_is_recorded(kept: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither without a collector nor with one that is for others' traces."""

    def looked(*_: object) -> Iterator[str]:
        raise AssertionError("it costs something")
        yield

    monkeypatch.setattr(Drafter, "served_by", looked)
    for url, traced in (("", 1), (kept.url, 0)):
        draft = Traced(url, sessions=1, traced=traced)
        draft.step()
        draft.close()
    assert not kept.spans
    with pytest.raises(AssertionError):
        Traced(kept.url, sessions=1, traced=1).step()
