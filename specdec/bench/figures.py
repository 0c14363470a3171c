"""Pure statistics of measurements: percentiles, ratios with their intervals, survival of proposals. Numbers in, numbers out.

A ratio of rates is compared in pairs: both were measured in one repeat, minutes at most apart, on the same prompts, so that what the
machine did meanwhile touches both. Ratios are multiplied, never added: their mean is the geometric one (Fleming and Wallace, "How not to
lie with statistics", CACM 1986), and its interval is Student's t on their logarithms (Georges, Buytaert, Eeckhout, "Statistically rigorous
Java performance evaluation", OOPSLA 2007, section 3.2).
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from specdec.terms import Origin

_T = TypeVar("_T")

CONFIDENCE = 0.95
RESAMPLES = 400
MOST_REPEATS = 1000  # more are not worth naming
MOST_AT_ONCE = 1 << 21  # numbers in memory
SEED = 20260101  # of the bootstrap: the same measurements give the same interval


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of `pairs` ratios; the interval is None for a single pair, which says nothing about its own spread."""

    mean: float
    low: float | None
    high: float | None
    pairs: int


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks, as numpy's default; 0.0 for no values. `share` from 0 to 1."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratio(ours: Sequence[float], others: Sequence[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """ours[i] / others[i]. Pairs in which one side is not positive are left out; None when no pair remains."""
    logs = [math.log(a / b) for a, b in zip(ours, others, strict=True) if a > 0 and b > 0]
    if not logs:
        return None
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None, 1)
    reach = student_quantile(len(logs) - 1, confidence) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs))


def bootstrap(
    repeats: Sequence[_T],
    statistic: Callable[[Sequence[_T]], float],
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[float, float] | None:
    """(low, high) of a statistic of whole repeats, drawn with replacement: the percentile bootstrap (Efron and Tibshirani, "An introduction
    to the bootstrap", 1993, chapter 13). Repeats are drawn and not answers, since the answers of one repeat shared its minute. None for
    fewer than two."""
    if len(repeats) < 2:
        return None
    draws = np.random.default_rng(seed).integers(0, len(repeats), (resamples, len(repeats)))
    found = [statistic([repeats[i] for i in draw]) for draw in draws.tolist()]
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def bootstrap_quantile(
    repeats: Sequence[Sequence[float]], share: float, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float] | None:
    """The same of a quantile over all values of the drawn repeats: sorted once, and weighed by how often each repeat was drawn."""
    repeats = [one for one in repeats if len(one)]
    if len(repeats) < 2:
        return None
    values, owner = np.concatenate([np.asarray(one) for one in repeats]), np.repeat(np.arange(len(repeats)), [len(one) for one in repeats])
    order = np.argsort(values, kind="stable")
    values, owner = values[order], owner[order]
    draws = np.random.default_rng(seed).integers(0, len(repeats), (resamples, len(repeats)))
    found = []
    for draw in np.array_split(draws, -(-resamples * len(values) // MOST_AT_ONCE)):
        times = np.stack([np.bincount(one, minlength=len(repeats)) for one in draw])
        seen = np.cumsum(times[:, owner], axis=1)
        place = share * (seen[:, -1] - 1)
        low = np.floor(place)
        below, above = (values[np.argmax(seen > rank[:, None], axis=1)] for rank in (low, np.minimum(low + 1, seen[:, -1] - 1)))
        found.append(below + (above - below) * (place - low))
    ends = np.quantile(np.concatenate(found), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(ends[0]), float(ends[1])


def careful_ratio(ours: Sequence[float], others: Sequence[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """As `ratio`, with an interval that holds the bootstrap's as well. Of five repeats the percentile bootstrap alone holds the truth in
    about 82 of 100 cases; Student's t holds it as promised where logarithms of ratios are near normal, the bootstrap where they are not."""
    found = ratio(ours, others, confidence)
    if found is None or found.low is None or found.high is None:
        return found
    logs = [math.log(a / b) for a, b in zip(ours, others, strict=True) if a > 0 and b > 0]
    between = bootstrap(logs, statistics.fmean, confidence)
    assert between is not None
    return Ratio(found.mean, min(found.low, math.exp(between[0])), max(found.high, math.exp(between[1])), found.pairs)


def chance(pairs: Sequence[float]) -> float:
    """p of Student's test that the geometric mean of these ratios is 1; 1.0 for fewer than two of them."""
    logs = [math.log(one) for one in pairs if one > 0]
    if len(logs) < 2:
        return 1.0
    spread = statistics.stdev(logs) / math.sqrt(len(logs))
    mean = abs(statistics.fmean(logs))
    return 1.0 - student_within(mean / spread, len(logs) - 1) if spread else float(not mean)


def sure_together(chances: Sequence[float], wrong: float = 1.0 - CONFIDENCE) -> list[bool]:
    """Which of many tests hold when they are looked at together: of those that hold, at most a share of `wrong` is expected to be chance
    (Benjamini and Hochberg, "Controlling the false discovery rate", JRSS B 1995)."""
    ordered = sorted(chances)
    most = max((p for rank, p in enumerate(ordered, 1) if p <= wrong * rank / len(ordered)), default=-1.0)
    return [p <= most for p in chances]


def more_often(ours: int, others: int, confidence: float = CONFIDENCE) -> bool:
    """Whether `ours` is more than `others` beyond chance, of as many tries: the sign test, one-sided, exact."""
    total = ours + others
    return ours > others and sum(math.comb(total, k) for k in range(ours, total + 1)) <= (1 - confidence) * 2**total


def repeats_until(spread: float, reach: float, least: int = 2, confidence: float = CONFIDENCE) -> int | None:
    """How many repeats, `least` or more, have a mean that is known to ± `reach`, where single ones have this standard deviation; None where
    it would be more than MOST_REPEATS."""

    def fits(n: int) -> bool:  # once it is true it stays so
        return student_quantile(n - 1, confidence) * spread <= reach * math.sqrt(n)

    counts = range(max(2, least), MOST_REPEATS + 1)
    place = bisect.bisect_left(counts, True, key=fits)
    return counts[place] if place < len(counts) else None


def student_quantile(freedom: int, confidence: float) -> float:
    """t with P(-t < T < t) = confidence, by bisection of the exact distribution; `freedom` at least 1, `confidence` below 1."""
    low, high = 0.0, 1.0
    while student_within(high, freedom) < confidence:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if student_within(middle, freedom) < confidence else (low, middle)
    return high


def student_within(t: float, freedom: int) -> float:
    """P(-t < T < t): Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd and freedom > 1 else (0.0 if odd else 1.0)
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


# ---------------------------------------------------------------- acceptance


@dataclass(frozen=True, slots=True)
class Seen:
    """A round with a block: `accepted` proposals were kept, and the next one was `refused`, or there was no next one to judge."""

    accepted: int
    refused: bool


def rounds_seen(origins: Sequence[Origin | None]) -> list[Seen]:
    """Rounds with a block of one answer, from where its tokens came from. An answer that ends inside a block judged no further slot."""
    rounds, accepted = list[Seen](), 0
    for origin in origins:
        if origin is Origin.ACCEPTED:
            accepted += 1
        elif origin is Origin.CORRECTED:
            rounds.append(Seen(accepted, True))
            accepted = 0
        else:  # a bonus, or a plain token, which is a round without a block
            if accepted or origin is Origin.BONUS:
                rounds.append(Seen(accepted, False))
            accepted = 0
    return [*rounds, Seen(accepted, False)] if accepted else rounds


def survival(rounds: Sequence[Seen]) -> list[float]:
    """[P(slot i is kept | all before it were)], i from 0: kept / judged, of the rounds that judged slot i (Kaplan and Meier, "Nonparametric
    estimation from incomplete observations", JASA 1958). Blocks may differ in length: a short one says nothing about slots it lacks."""
    kept: Counter[int] = Counter()
    refused: Counter[int] = Counter()
    for one in rounds:
        kept.update(range(one.accepted))
        refused[one.accepted] += one.refused
    slots = max([*kept, *(slot for slot, count in refused.items() if count)], default=-1) + 1
    return [kept[slot] / judged if (judged := kept[slot] + refused[slot]) else 0.0 for slot in range(slots)]


def expected_length(alphas: Sequence[float]) -> float:
    """E: tokens of a round whose block has one slot for each of `alphas`: 1 + a1 + a1 a2 + …, (1 - a^(K+1)) / (1 - a) if all are equal."""
    length = alive = 1.0
    for alpha in alphas:
        alive *= alpha
        length += alive
    return length


def ceiling(length: float, plain_step: float, block_step: float) -> float:
    """The most that speculation can gain over none: E t(1) / t(K+1), with a draft that is always ready and a host that takes no time."""
    return length * plain_step / block_step


def expected_gain(length: float, share: float, plain_step: float, block_step: float, host: float) -> float:
    """What it should gain when a `share` of the rounds has a block and each round costs `host` beside its step, in the steps' unit:
    (h E + 1 - h) (t(1) + o) / (h t(K+1) + (1 - h) t(1) + o)."""
    tokens = share * length + 1 - share
    return tokens * (plain_step + host) / (share * block_step + (1 - share) * plain_step + host)
