"""When questions are asked. Pure.

A closed loop keeps so many open: the next is asked when one is answered, so a slow service is asked less. Poisson arrivals come whether it
is ready or not, as independent users do; times count from when a question was due, so that what waits is not left out (Schroeder, Wierman,
Harchol-Balter, "Open versus closed: a cautionary tale", NSDI 2006).
"""

from __future__ import annotations

import random

CLOSED, POISSON = "closed", "poisson"
ARRIVALS = (CLOSED, POISSON)
MAX_OPEN = 1024  # questions of an open loop at once; more wait, and their time counts
LEAST_RATE, MAX_RATE = 1e-3, 10_000.0  # questions a second


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the begin at which `count` questions are due, `rate` a second on the mean; the first at 0. The same seed gives the same
    times, so that all ways of a repeat meet the same bursts."""
    draw, at, times = random.Random(seed), 0.0, list[float]()
    for _ in range(count):
        times.append(at)
        at += draw.expovariate(rate)
    return times
