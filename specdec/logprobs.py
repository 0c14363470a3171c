"""Probabilities of scores, and log-probabilities of raw logits. Knows numbers only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specdec.errors import NonFinite
from specdec.ranking import NOWHERE, Floats, leaders
from specdec.terms import TokenLogprobs

FOLDS = 8  # parts of a row whose shares are added in the format of the row, the rest of a sum in float64


def softmax(scores: Floats) -> Floats:
    """Probabilities [n] of log-scores [n], float64 but for exp. numpy adds pairwise, in an order that only n decides."""
    return normalized(shares_of(scores, scores.max()))


def normalized(shares: Floats) -> Floats:
    """[n] that add up to 1, float64. shares [n], which stay as they are."""
    weights = shares.astype(np.float64)
    weights /= weights.sum()
    return weights


def shares_of(values: Floats, highest: np.floating[Any]) -> Floats:
    """exp(values - highest) [n], in the format of the values."""
    shares = values - highest
    return np.exp(shares, out=shares)


def token_logprobs(
    row: Floats, token: int, count: int, highest: np.floating[Any] | None = None, shares: Floats | None = None
) -> TokenLogprobs:
    """log p of `token` and of the `count` likeliest ids, likeliest first, ties by id. row [vocab_size]: raw logits; `highest` of them,
    `shares` = exp(row - highest), where they are known.

    A function of the row alone. exp and the sums of FOLDS numbers are taken in the format of the row, all else in float64, rounded to
    float32 at the end: of a float32 row within 1e-6 of the mathematical value before that rounding.
    """
    highest, folded = row.max() if highest is None else highest, len(row) - len(row) % FOLDS
    top = leaders(row, count) if count else NOWHERE
    with np.errstate(over="ignore"):  # finite logits may lie further apart than the format reaches
        shares = shares_of(row, highest) if shares is None else shares
        total = shares[:folded].reshape(FOLDS, -1).sum(axis=0).sum(dtype=np.float64) + shares[folded:].sum(dtype=np.float64)
        normalizer = float(highest) + math.log(total)
        values = (row[top].astype(np.float64) - normalizer).astype(np.float32).tolist()
        return TokenLogprobs(float(np.float32(float(row[token]) - normalizer)), tuple(top.tolist()), tuple(values))


def finite(entry: TokenLogprobs) -> TokenLogprobs:
    """The entry, all of it numbers; finite logits may lie so far apart that a log-probability is none. Raises NonFinite."""
    if not math.isfinite(sum(entry.top_logprobs, entry.logprob)):  # of numbers of 32 bits no sum runs over, and no other takes one back
        raise NonFinite("a log-probability is not finite")
    return entry
