"""What speculation should give, from a handful of numbers: ratios, the best block, break-even points. Pure; all of it is modelled.

    E          tokens of a round with a block: 1 + a1 + a1 a2 + …
    ratio      (h E + 1 - h) (t(1) + o) / (h t(K+1) + (1 - h) t(1) + o)     h: share of rounds with a block
                                                                          o: time of a round beside the target's step
The draft works while a block is verified. Where it foresaw how the block ends, the next block waits already; else it begins again: its
K steps and the way to it and back. A fixed block length waits for them, so h = 1 and they are part of o; a service that may choose
decides plain tokens meanwhile, which the draft must have foreseen as well, so h is the share of rounds that are left. The better of the
two is told, and none at all is always open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from specdec.bench.figures import expected_gain, expected_length

MAX_K = 16
STEPS = 60  # of a bisection
MOST_ROUNDS = 1e6  # as good as never


@dataclass(frozen=True, slots=True)
class Setting:
    """Milliseconds. `target_step_ms` = a step that decides one plain token for each session; `row_ms` = what each further slot adds to it;
    `rtt_ms` = there and back between the orchestrator and either pool; `host_ms` = of a round, beside all of these. `alphas` = chance of
    each slot, given that those before it were kept; slots beyond them are like the last. `foresight` = how often another end of a block
    than the whole of it was foreseen."""

    target_step_ms: float
    draft_step_ms: float
    alphas: tuple[float, ...]
    row_ms: float = 0.0
    rtt_ms: float = 0.0
    host_ms: float = 0.0
    foresight: float = 0.0

    def alpha(self, k: int) -> list[float]:
        told = list(self.alphas[:k])
        return told + [told[-1] if told else 0.0] * (k - len(told))

    def step_ms(self, rows: int) -> float:
        return self.target_step_ms + self.row_ms * (rows - 1)

    @property
    def plain_ms(self) -> float:
        """A round without speculation."""
        return self.step_ms(1) + self.rtt_ms + self.host_ms


@dataclass(frozen=True, slots=True)
class Predicted:
    """`waits` = a miss waits for the draft, as with a fixed block length."""

    k: int
    ratio: float
    ms_per_token: float
    share_with_block: float
    waits: bool


def predicted(setting: Setting, k: int) -> Predicted:
    """The better of waiting and deciding plain tokens meanwhile, for blocks of k; k = 0 is no speculation."""
    if k == 0:
        return Predicted(0, 1.0, setting.plain_ms, 0.0, False)
    both = (waiting(setting, k), meanwhile(setting, k))
    return max(both, key=lambda one: one.ratio)


def waiting(setting: Setting, k: int) -> Predicted:
    """Every round has a block."""
    beside = setting.rtt_ms + setting.host_ms
    # The plain round has no miss to wait for, so its `o` differs and the formula is written out.
    round_ms = setting.step_ms(k + 1) + beside + _late_ms(setting, k)
    ratio = expected_length(setting.alpha(k)) * setting.plain_ms / round_ms
    return Predicted(k, ratio, setting.plain_ms / ratio, 1.0, True)


def meanwhile(setting: Setting, k: int) -> Predicted:
    """Behind a miss the target decides plain tokens until the draft has a whole block behind them."""
    known = foreseen(setting, k)
    late = _ahead_ms(setting, k) - setting.step_ms(k + 1) - setting.rtt_ms - setting.host_ms
    plain = (1.0 - known) * _plain_rounds(setting, again_ms(setting, k))
    plain += known * _plain_rounds(setting, late) if late > 0.0 else 0.0
    h = 1.0 / (1.0 + plain)
    ratio = expected_gain(
        expected_length(setting.alpha(k)), h, setting.step_ms(1), setting.step_ms(k + 1), setting.rtt_ms + setting.host_ms
    )
    return Predicted(k, ratio, setting.plain_ms / ratio, h, False)


def _plain_rounds(setting: Setting, ms: float) -> float:
    """Until a draft has made up for `ms`, on the mean. It works while plain tokens are decided, and each of them is one that its chain must
    have foreseen: else it begins again. So c rounds must go well one after the other."""
    room = setting.plain_ms - setting.draft_step_ms  # what it gains on the target in a round
    if ms <= 0.0:
        return 0.0
    if room <= 0.0 or (well := setting.alpha(1)[0] + (1.0 - setting.alpha(1)[0]) * setting.foresight) <= 0.0:
        return MOST_ROUNDS
    rounds = math.ceil(min(ms / room, MOST_ROUNDS) - 1e-9)
    if well == 1.0:
        return float(rounds)
    if -rounds * math.log(well) > math.log(MOST_ROUNDS):
        return MOST_ROUNDS
    return float(min(MOST_ROUNDS, (well**-rounds - 1.0) / (1.0 - well)))


def foreseen(setting: Setting, k: int) -> float:
    """How often the next block waits when a round ends: the chain went on as drafted (the block, and the token behind it), or another end
    had been foreseen."""
    whole = math.prod(setting.alpha(k + 1))
    return whole + (1.0 - whole) * setting.foresight


def again_ms(setting: Setting, k: int) -> float:
    """From a miss to a new block."""
    return k * setting.draft_step_ms + setting.rtt_ms


def _ahead_ms(setting: Setting, k: int) -> float:
    """Of drafting past a block in flight: the token behind it, and the next block."""
    return (k + 1) * setting.draft_step_ms


def _late_ms(setting: Setting, k: int) -> float:
    """What a round waits for the draft on the mean."""
    known = foreseen(setting, k)
    slow = max(0.0, _ahead_ms(setting, k) - setting.step_ms(k + 1) - setting.rtt_ms)
    return known * slow + (1.0 - known) * again_ms(setting, k)


def best(setting: Setting, most: int = MAX_K) -> Predicted:
    """Over block lengths 0 to `most`; the shortest of equal ones."""
    return max((predicted(setting, k) for k in range(most + 1)), key=lambda one: (one.ratio, -one.k))


# ---------------------------------------------------------------- break-even


def break_even_acceptance(setting: Setting, k: int) -> float | None:
    """The constant acceptance at which blocks of k gain nothing and cost nothing; None where even 1.0 does not pay."""
    return _first(lambda alpha: predicted(replace(setting, alphas=(alpha,)), k).ratio >= 1.0, 1.0)


def break_even_draft_ms(setting: Setting, k: int) -> float | None:
    """The dearest draft step that still pays with blocks of k; None where a free one does not."""
    if waiting(replace(setting, draft_step_ms=0.0), k).ratio < 1.0:
        return None
    most = 1.0
    while waiting(replace(setting, draft_step_ms=most), k).ratio >= 1.0 and most < 1e7:
        most *= 2
    return _first(lambda ms: waiting(replace(setting, draft_step_ms=ms), k).ratio < 1.0, most)


Interval = tuple[float, float | None, float | None]  # ratio, low, high


def break_even_load(loads: Sequence[float], ratios: Sequence[Interval]) -> float | None:
    """The load from which speculation no longer pays, between two that were measured, on a logarithmic scale; None where it never crosses,
    and where it only seems to: some load must surely pay, and some beyond it surely cost."""
    points = sorted(zip(loads, ratios, strict=True), key=lambda one: one[0])
    paid = False
    for (left, (before, low, _)), (right, (after, _, _)) in pairwise(points):
        paid = paid or (low is not None and low > 1.0)
        costs = any(high is not None and high < 1.0 for load, (_, _, high) in points if load >= right)
        if before >= 1.0 > after and paid and costs:
            share = (before - 1.0) / (before - after)
            return float(math.exp(math.log(left) + share * (math.log(right) - math.log(left))))
    return None


def _first(true: Callable[[float], bool], most: float) -> float | None:
    """The least x in [0, most] with true(x), which stays true from there on."""
    if not true(most):
        return None
    low, high = 0.0, most
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if true(middle) else (middle, high)
    return high
