"""Whether drafting past a block in flight is likely to be of use. Pure.

Theory. What is drafted past a block survives only when the whole block is accepted (and the bonus token was guessed). The product of the
block's confidences orders blocks by that chance well, but is the chance itself only for some drafts: a draft that shares the target's noise
agrees far more often than its largest probability says, an overconfident one less. So the chance is counted per bin of the product,
starting from the product itself, and counted on every block, looked past or not: no probing is needed.

A useless lookahead is not free: other sessions wait for the pass it takes part in, and where draft and target share a cache or a memory bus
it slows the very step it waits for (docs/decisions/0004).
The decision rests on earlier slots and finished rounds alone, never on the token of a slot that it decides about, so that it may be taken
under speculative sampling too.
"""

from __future__ import annotations

import bisect

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.6)
PRIOR = 4.0  # observations that the product itself is worth
DECAY = 0.99  # per observation of a bin


class Outlook:
    def __init__(self, floor: float) -> None:
        """`floor` = smallest chance worth drafting ahead for; 0 = always."""
        self.floor = floor
        self._seen = [0.0] * (len(EDGES) + 1)
        self._full = [0.0] * (len(EDGES) + 1)

    def chance(self, product: float) -> float:
        """Of a block with this product of confidences to be accepted whole."""
        i = bisect.bisect(EDGES, product)
        return (self._full[i] + PRIOR * product) / (self._seen[i] + PRIOR)

    def worthwhile(self, product: float) -> bool:
        return self.chance(product) >= self.floor

    def learn(self, product: float, full: bool) -> None:
        """A block with this product was, or was not, accepted whole."""
        i = bisect.bisect(EDGES, product)
        self._seen[i] = DECAY * self._seen[i] + 1
        self._full[i] = DECAY * self._full[i] + full
