"""The timers of one session. One that is started and stopped in every round, and hardly ever rings, costs a dictionary entry each time:
what the loop holds is looked at when it fires, and goes back to sleep if it was moved meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orchestrator.events import Event, Timer, TimerFired

EARLY_S = 0.001  # the loop counts in milliseconds


class Alarms:
    def __init__(self) -> None:
        self._due: dict[Timer, float] = {}  # loop time
        self._armed: dict[Timer, tuple[float, asyncio.TimerHandle]] = {}  # never later than due
        self._loop: asyncio.AbstractEventLoop | None = None  # asking for the running one is a system call

    def start(self, timer: Timer, after_ms: float, feed: Callable[[str, Event], None], session_id: str) -> None:
        """Replaces a running one of that name."""
        if (loop := self._loop) is None:
            loop = self._loop = asyncio.get_running_loop()
        self._due[timer] = due = loop.time() + after_ms / 1000
        armed = self._armed.get(timer)
        if armed is None or armed[0] > due:
            if armed is not None:
                armed[1].cancel()
            self._arm(loop, timer, due, feed, session_id)

    def stop(self, timer: Timer) -> None:
        self._due.pop(timer, None)

    def clear(self) -> None:
        """Nothing is left with the loop."""
        self._due.clear()
        for _, handle in self._armed.values():
            handle.cancel()
        self._armed.clear()

    def _arm(self, loop: asyncio.AbstractEventLoop, timer: Timer, due: float, feed: Callable[[str, Event], None], session_id: str) -> None:
        self._armed[timer] = due, loop.call_at(due, self._fired, loop, timer, feed, session_id)

    def _fired(self, loop: asyncio.AbstractEventLoop, timer: Timer, feed: Callable[[str, Event], None], session_id: str) -> None:
        del self._armed[timer]
        due = self._due.get(timer)
        if due is None:
            return
        if due - loop.time() > EARLY_S:
            return self._arm(loop, timer, due, feed, session_id)
        del self._due[timer]
        feed(session_id, TimerFired(timer))
