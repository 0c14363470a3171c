"""The draft's spans: one for each session, with its commits and proposals as events; one for the engine steps of a plan, linked to the
sessions in it. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from draft_service.plan import DraftPlan, PlanOutcome
from specdec.runtime.session_spans import SessionSpans
from specdec.terms import CloseDraft, Commit, DraftCommand, DraftEvent, Open, Proposal, Refused


class Tracing:
    def __init__(self, spans: SessionSpans) -> None:
        self._spans = spans

    def obeyed(self, stream: int, command: DraftCommand) -> None:
        if isinstance(command, Commit):
            self._spans.event(command.session_id, "commit", tokens=len(command.tokens), prefix_length=command.prefix_length)
        elif isinstance(command, Open):
            self._spans.open(command.session_id, command.epoch, stream, command.traceparent, prompt_tokens=command.prompt_length)
        elif isinstance(command, CloseDraft):
            self._spans.close(command.session_id)

    def told(self, events: Iterable[DraftEvent]) -> None:
        """What leaves for an orchestrator."""
        if not len(self._spans):
            return
        for event in events:
            if isinstance(event, Proposal):
                self._spans.event(event.session_id, "proposal", tokens=len(event.tokens), prefix_length=event.prefix_length)
            elif event.epoch:  # the session is no longer here; 0: it was not known
                self._spans.close(event.session_id, "refused" if isinstance(event, Refused) else "resync", event.epoch)

    def stepped(self, plan: DraftPlan, outcome: PlanOutcome, seconds: float, sessions: Iterable[str]) -> None:
        """All forward passes of a plan are one span, since they have the same rows. `sessions` is read only where the span is made."""
        if not len(self._spans) or not plan.rows:
            return
        fault = {"error.type": outcome.fault} if outcome.fault else {}
        self._spans.step(
            "engine step",
            sessions,
            seconds,
            rows=sum(len(row.tokens) for row in plan.rows),
            steps=outcome.steps,
            drafted=sum(len(row.drafts) for row in outcome.rows),
            **fault,
        )

    def gone(self, stream: int) -> None:
        self._spans.gone(stream)

    def end(self) -> None:
        self._spans.end()
