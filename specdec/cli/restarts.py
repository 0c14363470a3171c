"""When a process that ended is started again, and when no longer. A decider: time and chance are arguments.

The first restart comes soon, each further one after twice the time, up to MOST_S. Chance takes up to half of that away, so that processes
that ended together do not come back together. What ended MOST_ENDS times within WINDOW_S does not live by being restarted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

BASE_S, MOST_S = 0.5, 15.0
MOST_ENDS, WINDOW_S = 5, 300.0


@dataclass(frozen=True, slots=True)
class Again:
    after_s: float
    ends: int  # within the window, this one included


@dataclass(frozen=True, slots=True)
class GiveUp:
    ends: int


class Restarts:
    def __init__(self) -> None:
        self._ends: defaultdict[str, deque[float]] = defaultdict(deque)

    def ended(self, name: str, now_s: float, chance: float) -> Again | GiveUp:
        """`now_s` never goes back; `chance` is uniform in [0, 1)."""
        ends = self._ends[name]
        ends.append(now_s)
        while ends[0] <= now_s - WINDOW_S:
            ends.popleft()
        if len(ends) >= MOST_ENDS:
            return GiveUp(len(ends))
        return Again(min(MOST_S, BASE_S * 2 ** (len(ends) - 1)) * (1 - chance / 2), len(ends))
