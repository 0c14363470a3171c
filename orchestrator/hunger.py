"""Whether a session should try another draft. Pure.

A draft may be good for most and late for one: other sessions go first there, or the way is long. What a session's rounds found is averaged;
when nearly none finds a proposal, and that for a while, it is worth a prompt's work elsewhere to see.
"""

from __future__ import annotations

FED = {"hit": 0.0, "late": 0.5, "miss": 1.0}  # outcomes of rounds that wanted the draft's proposal
WEIGHT = 1 / 16  # of the newest round
HUNGRY = 0.75
PATIENCE = 64  # rounds between two moves, and before the first: a draft begins with the prompt


class Hunger:
    """Of one session."""

    __slots__ = ("_average", "_rounds")

    def __init__(self) -> None:
        self._average, self._rounds = 0.0, 0

    def round(self, outcome: str) -> bool:
        """True: it has been hungry for long enough. It is asked again PATIENCE rounds later."""
        if (value := FED.get(outcome)) is None:
            return False
        self._average += WEIGHT * (value - self._average)
        self._rounds += 1
        if self._rounds < PATIENCE or self._average < HUNGRY:
            return False
        self._rounds = 0
        return True
