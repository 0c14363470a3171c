"""A level over time, as an average in which what is longer ago counts less. Standard library only; time comes in, seconds of one clock."""

from __future__ import annotations

import math


class Smoothed:
    """Exponential, with a time constant: what a level was `constant_s` ago weighs a third of what it is. 0 before the first moment; a
    level that stays is reached to 63 % after one time constant and to 95 % after three."""

    def __init__(self, constant_s: float) -> None:
        self.constant_s = constant_s
        self.value = 0.0
        self._until_s: float | None = None

    def note(self, level: float, now_s: float) -> None:
        """The level from the last note until `now_s`; of the first note only the moment counts."""
        if self._until_s is None:
            self._until_s = now_s
        passed_s = max(0.0, now_s - self._until_s)
        self._until_s += passed_s
        self.value += (1 - math.exp(-passed_s / self.constant_s)) * (level - self.value)
