"""What the metrics port shows of the target."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.runtime.telemetry import Telemetry
from specdec.terms import Answer
from target_service.tracing import Tracing
from target_service.verifier import Verifier


class StepObserver:
    """Gauges are read by the scraper's thread, so they look at plain numbers only."""

    def __init__(self, telemetry: Telemetry, verifier: Verifier, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        budget, self._room = verifier.budget, verifier.room
        self._rows = telemetry.histogram("specdec.batch.size")
        self._step = telemetry.histogram("specdec.step.duration")
        self._queue = telemetry.histogram("specdec.queue.duration")
        self._round = telemetry.histogram("specdec.round.duration")
        self._asked, self._asked_told = telemetry.counter("specdec.prefix_cache.asked_tokens"), 0
        self._hits, self._hits_told = telemetry.counter("specdec.prefix_cache.hit_tokens"), 0
        telemetry.gauge("specdec.kv_cache.utilization", lambda: verifier.room.live_tokens / budget.total_tokens)
        telemetry.gauge("specdec.prefix_cache.tokens", lambda: verifier.room.cached_tokens)
        telemetry.gauge("specdec.sessions", lambda: verifier.num_sessions)

    def stepped(self, rows: int, engine_us: int, sample_us: int, answers: Sequence[Answer]) -> None:
        self._rows.record(rows)
        self._step.record(engine_us / 1e6)
        asked, hits = self._room.asked_tokens, self._room.hit_tokens
        self._asked.add(asked - self._asked_told)
        self._hits.add(hits - self._hits_told)
        self._asked_told, self._hits_told = asked, hits
        if self._tracing is not None:
            self._tracing.stepped(rows, engine_us, answers)
        for answer in answers:
            self._queue.record(answer.queue_us / 1e6)
            self._round.record(answer.queue_us / 1e6, phase="queue")
            self._round.record(engine_us / 1e6, phase="engine")
            self._round.record(sample_us / 1e6, phase="sample")
