"""Which scores of a row top_k, top_p and min_p leave. Knows no ids, no noise, no session.

Scores [n] are log-probabilities up to a constant, the best is 0, -inf = impossible. Each cut keeps the best and drops the rest, and of
equals keeps the first: whatever is dropped takes along all that comes after it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from specdec.ranking import FEW, NEAR, Floats, Places, ahead, best, best_possible
from specdec.terms import SamplingParams

_MASS_UNIT = 2.0**34
_PIECE = 9984  # numbers: with 10,000 or fewer the library asks no other thread for help
_NEAR_AT_MOST = 4096  # of them, for a look at those alone
_HOT = 2.0  # a temperature above which most of a row is near
_WALKED_TOP_P = 0.5  # from here on the first pick is usually kept


def mass(scores: Floats) -> Floats:
    """exp(scores) in multiples of 2**-34, rounded down: whole float64 numbers. scores [n] <= 0."""
    masses = np.exp(scores)
    masses *= _MASS_UNIT  # exact: a power of two
    np.floor(masses, out=masses)
    return masses.astype(np.float64, copy=False)


def kept(scores: Floats, params: SamplingParams) -> Places | None:
    """Ascending places of `scores` [n] that stay; None = all that are not -inf."""
    places: Places | None = None
    if 0 < params.top_k < len(scores):
        places = best_possible(scores, params.top_k, -NEAR)
    if params.top_p < 1.0:
        values = scores if places is None else scores[places]
        masses = mass(values)
        inside = best(values, masses, _needed(masses, params.top_p), -NEAR)
        places = inside if places is None else places[inside]
    if params.min_p > 0.0:
        lowest = math.log(params.min_p)
        places = np.flatnonzero(scores >= lowest) if places is None else places[scores[places] >= lowest]
    return places


def _needed(masses: Floats, top_p: float) -> int:
    total = int(masses.sum())
    return min(total, max(1, math.ceil(top_p * total)))


class Walk:
    """The other way round: is this place kept? A walk from pick to pick ends at the first that is, and seldom takes two steps.

    For cuts that keep so much that finding all of it would cost more than finding out about one: `pays`.
    """

    def __init__(self, scores: Floats, params: SamplingParams) -> None:
        self.scores = scores
        self.places: Places | None = None  # of the present scores in the row; None = all
        self._params, self._row, self._top_k, self._top_p = params, scores, params.top_k, params.top_p
        self._lowest = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        self._shares: Floats | None = None  # exp of the row, computed when it is needed
        self._total = 0.0

    @staticmethod
    def pays(params: SamplingParams) -> bool:
        if 0 < params.top_k <= FEW or params.top_p < _WALKED_TOP_P:
            return False
        if params.top_k > 0 and params.top_p < 1.0:
            return params.temperature <= 1.0  # else the near scores seldom have the share that saves finding all of it
        return params.top_k > 0 or params.top_p < 1.0

    def ends_at(self, place: int) -> bool:
        """Whether `place` of the present scores is kept. If not, only the places before it may be, and are what is left."""
        if self.scores[place] >= self._lowest and self._surely_keeps(place):
            return True
        if self._top_k > 0 and self._top_p < 1.0:
            return self._is_of_all(place)
        if self.scores[place] >= self._lowest and self._keeps(ahead(self.scores, place)):
            return True
        left = np.flatnonzero(ahead(self.scores, place))
        self.scores = self.scores[left]
        self.places = left if self.places is None else self.places[left]
        return False

    def _surely_keeps(self, place: int) -> bool:
        """Whether the share of the near scores alone leaves room for a place; a share of more would leave more."""
        if self._params.temperature > _HOT:
            return False
        value = self.scores[place]
        near = self.scores >= min(float(value), -NEAR)
        count = np.count_nonzero(near)
        if count > _NEAR_AT_MOST or 0 < self._top_k < count:
            return False
        if self._top_p == 1.0:
            return True
        places = np.flatnonzero(near)
        values = self.scores[places]
        masses = mass(values)
        before = (values > value) | ((values == value) & (places < place))
        return int(masses[before].sum()) < _needed(masses, self._top_p)

    def _is_of_all(self, place: int) -> bool:
        """Whether `place` is among all that is kept. If not, that is what is left."""
        if self.places is not None:
            return True
        places = kept(self._row, self._params)
        assert places is not None
        found = int(np.searchsorted(places, place))
        if found < len(places) and places[found] == place:
            return True
        self.places, self.scores = places, self._row[places]
        return False

    def _keeps(self, front: npt.NDArray[np.bool_]) -> bool:
        """Whether what comes before a place [n] leaves room for it."""
        if self._top_k > 0:
            return int(np.count_nonzero(front)) < self._top_k
        if self._shares is None:
            self._shares = np.exp(self._row)
            self._total = float(self._shares.sum())
        shares = self._shares if self.places is None else self._shares[self.places]
        over = _weight(shares, front) - self._top_p * self._total
        # Sums of n numbers are off by at most n * 2**-24 of themselves in any order, masses by 2**-34 each.
        if abs(over) > self._total * len(self._row) * 2.0**-22:
            return over < 0.0
        masses = mass(self._row)
        needed = _needed(masses, self._top_p)
        return _weight(masses if self.places is None else masses[self.places], front) < needed


def _weight(weights: Floats, front: npt.NDArray[np.bool_]) -> float:
    """The sum of what is in front."""
    inside = front.astype(weights.dtype)
    return sum(float(np.vdot(weights[start : start + _PIECE], inside[start : start + _PIECE])) for start in range(0, len(weights), _PIECE))
