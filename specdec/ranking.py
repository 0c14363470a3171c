"""The best of a row without sorting it. Knows numbers only.

A row has tens of thousands of values, and what is wanted is usually among a few hundred of them. So everything here begins with a value
that enough of the row reaches, found in a pass or two, and looks closely only at what is above it. Answers are exact whatever the row
holds; what it holds decides only how long they take.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Places = npt.NDArray[np.int64]

NEAR = 11.0  # how far below the best the few hundred values are that usually matter, of logits or scores
FEW = 512  # places: sorted at once
NOWHERE: Places = np.zeros(0, dtype=np.int64)
_MANY = 4096  # places that a guess may bring: more work than a better guess
_PARTITIONED = 8192  # from here on a histogram is faster
_BUCKETS, _DEPTH, _SHALLOWEST = 2048, 40.0, 1e-30  # of a histogram, and how far down it reaches


def head(values: Floats, count: int, guess: float) -> tuple[Places, float]:
    """Ascending places of at least `count` of the largest values [n], seldom of many more, and the least value that got in.

    None at all, and -inf, when `count` is not much less than n, or than what is above -inf.
    `guess`: a value that perhaps so many reach.
    """
    inside = values >= guess
    if not count <= np.count_nonzero(inside) <= _MANY:
        guess = reached(values, max(count, FEW // 4))
        if guess == -math.inf:
            return NOWHERE, guess
        inside = values >= guess
    return np.flatnonzero(inside), guess


def reached(values: Floats, count: int) -> float:
    """A value that at least `count` of `values` [n] reach, and seldom many more; -inf when `count` is not much less than n."""
    if 8 * count > len(values):
        return -math.inf
    return _reached_by_blocks(values, count) if count <= FEW else _reached_by_sample(values, count)


def _reached_by_blocks(values: Floats, count: int) -> float:
    """Of the maxima of many blocks, the count-th best: each of those blocks holds a value that reaches it."""
    blocks = 2 * FEW if len(values) >= 4 * FEW else 2 * count
    maxima = values[: len(values) - len(values) % blocks].reshape(-1, blocks).max(axis=0)
    return float(np.partition(maxima, blocks - count)[blocks - count])


def _reached_by_sample(values: Floats, count: int) -> float:
    """The value in that place of a sorted sample, three standard deviations further down for safety."""
    sample = values[:: len(values) // (2 * FEW)]
    expected = count * len(sample) / len(values)
    place = min(len(sample), int(expected + 3.0 * math.sqrt(expected)) + 1)
    value = float(np.partition(sample, len(sample) - place)[len(sample) - place])
    return value if np.count_nonzero(values >= value) >= count else -math.inf


def best(values: Floats, weights: Floats | None, target: int, guess: float = -math.inf) -> Places:
    """Ascending places of the fewest largest values [n] whose weights reach `target`; among equals the first come first.

    weights [n]: whole numbers whose sum is at least `target` >= 1 and below 2**53; equal values have equal weights; None =
    each weighs 1. `guess`: a value that perhaps enough of them reach.
    """
    for count, value in [(target, guess)] if weights is None else [(1, guess), (FEW, math.inf)]:
        places, border = head(values, count, value)
        if border > -math.inf and _weigh(weights, places) >= target:
            return places[_best(values[places], None if weights is None else weights[places], target)]
    return _best(values, weights, target)


def best_possible(values: Floats, count: int, guess: float = -math.inf) -> Places:
    """Ascending places of the `count` >= 1 largest values [n] above -inf, among equals the first; all that are, where there are no more."""
    if count <= FEW and (border := reached(values, count)) > -math.inf:
        places = np.flatnonzero(values >= border)
        return places[_best(values[places], None, count)]
    possible = values > -math.inf
    return best(values, None, count, guess) if np.count_nonzero(possible) > count else np.flatnonzero(possible)


def leaders(values: Floats, count: int) -> Places:
    """Places of the `count` >= 1 largest values [n], largest first; among equals the first come first. All when there are no more."""
    places = np.flatnonzero(values >= reached(values, count))
    if len(places) > FEW and count < len(values):
        places = best(values, None, count)
    order: Places = np.argsort(-values[places], kind="stable")[:count]
    return places[order]


def ahead(values: Floats, place: int) -> npt.NDArray[np.bool_]:
    """[n]: what comes before `place`, larger values and equal ones in front of it."""
    value = values[place]
    mask: npt.NDArray[np.bool_] = values > value
    mask[:place] |= values[:place] == value
    return mask


def _best(values: Floats, weights: Floats | None, target: int) -> Places:
    if len(values) <= FEW:
        order = np.argsort(-values, kind="stable")
        return np.sort(order[: target if weights is None else int(np.searchsorted(weights[order].cumsum(), target)) + 1])
    if weights is None and len(values) <= _PARTITIONED:
        border = float(np.partition(values, len(values) - target)[len(values) - target])
    else:
        border = _border(values, weights, target)
    inside = np.flatnonzero(values >= border)
    ties = np.flatnonzero(values[inside] == border)
    each = 1 if weights is None else int(weights[inside[ties[0]]])
    surplus = (_weigh(weights, inside) - target) // each
    return np.delete(inside, ties[len(ties) - surplus :]) if surplus else inside


def _weigh(weights: Floats | None, places: Places) -> int:
    return len(places) if weights is None else int(weights[places].sum())


def _border(values: Floats, weights: Floats | None, target: int) -> float:
    """The value v with weight(values > v) < target <= weight(values >= v): a histogram finds the bucket it is in, sorting the rest."""
    highest, lowest = float(values.max()), float(values.min())
    span = max(min(highest - lowest, _DEPTH), _SHALLOWEST)
    with np.errstate(over="ignore"):
        depth = highest - values
    np.minimum(depth, span, out=depth)
    depth *= (_BUCKETS - 1) / span
    bucket = depth.astype(np.intp)
    running = np.bincount(bucket, weights, _BUCKETS).cumsum()
    place = int(np.searchsorted(running, target))
    target -= int(running[place - 1]) if place else 0
    inside = np.flatnonzero(bucket == place)
    values, weights = values[inside], None if weights is None else weights[inside]
    order = np.argsort(-values)
    running = np.arange(1, len(values) + 1) if weights is None else weights[order].cumsum()
    return float(values[order[np.searchsorted(running, target)]])
