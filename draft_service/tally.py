"""What the draft counts. Pure: the service reads the numbers and reports the differences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from draft_service.session import Round
from draft_service.tree import Branch

DECAY = 0.98  # per round: the shares look back about fifty rounds


@dataclass(slots=True)
class Tally:
    """`tokens` = drawn, `wasted_tokens` = drawn and dropped before any target verified them, `broken` = rows that were not finite.

    `branches` counts those of them that were drawn behind guesses, by (guess, outcome): correction, bonus, or late, when the branch was
    gone before its step ended; used = the branch became the chain, wasted = it died. `grafts` = branches that became the chain.
    """

    tokens: int = 0
    wasted_tokens: int = 0
    branches: Counter[tuple[str, str]] = field(default_factory=Counter)
    grafts: int = 0
    steps: int = 0
    broken: int = 0
    _drafted: float = 0.0
    _needed: float = 0.0
    _rounds: float = 0.0
    _late: float = 0.0

    def waste(self, tokens: int, late_branch: bool) -> None:
        self.wasted_tokens += tokens
        if late_branch:
            self.branches["late", "wasted"] += tokens

    def died(self, branch: Branch) -> None:
        self.wasted_tokens += len(branch.drafts)
        self.branches[branch.kind, "wasted"] += len(branch.drafts)

    def grafted(self, branch: Branch) -> None:
        self.grafts += 1
        self.branches[branch.kind, "used"] += len(branch.drafts)

    def round(self, round_: Round) -> None:
        self.wasted_tokens += round_.wasted
        self._drafted = DECAY * self._drafted + round_.drafted
        self._needed = DECAY * self._needed + round_.needed
        self._rounds = DECAY * self._rounds + 1
        self._late = DECAY * self._late + round_.behind

    @property
    def needed_share(self) -> float:
        """Share of recently drawn tokens that a target verified; 1 before the first round."""
        return min(1.0, self._needed / self._drafted) if self._drafted else 1.0

    @property
    def late_share(self) -> float:
        """Share of recent rounds that found the draft behind."""
        return self._late / self._rounds if self._rounds else 0.0
