"""Which slots are worth verifying. Pure.

Theory. A round that verifies m slots of N sessions decides N + (the sum of their gains) tokens and takes the longer the more rows it has.
Of m slots the best are those of the largest gains, and since a chain's gains only fall, leading slots come first by themselves. The time
is a staircase, so the best m need not be where one more slot stops paying: every prefix of the sorted slots is tried (Liu et al. 2024,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", use the same objective for whole batches).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """`threshold` = least gain that is worth its row, infinite where there is no slot; `rate` = tokens per ms with all slots above it."""

    threshold: float
    rate: float


def choose(sessions: int, gains: Iterable[tuple[float, int]], time_ms: Callable[[int, int], float]) -> Choice:
    """The best way to verify at least one slot. `gains`: of each slot that may be proposed, with its depth in its chain from 1;
    `time_ms(m, depth)`: what a round takes that verifies m slots, the deepest of them at `depth`."""
    best, threshold = 0.0, math.inf
    total, deepest = float(sessions), 0
    for m, (gain, depth) in enumerate(sorted(gains, reverse=True), 1):
        total, deepest = total + gain, max(deepest, depth)
        rate = total / max(time_ms(m, deepest), 1e-9)
        if rate > best:
            best, threshold = rate, gain
    return Choice(threshold, best)


def worth(gains: Iterable[float], threshold: float) -> int:
    """How many leading slots are worth their rows. Whether slot i is does not depend on what lies behind it."""
    n = 0
    for gain in gains:
        if gain < threshold:
            break
        n += 1
    return n
