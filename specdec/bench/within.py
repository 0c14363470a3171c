"""Does a side cost more than a limit allows? Pairs of turns in, a word out. Pure.

    within        the whole interval of the ratio lies at or below the limit
    not within    the whole interval lies above it
    cannot tell   anything else: more repeats, or longer ones, would tell

A ratio without an interval decides nothing. Of several ratios that all have a limit, one that is not within decides alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TypeVar

from specdec.bench import figures
from specdec.bench.figures import Ratio

_T = TypeVar("_T")

WITHIN, NOT_WITHIN, CANNOT_TELL = "within", "not within", "cannot tell"


def word(found: Ratio | None, most: float) -> str:
    """`most` = the largest ratio that is allowed."""
    if found is None or found.low is None or found.high is None:
        return CANNOT_TELL
    if found.high <= most:
        return WITHIN
    return NOT_WITHIN if found.low > most else CANNOT_TELL


def together(words: Sequence[str]) -> str:
    if NOT_WITHIN in words:
        return NOT_WITHIN
    return WITHIN if words and set(words) == {WITHIN} else CANNOT_TELL


def order(sides: Sequence[_T], turn: int) -> tuple[_T, ...]:
    """Of turn `turn`, from 0: every other turn backwards, and every two turns another side is first. Within 2 n turns of n sides each side
    is as often in each place, and as often before as behind each other one."""
    begin = (turn // 2) % len(sides)
    turned = (*sides[begin:], *sides[:begin])
    return turned[::-1] if turn % 2 else turned


def repeats_for(pairs: Sequence[float], most: float) -> int | None:
    """About how many repeats would tell a ratio from `most`, with the mean and the spread of these; None where there are too few pairs to
    say, or where it would be too many (figures.repeats_until)."""
    logs = [math.log(one) for one in pairs if one > 0]
    if len(logs) < 2:
        return None
    return figures.repeats_until(statistics.stdev(logs), abs(math.log(most) - statistics.fmean(logs)), len(logs))
