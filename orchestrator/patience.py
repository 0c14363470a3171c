"""How often a session may be placed without a result, and how long it pauses between. Pure.

Neither a target that fails at once nor a request that kills its target may keep either busy; a target that refuses because it is
stopping has done nothing wrong, costs time and no more. A result forgives all that came before it.
"""

from __future__ import annotations

MAX_FRUITLESS = 8  # epochs in a row without a result until a generation gives up
MAX_REFUSED = 20  # refusals in a row, about half a minute
FIRST_PAUSE_MS, LAST_PAUSE_MS = 100.0, 2000.0  # before the third placement in a row that decided nothing, doubling from there


class Patience:
    def __init__(self) -> None:
        self.fruitless = 0  # epochs since the last result
        self._refused = 0  # of those a target refused, not among the fruitless

    def epoch(self) -> bool:
        """One more epoch begins. False: it would be one too many."""
        self.fruitless += 1
        return self.fruitless <= MAX_FRUITLESS

    def refused(self) -> bool:
        """The target of this epoch takes nobody. False: it happened too often."""
        if self._refused >= MAX_REFUSED:
            return False
        self.fruitless, self._refused = self.fruitless - 1, self._refused + 1
        return True

    def excused(self) -> None:
        """The next epoch begins because another target has room: it does not count."""
        self.fruitless -= 1

    def decided(self) -> None:
        self.fruitless = self._refused = 0

    @property
    def used_up(self) -> bool:
        """Whether no further epoch may begin."""
        return self.fruitless >= MAX_FRUITLESS

    @property
    def pause_ms(self) -> float:
        """Before the next placement; 0 = none."""
        tries = self.fruitless + self._refused
        return min(LAST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** (tries - 2)) if tries > 1 else 0.0
