"""What the draft counts. Pure: the service reads the numbers and reports the differences."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.session import Round
from draft_service.tree import Branch

DECAY = 0.98  # per round: the shares look back about fifty rounds


@dataclass(slots=True)
class Tally:
    """`tokens` = drawn, `wasted_tokens` = drawn and dropped before any target verified them, `broken` = rows that were not finite. Of these
    in branches: `branch_tokens`, `wasted_branch_tokens`; `used_branch_tokens` = those of branches that became the chain, `grafts`."""

    tokens: int = 0
    wasted_tokens: int = 0
    branch_tokens: int = 0
    used_branch_tokens: int = 0
    wasted_branch_tokens: int = 0
    grafts: int = 0
    steps: int = 0
    broken: int = 0
    refused: int = 0
    _drafted: float = 0.0
    _needed: float = 0.0
    _rounds: float = 0.0
    _late: float = 0.0

    def waste(self, tokens: int, of_a_branch: bool) -> None:
        self.wasted_tokens += tokens
        self.wasted_branch_tokens += tokens if of_a_branch else 0

    def grafted(self, branch: Branch) -> None:
        self.grafts += 1
        self.used_branch_tokens += len(branch.drafts)

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
