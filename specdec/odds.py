"""Which branches are worth drafting while a block is in flight. Pure; counts, and knows no session.

Theory (Saguaro, arXiv 2603.03251). A block of n tokens ends in one of n + 1 ways: refused
at place k, or accepted whole and followed by a bonus token. A branch guesses one way and the token that it ends with, so

    chance(k, j) = P(all before k are accepted) * P(refused at k) * P(the j-th guess is the correction | refused at k)

and the bonus likewise, without a refusal. The sum over the branches drafted is the hit rate, so the best set of a given size is the
likeliest branches. If the miss rate with F guesses falls as (1 + F)^-r, that set has F_k in proportion to P(ending at k)^(1 / (1 + r)),
which for a constant acceptance a is a^(k / (1 + r)), times (1 - a)^(-1 / (1 + r)) for the bonus: the paper's rule. Here it is only where
the counting begins, with r = 1: acceptance is counted by bin of the draft's confidence, and guesses by rank.

Confidences are the largest probability at a place, whatever was drawn there, so all of this may be used under speculative sampling too.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

EDGES = (0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.97)
RANKS = 12  # guesses of one place that are told apart
EXPONENT = 1.0  # r, before anything is counted
BONUS = 0.6  # chance that the draft's own token is the bonus, before anything is counted
PRIOR = 8.0  # observations that the beginning is worth
DECAY = 0.998  # per observation


class Wish(NamedTuple):
    """A branch worth having: the `rank`-th guess (0 = likeliest) at `place` of the block, its length for the bonus, whose rank 0 is the
    draft's own token."""

    chance: float
    place: int
    rank: int


class Ending(NamedTuple):
    """How a block ended: confidences of the places that were decided, the refused one last. `rank`: of the token that followed among the
    guesses there; None = it was none of them."""

    confidences: tuple[float, ...]
    refused: bool
    rank: int | None


class Odds:
    def __init__(self) -> None:
        self._accepted = [_Share(PRIOR / 2) for _ in range(len(EDGES) + 1)]
        self._ranks = {bonus: [_Share(PRIOR) for _ in range(RANKS)] for bonus in (False, True)}

    def accepted(self, confidence: float) -> float:
        """Chance that a token drafted with this confidence is accepted once all before it are."""
        return self._accepted[bisect.bisect(EDGES, confidence)].value(confidence)

    def right(self, bonus: bool, rank: int) -> float:
        """Chance that this guess is what follows, once the block has ended there."""
        return self._ranks[bonus][rank].value(_beginning(bonus, rank)) if rank < RANKS else 0.0

    def wishes(self, confidences: Sequence[float | None], most: int, floor: float) -> list[Wish]:
        """The `most` likeliest branches of a block, none below `floor`, likeliest first. `confidences`: of its tokens; None = nothing is
        known there, the token came from elsewhere: it counts as certain and has no guesses."""
        wishes, reached = [], 1.0
        for place, confidence in enumerate(confidences):
            stays = 1.0 if confidence is None else self.accepted(confidence)
            wishes += [Wish(reached * (1.0 - stays) * self.right(False, rank), place, rank) for rank in range(RANKS)]
            reached *= stays
        wishes += [Wish(reached * self.right(True, rank), len(confidences), rank) for rank in range(RANKS)]
        worth = [wish for wish in wishes if wish.chance > 0.0 and wish.chance >= floor]
        return sorted(worth, key=lambda wish: -wish.chance)[: max(0, most)]

    def learn(self, ending: Ending) -> None:
        last = len(ending.confidences) - 1
        for place, confidence in enumerate(ending.confidences):
            self._accepted[bisect.bisect(EDGES, confidence)].learn(not (ending.refused and place == last))
        for rank, share in enumerate(self._ranks[not ending.refused]):
            share.learn(rank == ending.rank)


class _Share:
    """How often something was so. `weight`: observations that the beginning is worth."""

    __slots__ = ("_seen", "_true", "_weight")

    def __init__(self, weight: float) -> None:
        self._seen = self._true = 0.0
        self._weight = weight

    def value(self, beginning: float) -> float:
        return (self._true + self._weight * beginning) / (self._seen + self._weight)

    def learn(self, true: bool) -> None:
        self._seen = DECAY * self._seen + 1
        self._true = DECAY * self._true + true


def _beginning(bonus: bool, rank: int) -> float:
    if bonus and rank == 0:
        return BONUS
    rank, rest = (rank - 1, 1.0 - BONUS) if bonus else (rank, 1.0)
    return float(rest * ((1 + rank) ** -EXPONENT - (2 + rank) ** -EXPONENT))
