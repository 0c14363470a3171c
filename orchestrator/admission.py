"""Who may start, who waits, who is turned away. Pure; the driver calls it.

At most `max_running` generations run; at most `max_waiting` wait, lower priority number first, then first come first served: a stream
of urgent requests may keep the others waiting for ever, that is what they asked for. Beyond that a request is turned away at once with
a time to come back: a queue that cannot drain helps nobody.
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
        self._waiting: dict[str, int] = {}  # session -> its order
        self._queue: list[tuple[int, int, str]] = []  # (priority, order, session); who left is still in it for a while
        self._order = itertools.count()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, session_id: str, priority: int) -> bool:
        """True: run now. False: wait. Raises Overloaded when the waiting room is full."""
        if len(self._running) < self.max_running and not self._waiting:
            self._running.add(session_id)
            return True
        if self.waiting >= self.max_waiting:
            raise Overloaded(f"{self.running} requests run and {self.waiting} wait already", RETRY_AFTER_MS)
        order = self._waiting[session_id] = next(self._order)
        heapq.heappush(self._queue, (priority, order, session_id))
        return False

    def leave(self, session_id: str) -> list[str]:
        """A session ended or gave up waiting. Returns the sessions that may run now."""
        self._running.discard(session_id)
        if self._waiting.pop(session_id, None) is not None and len(self._queue) > 2 * len(self._waiting) + 16:
            self._queue = [entry for entry in self._queue if self._waits(entry)]
            heapq.heapify(self._queue)
        started = []
        while self._waiting and len(self._running) < self.max_running:
            entry = heapq.heappop(self._queue)
            if self._waits(entry):
                started.append(entry[2])
                self._running.add(entry[2])
                del self._waiting[entry[2]]
        return started

    def _waits(self, entry: tuple[int, int, str]) -> bool:
        return self._waiting.get(entry[2]) == entry[1]
