"""One answer as a span: where it was placed, a sample of its rounds as events, its counts at the end. Decides nothing.

What the rounds that are left out of the sample (session_spans.py) did is in the counts at the end. A span carries counts and times, no
text.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import Admitted, Observe
from orchestrator.output import Ended, GenerationStats
from orchestrator.tally import SOURCES
from specdec.errors import SpecdecError
from specdec.runtime.session_spans import Sample
from specdec.runtime.telemetry import NO_SPAN, Span, Telemetry

MAX_MOVES = 32  # placements that are told


class SessionTrace:
    """Every method is cheap where nobody records."""

    __slots__ = ("_engine_ms", "_moves", "_queue_ms", "_sample", "_span", "_wire_ms")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._sample, self._moves = Sample(), 0
        self._queue_ms = self._engine_ms = 0.0
        self._wire_ms: float | None = None

    def passed_on(self, answer: Admitted) -> Admitted:
        """The request as the pools get it: their spans hang below this one."""
        return replace(answer, traceparent=self._span.traceparent) if self._span.recording else answer

    def timed(self, queue_s: float, engine_s: float, wire_s: float | None) -> None:
        """Of the round that is told next. `wire_s` None: the target began it by itself."""
        self._queue_ms, self._engine_ms = 1e3 * queue_s, 1e3 * engine_s
        self._wire_ms = None if wire_s is None else 1e3 * wire_s

    def round(self, told: Observe, at_ns: int | None = None) -> None:
        """`at_ns`: when it ended, Unix time; None = this moment."""
        if not self._span.recording or not self._sample.take():
            return
        wire = {} if self._wire_ms is None else {"wire_ms": round(self._wire_ms, 3)}
        self._span.event(
            "round",
            at_ns,
            number=self._sample.seen,
            outcome=told.outcome,
            source=SOURCES.get(told.outcome, "none") if told.num_verified else "none",
            block=told.num_verified,
            accepted=told.num_accepted,
            decided=told.num_decided,
            queue_ms=round(self._queue_ms, 3),
            engine_ms=round(self._engine_ms, 3),
            **wire,
        )

    def placed(self, pool: str, replica: str) -> None:
        """`replica` empty: it has none any more."""
        if self._span.recording and self._moves < MAX_MOVES:
            self._moves += 1
            self._span.event("placed" if replica else "lost", pool=pool, replica=replica)

    def end(self, stats: GenerationStats, how: Ended | SpecdecError | None) -> None:
        """`how` None: the client left, or had all it wanted."""
        if not self._span.recording:
            return
        self._span.set(
            rounds=stats.rounds,
            rounds_told=self._sample.taken,
            draft_rounds=stats.spec_rounds,
            draft_tokens=stats.drafted,
            accepted_tokens=stats.accepted,
            decided_tokens=stats.decided,
            hits=stats.hits,
            wanted=stats.wanted,
            replacements=stats.replacements,
            end=how.finish.name.lower() if isinstance(how, Ended) else "left" if how is None else "error",
        )
        self._span.end(how if isinstance(how, SpecdecError) else None)


UNTRACED = SessionTrace(NO_SPAN)


def session(telemetry: Telemetry, answer: Admitted) -> SessionTrace:
    if not telemetry.traces:
        return UNTRACED
    span = telemetry.span(
        "generation",
        answer.traceparent,
        session=answer.session_id,
        prompt_tokens=answer.prompt_length,
        block=answer.num_speculative_tokens,
    )
    return SessionTrace(span) if span.recording else UNTRACED
