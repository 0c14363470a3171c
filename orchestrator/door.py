"""The clock and the timers of admission: who waits or runs until when. What is decided is admission.py's; the driver starts and ends.

A client's deadline is kept with a margin, so that a clear status reaches it in time, and bounds every Step downstream. Whoever waits is
taken out at `max_wait_ms`, whoever waits or runs at its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.admission import FOREVER_MS, MOST_RETRY_MS, Admission
from orchestrator.events import Admitted
from orchestrator.settings import OrchestratorSettings
from specdec.errors import DeadlineExceeded, Overloaded, SpecdecError
from specdec.terms import Step

AGAIN_S = 0.1  # those that wait may start by time alone: who asked for room and heard nothing has it
MARGIN_MS = 10.0  # what is left of a client's deadline when it is told that it has passed


@dataclass(slots=True)
class _Kept:
    """One session. `deadline_ms` on the door's clock, margin off."""

    deadline_ms: float
    timer: asyncio.TimerHandle | None = None


class Door:
    """`turn_away(session, error)` ends a session that waits or runs and calls `leave`; `begin(sessions)` begins those that waited."""

    def __init__(
        self, settings: OrchestratorSettings, turn_away: Callable[[str, SpecdecError], None], begin: Callable[[list[str]], None]
    ) -> None:
        self.admission = Admission(settings.max_running, settings.max_waiting, settings.max_waiting_tokens, settings.priority_age_ms)
        self._max_wait_ms = settings.max_wait_ms
        self._turn_away, self._begin = turn_away, begin
        self._again: asyncio.TimerHandle | None = None  # runs while somebody waits
        self._kept: dict[str, _Kept] = {}

    @contextlib.contextmanager
    def arriving(self, answers: int, size: int, priority: int, left_s: float | None) -> Iterator[float]:
        """While a request of so many answers and bytes is read: it has its place in the waiting room. `left_s` = time left to the client,
        None = all it takes. Yields the deadline, ms on the door's clock. Raises Overloaded, DeadlineExceeded."""
        now_ms = _now_ms()
        deadline_ms = FOREVER_MS if left_s is None else now_ms + 1000 * left_s - MARGIN_MS
        arrival = self.admission.arrive(answers, size, priority, now_ms, min(deadline_ms, now_ms + self._max_wait_ms))
        try:
            yield deadline_ms
        finally:
            self.admission.arrived(arrival)

    def ask(self, answers: Sequence[Admitted], deadline_ms: float, targets: int) -> bool:
        """True: all run now. False: all wait. `targets` are connected. Raises Overloaded, DeadlineExceeded."""
        self.admission.targets = max(1, targets)
        now_ms, sessions = _now_ms(), [answer.session_id for answer in answers]
        until_ms = min(deadline_ms, now_ms + self._max_wait_ms)
        runs = self.admission.ask(sessions, answers[0].priority, tokens=len(answers[0].tokens), now_ms=now_ms, until_ms=until_ms)
        for session in sessions:
            self._kept[session] = _Kept(deadline_ms)
            self._watch(session, deadline_ms if runs else until_ms)
        if not runs and self._again is None:
            self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._try_again)
        return runs

    def waiting_for_targets(self, there: bool) -> int:
        """Generations that wait here for targets' sake: all, where none is `there`, else those that find no room."""
        return self.admission.for_room if there else self.admission.waiting

    def _try_again(self) -> None:
        self._again = None
        self._begin(self._started(self.admission.start(_now_ms())))
        if self.admission.waiting:
            self._again = asyncio.get_running_loop().call_later(AGAIN_S, self._try_again)

    def leave(self, session_id: str) -> list[str]:
        """A session is over. Returns those that may run now."""
        if (kept := self._kept.pop(session_id, None)) is not None and kept.timer is not None:
            kept.timer.cancel()
        return self._started(self.admission.leave(session_id, _now_ms()))

    def told(self, session_id: str, *, has_room: bool) -> list[str]:
        """A target has room for a session that runs, or has none. Returns those that may run now."""
        if not has_room:
            self.admission.no_room(session_id, _now_ms())
            return []
        return self._started(self.admission.has_room(session_id, _now_ms()))

    def bounded(self, step: Step) -> Step:
        """The Step may take no longer than its client waits."""
        kept = self._kept.get(step.session_id)
        if kept is None or kept.deadline_ms == FOREVER_MS:
            return step
        return replace(step, remaining_ms=max(1, min(step.remaining_ms, math.ceil(kept.deadline_ms - _now_ms()))))

    def _started(self, sessions: list[str]) -> list[str]:
        for session in sessions:
            self._watch(session, self._kept[session].deadline_ms)
        return sessions

    def _watch(self, session_id: str, until_ms: float) -> None:
        kept = self._kept[session_id]
        if kept.timer is not None:
            kept.timer.cancel()
        kept.timer = None
        if until_ms != FOREVER_MS:
            kept.timer = asyncio.get_running_loop().call_later(max(0.0, until_ms - _now_ms()) / 1000, self._out_of_time, session_id)

    def _out_of_time(self, session_id: str) -> None:
        if self._kept[session_id].deadline_ms <= _now_ms() + 1:
            where = "in the waiting room" if self.admission.waits(session_id) else "while the answer was decided"
            return self._turn_away(session_id, DeadlineExceeded(f"the call's deadline passed {where}; resume with output_token_ids"))
        message = f"no place became free in {self._max_wait_ms:.0f} ms (SPECDEC_MAX_WAIT_MS)"
        retry_ms = min(MOST_RETRY_MS, int(self.admission.expected_wait_ms(self.admission.waiting)))
        self._turn_away(session_id, Overloaded(message, retry_ms))


def _now_ms() -> float:
    return 1000 * time.monotonic()
