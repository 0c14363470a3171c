"""Which replica takes a session. Pure: loads and random numbers are arguments.

Two random choices, the better one wins (Mitzenmacher 2001, "The power of two choices in randomized load balancing"): near-optimal
balance without herding onto the one replica that reported the lowest load a moment ago. They are never the same one twice: a replica that
is many times slower than the others gets sessions only when each of the others has many times as many.

Load is the time that a round of one more session would take if rows were served one by one: sessions and waiting rows, times the time of a
step, stretched as room for keys and values runs out. It is comparable between replicas of different speed. Reports are a quarter of a
second old, so what we placed since is added.

Only who has sessions knows what a step takes. What an idle replica says of itself is a memory, and nobody would ever find out that it is
wrong, since the slowest of all gets nothing. So it fades, until one session comes there and shows how it is; while that one is there the
memory counts in full. One that has never had a session is taken for as fast as the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.terms import DraftLoad, TargetBeat

PREFIX_WORTH = 0.5  # a target that has the whole prompt may have so much more load than the better of two others,
PREFIX_SESSIONS = 4  # counted as if that one had so many more sessions: among idle ones the cache decides
COMPANY_WORTH = 0.25  # a draft with sessions of the same target may have so much more load than the better of two others, and one session
MOST_FULL = 0.99  # share of the KV room; loads stay finite
LATE_WEIGHT = 3.0  # a draft that is behind at every commit counts as one with four times the sessions
STEP_MEMORY = 7 / 8  # of the time of a step, from report to report: what is predicted swings with every prompt
IDLE_HALF = 120  # reports, half a minute, after which a replica without sessions is hoped to be twice as good as it was


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take sessions. `sessions` = placed by us now; `load` in ms; `numerics` = the fingerprint of its arithmetic: equal
    ones decide the same tokens; `prefix` = tokens of the session's beginning that it has in its cache, most likely; `step_ms` = load of one
    session more; `company` = sessions there whose target is this one's too: what one step decides for all of them is one message to it, and
    they come back in one."""

    name: str
    sessions: int
    load: float
    numerics: str = ""
    prefix: int = 0
    step_ms: float = 1.0
    company: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica said last, without what we placed there. Of one that said nothing yet: nothing."""

    step_ms: float = 1.0
    others: int = 0  # sessions of other orchestrators
    queued: int = 0
    full: float = 0.0  # share of the KV room in use,
    held: int = 0  # by so many sessions
    late: float = 0.0  # share of commits that found a draft behind
    served: int = 0  # reports in a row, this one included, with sessions there
    idle: int = 0  # … without
    tried: bool = False  # it has had sessions

    def heard(self, beat: TargetBeat | DraftLoad, ours: int) -> Report:
        """`ours` = sessions that we have there when it is heard."""
        full = beat.kv_used_tokens / beat.kv_total_tokens if beat.kv_total_tokens else 0.0
        others = max(0, beat.sessions - ours)
        served, idle = (self.served + 1, 0) if beat.sessions else (0, 0 if ours else self.idle + 1)
        now = Report(1.0, others, 0, full, beat.sessions, 0.0, served, idle, self.tried or bool(beat.sessions))
        if isinstance(beat, DraftLoad):
            return replace(now, late=min(max(0.0, beat.late_share), 1.0))  # whatever it says, NaN included
        first = self == Report()
        step_ms = beat.predicted_step_ms if first else STEP_MEMORY * self.step_ms + (1 - STEP_MEMORY) * beat.predicted_step_ms
        return replace(now, step_ms=max(1.0, step_ms), queued=beat.queued)

    def expected_ms(self, ours: int, least_ms: float = math.inf) -> float:
        """Of a step, with `ours` sessions there by now. `least_ms` = of the fastest replica that has had sessions."""
        if self.others + ours:
            return self.step_ms
        return max(1.0, self._faded(self.step_ms if self.tried else min(self.step_ms, least_ms)))

    def load(self, ours: int, least_ms: float = math.inf) -> float:
        """ms, with `ours` sessions there by now."""
        sessions = self.others + ours
        full = min(MOST_FULL, self.full * sessions / self.held if self.held else self.full)
        late = self.late if sessions else self._faded(self.late)
        return self.expected_ms(ours, least_ms) * (1 + sessions + self.queued) * (1 + LATE_WEIGHT * late) / (1 - full)

    def _faded(self, value: float) -> float:
        return value * math.exp2(-self.idle / IDLE_HALF)


def choose(
    candidates: Sequence[Candidate],
    avoid: str,
    random: tuple[float, float],
    numerics: str = "",
    prefer: str = "",
    tokens: int = 0,
) -> str | None:
    """The replica to use, None when there is none. `avoid` is taken only when it is the last one; replicas of other `numerics` than the
    session began with only when there is no equal one to take; `prefer`, which holds part of the session's work, before all others that
    are left, whatever their load; one that has a part of the session's `tokens`, as long as that is worth its load. random in [0, 1)."""
    fit = [c for c in candidates if c.name != avoid] or list(candidates)
    fit = [c for c in fit if c.numerics == numerics] or fit
    if not fit:
        return None
    if any(c.name == prefer for c in fit):
        return prefer
    first = int(random[0] * len(fit))
    second = (first + 1 + int(random[1] * (len(fit) - 1))) % len(fit)
    best = min(fit[first], fit[second], key=_busy)
    if near := [c for c in fit if c.company and c.load - best.load <= COMPANY_WORTH * best.load + c.step_ms]:
        return min(near, key=lambda c: (-c.company, *_busy(c))).name
    worth = [c for c in fit if c.prefix and c.load - best.load <= _worth(c, tokens) * (best.load + PREFIX_SESSIONS * best.step_ms)]
    return min(worth, key=lambda c: (-c.prefix, *_busy(c)), default=best).name


def _worth(candidate: Candidate, tokens: int) -> float:
    return PREFIX_WORTH * candidate.prefix / max(tokens, candidate.prefix)


def _busy(candidate: Candidate) -> tuple[float, int]:
    return candidate.load, candidate.sessions
