"""Which replica takes a session. Pure: loads and random numbers are arguments.

Two random choices, the better one wins (Mitzenmacher 2001, "The power of two choices in randomized load balancing"): near-optimal
balance without herding onto the one replica that reported the lowest load a moment ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take sessions. `sessions` = placed by us now; `load` = what it reports, 0 = idle, 1 = full; `numerics` = the
    fingerprint of its arithmetic: equal ones decide the same tokens."""

    name: str
    sessions: int
    load: float
    numerics: str = ""


def choose(candidates: Sequence[Candidate], avoid: str, random: tuple[float, float], numerics: str = "", prefer: str = "") -> str | None:
    """The replica to use, None when there is none. `avoid` is taken only when it is the last one; replicas of other `numerics` than the
    session began with only when there is no equal one to take; `prefer`, which holds part of the session's work, before all others that
    are left, whatever their load. random in [0, 1)."""
    fit = [c for c in candidates if c.name != avoid] or list(candidates)
    fit = [c for c in fit if c.numerics == numerics] or fit
    if not fit:
        return None
    if any(c.name == prefer for c in fit):
        return prefer
    first = fit[int(random[0] * len(fit))]
    second = fit[int(random[1] * len(fit))]
    return min(first, second, key=lambda c: (c.load, c.sessions)).name
