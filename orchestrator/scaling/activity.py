"""Whether a pool needs any replica at all. A decider: time is an argument, seconds of one clock.

It does while calls wait for one, and while sessions are held there. What was so within HOLD_S still counts: who asks every half a minute
must not miss a call that came and went, nor take a replica away between two of them.
"""

from __future__ import annotations

from collections import deque

HOLD_S = 60.0


class Recent:
    """The most of a level within the last HOLD_S."""

    def __init__(self) -> None:
        self._levels: deque[tuple[float, int]] = deque()  # falling levels; the time of a level is the last at which it was so

    def note(self, level: int, now_s: float) -> None:
        while self._levels and self._levels[-1][1] <= level:
            self._levels.pop()
        self._levels.append((now_s, level))
        self._forget(now_s)

    def most(self, now_s: float) -> int:
        self._forget(now_s)
        return self._levels[0][1] if self._levels else 0

    def _forget(self, now_s: float) -> None:
        while self._levels and now_s - self._levels[0][0] > HOLD_S:
            self._levels.popleft()


class Activity:
    """Of one pool."""

    def __init__(self) -> None:
        self._waiting, self._sessions = Recent(), Recent()

    def note(self, waiting: int, sessions: int, now_s: float) -> None:
        """`waiting` = calls of this orchestrator; `sessions` = of all, by the replicas' word."""
        self._waiting.note(waiting, now_s)
        self._sessions.note(sessions, now_s)

    def waiting(self, now_s: float) -> int:
        return self._waiting.most(now_s)

    def active(self, elsewhere: int, now_s: float) -> bool:
        """`elsewhere` = calls of other orchestrators that wait."""
        return self.waiting(now_s) + elsewhere + self._sessions.most(now_s) > 0
