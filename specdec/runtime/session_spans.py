"""A span for each session that a pool's process holds, below the span of its answer; and spans of engine steps, linked to the sessions
in the batch. Nothing is done for sessions whose trace is not recorded.

A step serves many answers, so it is no child of any: its span begins a trace of its own, and its links name the sessions. At most
STEPS_PER_S of them are made, since a step may take a millisecond. Rounds are events of their session's span, by `Sample`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from specdec.runtime import trace
from specdec.runtime.instruments import LabelValue
from specdec.runtime.telemetry import MAX_LINKS, Span, Telemetry

FIRST, EVERY, MOST = 16, 16, 64  # of one session's rounds: the first ones, then every so many, so many in all
STEPS_PER_S = 10.0
MAX_SESSIONS = 4096  # spans open at once; of more the eldest ends


class Sample:
    """Which of a session's rounds become events: a span has room for 128."""

    __slots__ = ("seen", "taken")

    def __init__(self) -> None:
        self.seen = self.taken = 0

    def take(self) -> bool:
        self.seen += 1
        if self.taken >= MOST or (self.seen > FIRST and self.seen % EVERY):
            return False
        self.taken += 1
        return True


class _Held:
    __slots__ = ("epoch", "sample", "span", "stream")

    def __init__(self, span: Span, stream: int, epoch: int) -> None:
        self.span, self.stream, self.epoch, self.sample = span, stream, epoch, Sample()


class SessionSpans:
    """`name` = of the sessions' spans. Every method is safe to call for sessions that are not known here."""

    def __init__(self, telemetry: Telemetry, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._telemetry, self._name, self._clock = telemetry, name, clock
        self._held: dict[str, _Held] = {}
        self._step_after = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def open(self, session_id: str, epoch: int, stream: int, traceparent: str, **attributes: LabelValue) -> None:
        """A session begins, or begins again under another epoch."""
        self.close(session_id, "replaced")
        context = trace.parse(traceparent) if self._telemetry.traces else None
        if context is None or not context.sampled:
            return
        span = self._telemetry.span(self._name, traceparent)
        if not span.recording:
            return
        span.set(session=session_id, epoch=epoch, **attributes)
        if len(self._held) >= MAX_SESSIONS:
            self.close(next(iter(self._held)), "forgotten")
        self._held[session_id] = _Held(span, stream, epoch)

    def event(self, session_id: str, name: str, **attributes: LabelValue | float) -> None:
        """One round, or what stands for it here; a sample is kept."""
        held = self._held.get(session_id) if self._held else None
        if held is not None and held.sample.take():
            held.span.event(name, number=held.sample.seen, **attributes)

    def close(self, session_id: str, end: str = "closed", epoch: int = 0, error: str = "") -> None:
        """`epoch`: only if it is that one; 0 = any. `error`: its class, where the session failed."""
        held = self._held.get(session_id) if self._held else None
        if held is not None and epoch in (0, held.epoch):
            del self._held[session_id]
            held.span.set(rounds=held.sample.seen, rounds_told=held.sample.taken, end=end)
            held.span.end(error or None)

    def gone(self, stream: int) -> None:
        """A stream ended, and with it what it held as far as it is told here."""
        for session_id in [name for name, held in self._held.items() if held.stream == stream]:
            self.close(session_id, "stream ended")

    def end(self) -> None:
        """The process ends."""
        for session_id in list(self._held):
            self.close(session_id, "process ended")

    def step(self, name: str, members: Iterable[str], took_s: float, **attributes: LabelValue) -> None:
        """An engine step, or a run of them in one go, that has just ended and served these sessions: the first MAX_LINKS are linked."""
        if not self._held or (now := self._clock()) < self._step_after:
            return
        traced = (held.span.traceparent for session_id in members if (held := self._held.get(session_id)) is not None)
        links = list(itertools.islice(traced, MAX_LINKS))
        if links:
            self._step_after = now + 1.0 / STEPS_PER_S
            span = self._telemetry.span(name, links=links, began_s_ago=took_s)
            span.set(**attributes)
            span.end()


def step_age_s(since: float | None) -> float:
    """Of the engine step that runs; `since` by time.monotonic, None = none runs."""
    return 0.0 if since is None else max(0.0, time.monotonic() - since)
