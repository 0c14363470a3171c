"""What else could have followed: the tokens of a row that come next by the very score that chose its token. Knows no session.

When a target refuses a draft's token it decides another one at the same place, and the draft's own row says which ones are likely:
    greedy, or temperature 0                 the next largest logits
    under shared noise (gumbel)              the next largest log q + g, with the same noise g that the target hears
    drawn under the standard method          the next largest q: the target draws from what p has in excess of q

A guess costs agreement when it is wrong and never correctness, so only the near part of a row is looked at, and the noise is that of
noise.py up to its last bits.
"""

from __future__ import annotations

import numpy as np

from specdec.cuts import kept
from specdec.noise import Keys
from specdec.ranking import Floats, leaders
from specdec.sampling import Sampler
from specdec.seeds import SHARED, position_key
from specdec.terms import DraftMethod

DEPTH = 6.0  # of tempered scores: what is further below the best is no guess worth having
MOST = 16  # guesses of a row


class Guesses:
    """Of one row. Holds the near part of it, and ranks that when it is first asked; most rows are never asked."""

    __slots__ = ("_ids", "_key", "_params", "_ranked", "_scores", "_token")

    def __init__(self, sampler: Sampler, scores: Floats, position: int, method: DraftMethod, token: int) -> None:
        """scores [width]: as Sampler.temper gives them, kept; `token` = what was chosen at `position`."""
        near = np.flatnonzero(scores >= -DEPTH)
        self._ids: Keys = sampler.ids[near]
        self._scores: Floats = scores[near]
        self._params, self._token = sampler.params, token
        noisy = method is DraftMethod.GUMBEL and not sampler.params.greedy
        self._key = position_key(sampler.seed, SHARED, position) if noisy else None
        self._ranked: tuple[int, ...] | None = None

    def ranked(self) -> tuple[int, ...]:
        """At most MOST ids other than the chosen one, likeliest first."""
        if self._ranked is None:
            ids, scores = self._ids, self._scores
            places = None if self._params.greedy else kept(scores, self._params)
            if places is not None:
                ids, scores = ids[places], scores[places]
            if self._key is not None:
                scores = scores + _gumbel(self._key, ids)
            order = ids[leaders(scores, MOST + 1)].tolist()
            self._ranked = tuple(token for token in order if token != self._token)[:MOST]
            self._ids, self._scores = self._ids[:0], self._scores[:0]
        return self._ranked


def _gumbel(key: int, ids: Keys) -> Floats:
    """noise.gumbel of every id [n], float64; its last bits are the machine's."""
    h = ids ^ np.uint64(key)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    u = (h >> np.uint64(11)) * 2.0**-53 + 2.0**-54
    gumbel: Floats = -np.log(-np.log1p(-np.minimum(u, 1.0 - 2.0**-53)))
    return gumbel
