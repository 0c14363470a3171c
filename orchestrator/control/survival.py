"""The chance that a slot of a chain stands, given that all before it stand. Pure.

Theory. Counted per bin of the draft's confidence and per position, over all sessions; a bin that was rarely seen leans on the same
confidence at any position, and that one on the confidence itself. Texts differ: a session shifts the odds of every slot by one number of
its own, moved a little by each verified slot (one step of logistic regression), so that a dozen rounds tell code from small talk.

Only verified slots teach: up to the first refused one. What lies behind it was never judged, and under the standard method must not be
looked at either: a later round draws at the same places with the same noise.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
POSITIONS = 6  # told apart; later ones count as the last
DECAY = 0.995  # per observation of a cell
POOL_WEIGHT, PRIOR_WEIGHT = 8.0, 4.0  # observations that the wider estimate is worth
FIRST_STEP, LAST_STEP = 0.25, 0.04  # of a session's shift
MOST_SHIFT = 3.0
LEAST = 1e-6  # chance that a slot stands, or falls
OWN_MEMORY, COMMON_MEMORY = 16.0, 100.0  # slots that a running mean remembers
HEIRLOOM = 3.0  # slots that the common mean is worth in a new session


class _Cell:
    __slots__ = ("seen", "stood")

    def __init__(self) -> None:
        self.seen = self.stood = 0.0

    def learn(self, stood: bool) -> None:
        self.seen = DECAY * self.seen + 1
        self.stood = DECAY * self.stood + stood


class _Usual:
    """Running mean of the chance at each position, over the slots that were reached."""

    def __init__(self, means: Sequence[float], seen: Sequence[float], memory: float) -> None:
        self.means, self._seen, self._memory = list(means), list(seen), memory

    def meet(self, position: int, chance: float) -> None:
        means = self.means
        if position == len(means):
            means.append(chance)
            self._seen.append(0.0)
        if position < len(means):
            seen = self._seen[position] + 1
            self._seen[position] = seen = seen if seen < self._memory else self._memory
            means[position] += (chance - means[position]) / seen

    def heir(self) -> _Usual:
        """Begins where this one is, and forgets it sooner."""
        return _Usual(self.means, [min(seen, HEIRLOOM) for seen in self._seen], OWN_MEMORY)

    def doubt(self) -> None:
        self._seen = [min(seen, HEIRLOOM) for seen in self._seen]


class Survival:
    """Of one source of proposals, over all sessions. `prior` = chance where nothing is known; None = the confidence itself."""

    def __init__(self, prior: float | None = None) -> None:
        self._prior = prior
        self._pools = [_Cell() for _ in range(len(EDGES) + 1)]
        self._cells = [[_Cell() for _ in self._pools] for _ in range(POSITIONS)]
        self.usual = _Usual((), (), COMMON_MEMORY)

    def chance(self, position: int, confidence: float) -> float:
        """`position` from 0."""
        i = bisect.bisect(EDGES, confidence)
        pool, cell = self._pools[i], self._cells[position if position < POSITIONS else -1][i]
        prior = self._prior if self._prior is not None else confidence
        pooled = (pool.stood + PRIOR_WEIGHT * prior) / (pool.seen + PRIOR_WEIGHT)
        return (cell.stood + POOL_WEIGHT * pooled) / (cell.seen + POOL_WEIGHT)

    def learn(self, position: int, confidence: float, stood: bool) -> None:
        i = bisect.bisect(EDGES, confidence)
        self._pools[i].learn(stood)
        self._cells[min(position, POSITIONS - 1)][i].learn(stood)


class SessionSurvival:
    """Of one source in one session."""

    def __init__(self, common: Survival) -> None:
        self._common = common
        self._shift = 0.0
        self._step = FIRST_STEP
        self._usual = common.usual.heir()

    def gains(self, confidences: Sequence[float]) -> list[float]:
        """For each slot the chance that it and all before it stand: tokens that a round gains by it."""
        gains, product = [], 1.0
        for position, confidence in enumerate(confidences):
            product *= self._chance(position, confidence)
            gains.append(product)
        return gains

    def worth(self, confidences: Sequence[float], threshold: float) -> int:
        """How many leading slots gain at least so much. Whether slot i does not depend on what lies behind it."""
        product = 1.0
        for position, confidence in enumerate(confidences):
            product *= self._chance(position, confidence)
            if product < threshold:
                return position
        return len(confidences)

    def expected(self, most: int) -> list[float]:
        """The same for a chain that is not there yet: by what chains of this session were like."""
        gains, product = [], 1.0
        for position in range(most):
            product *= self._at(position)
            gains.append(product)
        return gains

    def doubt(self) -> None:
        """What was usual was long ago: what comes counts for more."""
        self._usual.doubt()

    def _at(self, position: int) -> float:
        means = self._usual.means
        if not means:
            return self._chance(position, 0.5)
        return means[min(position, len(means) - 1)]

    def _chance(self, position: int, confidence: float) -> float:
        chance = self._common.chance(position, confidence)
        chance = LEAST if chance < LEAST else chance if chance < 1 - LEAST else 1 - LEAST
        return 1 / (1 + (1 / chance - 1) * math.exp(-self._shift)) if self._shift else chance

    def learn(self, confidences: Sequence[float], verified: int, accepted: int) -> None:
        """A round verified the first `verified` slots and kept `accepted` of them."""
        for position in range(min(verified, accepted + 1, len(confidences))):
            confidence, stood = confidences[position], position < accepted
            chance = self._chance(position, confidence)
            shift, step = self._shift + self._step * (stood - chance), 0.95 * self._step
            self._shift = shift if -MOST_SHIFT < shift < MOST_SHIFT else math.copysign(MOST_SHIFT, shift)
            self._step = step if step > LAST_STEP else LAST_STEP
            self._common.learn(position, confidence, stood)
            chance = self._chance(position, confidence)
            self._usual.meet(position, chance)
            self._common.usual.meet(position, chance)
