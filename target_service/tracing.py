"""The target's spans: one for each session, with its rounds; one for an engine step, linked to the sessions in it. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec import status
from specdec.runtime.session_spans import SessionSpans
from specdec.terms import Answer, Close, Failed, Result, Step, VerifyItem


class Tracing:
    def __init__(self, spans: SessionSpans) -> None:
        self._spans = spans

    def asked(self, stream: int, items: Iterable[VerifyItem]) -> None:
        """Items of a stream, before they are obeyed."""
        for item in items:
            if isinstance(item, Step) and item.begin is not None:
                begin = item.begin
                self._spans.open(item.session_id, item.epoch, stream, begin.traceparent, prompt_tokens=begin.prompt_length)
            elif isinstance(item, Close):
                self._spans.close(item.session_id)

    def stepped(self, rows: int, engine_us: int, answers: Sequence[Answer]) -> None:
        """Before the clients can close what was decided in this step."""
        if not len(self._spans):
            return
        for answer in answers:
            if isinstance(result := answer.outcome, Result):
                self._spans.event(
                    answer.session_id,
                    "round",
                    block=result.num_verified,
                    accepted=result.num_accepted,
                    decided=len(result.tokens),
                    queue_ms=round(answer.queue_us / 1e3, 3),
                    engine_ms=round(engine_us / 1e3, 3),
                    rows=rows,
                )
        self._spans.step("engine step", (a.session_id for a in answers), engine_us / 1e6, rows=rows, sessions=len(answers))

    def told(self, answers: Iterable[Answer]) -> None:
        """What leaves for an orchestrator. A failure's own words stay out of the span: they may quote the request."""
        if not len(self._spans):
            return
        for answer in answers:
            if isinstance(failed := answer.outcome, Failed) and failed.drop:
                self._spans.close(answer.session_id, "failed", answer.epoch, status.CODES[failed.code].name)

    def gone(self, stream: int) -> None:
        self._spans.gone(stream)

    def end(self) -> None:
        self._spans.end()
