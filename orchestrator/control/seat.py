"""A session at its target: when its rounds began, left and ended. Pure; every session has one, also those whose block length is fixed,
since they are load and their rounds tell what a round takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from orchestrator.control.machine import Machine

MOST_WAIT_MS = 200.0  # longer ones are not for the draft: the client reads slowly, or the target had no room


class Clock(Protocol):
    """Time of the event that is being handled, and what is known of a target by that name."""

    now_ms: float

    def machine(self, target: str) -> Machine: ...


class Seat:
    adaptive = False
    looked = 0.0

    def __init__(self, clock: Clock, rows: int, must_wait: bool = True) -> None:
        self._clock, self.must_wait = clock, must_wait
        self.rows = rows
        self.machine: Machine | None = None
        self._sat = False
        self._began_ms: float | None = None
        self._sent_ms: float | None = None

    def outlook(self) -> Iterable[float]:
        return ()

    def moved(self, target: str) -> None:
        """To another target; empty = to none. It counts there from its first commit on: until then its prompt is computed."""
        if self.machine is not None and self._sat:
            self.machine.leave(self, self._clock.now_ms)
        self.machine = self._clock.machine(target) if target else None
        self._sat, self._began_ms, self._sent_ms = False, None, None

    def sent(self) -> None:
        """A Step left."""
        if self._sent_ms is None and self._began_ms is not None and self.machine is not None:
            self._sent_ms = self._clock.now_ms
            if self._sent_ms - self._began_ms <= MOST_WAIT_MS:
                self.machine.sent(self._sent_ms - self._began_ms)

    def turned(self) -> float | None:
        """A commit. The beginning of the round that it ends; None where that was the prompt's, or no ordinary one."""
        if self.machine is None:
            return None
        now, began, sent = self._clock.now_ms, self._began_ms, self._sent_ms
        self._began_ms, self._sent_ms = now, None
        if not self._sat:
            self._sat = True
            self.machine.join(self, now)
            return None
        if began is None or (sent is not None and sent - began > MOST_WAIT_MS):
            return None
        return began
