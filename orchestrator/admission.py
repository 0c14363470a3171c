"""Who may start, who waits, who is turned away. Pure; the driver calls it.

At most `max_running` generations run; at most `max_waiting` wait, lower priority number first, then first come first served: a stream
of urgent requests may keep the others waiting for ever, that is what they asked for. Beyond that a request is turned away at once with
a time to come back: a queue that cannot drain helps nobody. The answers of one request start together or not at all: half of them help
nobody either, and two requests that hold half of their places each would wait for each other for ever.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from specdec.errors import Overloaded

RETRY_AFTER_MS = 1000


class Admission:
    """Counts generations, by their session ids."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self._running: set[str] = set()
        self._waiting: dict[str, list[str]] = {}  # session -> those that wait together, itself included
        self._queue: list[tuple[int, int, list[str]]] = []  # (priority, order, sessions); empty ones are still in it for a while
        self._order = itertools.count()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waits(self, session_id: str) -> bool:
        return session_id in self._waiting

    def ask(self, sessions: Sequence[str], priority: int) -> bool:
        """The sessions of one request. True: all run now. False: all wait. Raises Overloaded when they do not fit the waiting room."""
        n = len(sessions)
        if n > self.max_running:
            raise Overloaded(f"n: {n} answers never run at once here, at most {self.max_running} do", RETRY_AFTER_MS)
        if not self._waiting and self.running + n <= self.max_running:
            self._running.update(sessions)
            return True
        if self.waiting + n > self.max_waiting:
            raise Overloaded(f"{self.running} generations run and {self.waiting} wait already", RETRY_AFTER_MS)
        together = list(sessions)
        self._waiting.update(dict.fromkeys(sessions, together))
        heapq.heappush(self._queue, (priority, next(self._order), together))
        return False

    def leave(self, session_id: str) -> list[str]:
        """A session ended or gave up waiting. Returns the sessions that may run now."""
        self._running.discard(session_id)
        if (together := self._waiting.pop(session_id, None)) is not None:
            together.remove(session_id)
            if len(self._queue) > 2 * len(self._waiting) + 16:
                self._queue = [entry for entry in self._queue if entry[2]]
                heapq.heapify(self._queue)
        started: list[str] = []
        while self._queue and self.running + len(self._queue[0][2]) <= self.max_running:
            together = heapq.heappop(self._queue)[2]
            started += together
            self._running.update(together)
            for each in together:
                del self._waiting[each]
        return started
