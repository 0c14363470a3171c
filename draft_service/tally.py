"""What the draft counts. Pure: the service reads the numbers and reports the differences."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98  # per round: the shares look back about fifty rounds


@dataclass(slots=True)
class Tally:
    """`tokens` = drawn, `wasted_tokens` = drawn and dropped before any target verified them, `broken` = rows that were not finite."""

    tokens: int = 0
    wasted_tokens: int = 0
    steps: int = 0
    broken: int = 0
    refused: int = 0
    _drafted: float = 0.0
    _needed: float = 0.0
    _rounds: float = 0.0
    _late: float = 0.0

    def waste(self, dropped: int, length: int, verified: int) -> None:
        """`dropped` tokens at the end of a chain of `length` went; those before index `verified` had been sent to a target."""
        self.wasted_tokens += min(dropped, max(0, length - verified))

    def round(self, drafted: int, needed: int, behind: bool) -> None:
        """A commit: tokens drawn since the last one, tokens of the block that were drafted here, whether more was wanted than there."""
        self._drafted = DECAY * self._drafted + drafted
        self._needed = DECAY * self._needed + needed
        self._rounds = DECAY * self._rounds + 1
        self._late = DECAY * self._late + behind

    @property
    def needed_share(self) -> float:
        """Share of recently drawn tokens that a target verified; 1 before the first round."""
        return min(1.0, self._needed / self._drafted) if self._drafted else 1.0

    @property
    def late_share(self) -> float:
        """Share of recent rounds that found the draft behind."""
        return self._late / self._rounds if self._rounds else 0.0
