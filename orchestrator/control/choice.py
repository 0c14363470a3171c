"""Which slots are worth verifying. Pure.

Theory. A round that verifies m slots of N sessions decides N + (the sum of their gains) tokens and takes the longer the more rows it has,
and the longer the deeper the chains that it waits for. Of the slots up to a depth the best m are those of the largest gains, and since a
chain's gains only fall, leading slots come first by themselves. The time is a staircase, so the best m need not be where one more slot
stops paying: every depth and every prefix of the sorted slots is tried (Liu et al. 2024, "Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput", use the same objective for whole batches).

The gains are expected ones, the chains that come differ from them. So what is handed on is a threshold: between the last slot that is in
and the first that is out, and there where a slot just pays for its own time, or in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Slot = tuple[float, int]
"""Its gain, and its depth in its chain from 1."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`rate` = tokens per ms with the best slots; they are those up to `depth` whose gain is at least `threshold` (infinite: none is)."""

    threshold: float
    depth: int
    rate: float


NOTHING = Choice(math.inf, 0, 0.0)


def choose(tokens: float, slots: Sequence[Slot], times: Sequence[float], waits: Sequence[float], shares: Sequence[float] = ()) -> Choice:
    """The best way to verify at least one slot. `tokens` = decided without any; `slots`: all that may be proposed, largest gain first;
    `times[m]`: ms of a round that verifies m of them, without its wait, which is `waits[depth]` for the deepest; `shares[depth]` of the
    rounds have a block, empty = all."""
    best, deepest = NOTHING, len(waits) - 1
    for depth in range(1, len(waits)):
        share = shares[depth] if shares else 1.0
        within = slots if depth == deepest else [slot for slot in slots if slot[1] <= depth]
        always_ms = waits[depth] + (1.0 - share) * times[0]
        found = prefix(tokens, within, [always_ms + share * time for time in times[: len(within) + 1]], depth, share)
        if found.rate > best.rate:
            best = found
    return best


def prefix(tokens: float, slots: Sequence[Slot], times: Sequence[float], depth: int, share: float = 1.0) -> Choice:
    """The same where nothing is waited for, of slots that are no deeper than `depth`; `share` of the rounds have a block."""
    best, count, total = 0.0, 0, tokens
    for m, (gain, _) in enumerate(slots, 1):
        total += share * gain
        if total > best * times[m]:
            best, count = total / times[m], m
    if not count:
        return NOTHING
    inside, outside = slots[count - 1][0], slots[count][0] if count < len(slots) else 0.0
    low, high = count - 1 - count // 4, min(count + count // 4, len(slots))  # one row's own time is known badly
    pays = best * (times[high] - times[low]) / (high - low) / share
    return Choice(max(outside, min(pays, (inside + outside) / 2)), depth, best)


def worth(gains: Iterable[float], threshold: float) -> int:
    """How many leading slots are worth their rows. Whether slot i is does not depend on what lies behind it."""
    n = 0
    for gain in gains:
        if gain < threshold:
            break
        n += 1
    return n
