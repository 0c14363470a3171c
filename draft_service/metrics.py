"""What the draft reports. The decider counts; here the differences go into the telemetry seam."""

from __future__ import annotations

from draft_service.drafter import Drafter
from draft_service.plan import DraftPlan, PlanOutcome
from draft_service.tracing import Tracing
from specdec.runtime.telemetry import Telemetry


class Metrics:
    """An Observer. Levels are read at scrape time from plain attributes."""

    def __init__(self, telemetry: Telemetry, drafter: Drafter, tracing: Tracing | None = None) -> None:
        self._tally, self._drafter, self._tracing = drafter.tally, drafter, tracing
        self._tokens = telemetry.counter("specdec.draft.proposed_tokens")
        self._wasted = telemetry.counter("specdec.draft.wasted_tokens")
        self._branch_tokens = telemetry.counter("specdec.draft.branch_tokens")
        self._grafts = telemetry.counter("specdec.draft.grafts")
        self._broken = telemetry.counter("specdec.proposals.rejected")
        self._rows = telemetry.histogram("specdec.batch.size")
        self._seconds = telemetry.histogram("specdec.step.duration")
        self._reported = (0, 0, 0, 0)
        self._told: dict[tuple[str, str], int] = {}
        telemetry.gauge("specdec.sessions", lambda: drafter.num_sessions)
        telemetry.gauge("specdec.kv_cache.utilization", lambda: drafter.utilization)

    def stepped(self, plan: DraftPlan, outcome: PlanOutcome, seconds: float) -> None:
        """`seconds` from handing the plan over to having its outcome, all of its forward passes together."""
        if outcome.steps:
            self._rows.record(sum(len(row.tokens) for row in plan.rows))
            self._seconds.record(seconds / outcome.steps)
        if self._tracing is not None:
            self._tracing.stepped(plan, outcome, seconds, self._drafter.served_by(plan))

    def report(self) -> None:
        """Adds what was counted since the last call."""
        tally = self._tally
        now = (tally.tokens, tally.wasted_tokens, tally.broken, tally.grafts)
        tokens, wasted, broken, grafts = (new - old for new, old in zip(now, self._reported, strict=True))
        self._reported = now
        self._tokens.add(tokens)
        self._wasted.add(wasted)
        for (guess, outcome), count in tally.branches.items():
            self._branch_tokens.add(count - self._told.get((guess, outcome), 0), guess=guess, outcome=outcome)
        self._told = dict(tally.branches)
        self._grafts.add(grafts)
        if broken:
            self._broken.add(broken, reason="not_finite")
