"""Who may start, who waits, who is turned away. Pure; the driver calls it.

At most `max_running` generations run; at most `max_waiting` wait, lower priority number first, then first come first served. Beyond
that a request is turned away at once with a time to come back: a queue that cannot drain helps nobody.
"""

from __future__ import annotations

import heapq
import itertools

from specdec.errors import Overloaded

RETRY_AFTER_MS = 1000


class Admission:
    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self._running: set[str] = set()
        self._waiting: list[tuple[int, int, str]] = []
        self._gone: set[str] = set()
        self._order = itertools.count()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) - len(self._gone)

    def ask(self, session_id: str, priority: int) -> bool:
        """True: run now. False: wait. Raises Overloaded when the waiting room is full."""
        if len(self._running) < self.max_running and not self.waiting:
            self._running.add(session_id)
            return True
        if self.waiting >= self.max_waiting:
            raise Overloaded(f"{self.running} requests run and {self.waiting} wait already", RETRY_AFTER_MS)
        heapq.heappush(self._waiting, (priority, next(self._order), session_id))
        return False

    def leave(self, session_id: str) -> list[str]:
        """A session ended or gave up waiting. Returns the sessions that may run now."""
        if session_id in self._running:
            self._running.remove(session_id)
        elif any(entry[2] == session_id for entry in self._waiting):
            self._gone.add(session_id)
        started = []
        while self._waiting and (self._waiting[0][2] in self._gone or len(self._running) < self.max_running):
            _, _, next_id = heapq.heappop(self._waiting)
            if next_id in self._gone:
                self._gone.remove(next_id)
                continue
            self._running.add(next_id)
            started.append(next_id)
        return started
