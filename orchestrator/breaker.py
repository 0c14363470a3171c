"""Whether a replica deserves sessions. Pure: `now_s` is any clock that only goes forward.

    closed ──too much trouble──► open ──pause is over──► half-open ──PROBES good words──► closed
                                  ▲                          │
                                  └───────any trouble────────┘   each pause twice the one before

Theory. What went wrong and what went right lately are two sums; both are halved every HALF_LIFE_S, so that nothing is held against a
replica for ever. Trouble weighs by what it costs: a lost connection costs all its sessions a pause and their keys and values, a stall one
session a wait, a late proposal one round its block (and counts only where another draft is). A replica is shut out when the trouble is
considerable and more than the good it does. Lost connections are a third sum that no good outweighs: between two of them a replica may do
as much as it likes. While half-open it gets one session at a time: the probe shows whether it serves, and no more than that one has to
find out.

This is the circuit breaker of Nygard, "Release It!" (2007), with the outlier ejection's growing pauses of Envoy.
"""

from __future__ import annotations

import enum

HALF_LIFE_S = 5.0
LIMIT = 8.0  # trouble from which on it is shut out
PROBES = 4  # good words of a half-open replica until it is closed
PROBE_S = 5.0  # a probe that brought neither good nor bad until then makes room for another
FIRST_PAUSE_S = 1.0
CALM_S = 30.0  # closed for so long, the next pause is the first again


class Trouble(enum.Enum):
    """What went wrong, with its weight. The names are labels of a metric."""

    LOST = "lost", 5.0  # it hung up, was silent or hangs: two in a row are enough
    FAILED = "failed", 1.0  # it failed a session for no fault of the session, or what it said could not be
    STALL = "stall", 1.0  # somebody waited for it as long as is allowed, in vain
    MALFORMED = "malformed", 1.0  # a message held something broken
    LATE = "late", 1 / 8  # a round went without its block

    def __init__(self, label: str, weight: float) -> None:
        self.label, self.weight = label, weight


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Of one replica. `max_pause_s` bounds the pauses; 0 = it never opens."""

    def __init__(self, max_pause_s: float, now_s: float) -> None:
        self._max_pause_s, self._summed_s = max_pause_s, now_s
        self._lost = self._bad = self._good = 0.0
        self.shut = False  # open or half-open
        self._until_s = self._probe_until_s = 0.0
        self._closed_s = now_s
        self._probes = 0
        self.pause_s = 0.0  # of the newest opening

    def state(self, now_s: float) -> State:
        if not self.shut:
            return State.CLOSED
        return State.OPEN if now_s < self._until_s else State.HALF_OPEN

    def allows(self, now_s: float) -> bool:
        """Whether it may get a session now."""
        return not self.shut or now_s >= max(self._until_s, self._probe_until_s)

    def took(self, now_s: float) -> bool:
        """It got a session. True: that is the probe."""
        if self.state(now_s) is not State.HALF_OPEN:
            return False
        self._probe_until_s = now_s + PROBE_S
        return True

    def good(self, now_s: float) -> bool:
        """A word that was of use. True: the replica is closed with it."""
        self._decay(now_s)
        self._good += 1.0
        if self.state(now_s) is not State.HALF_OPEN:
            return False
        self._probes += 1
        if self._probes < PROBES:
            return False
        self.shut, self._lost, self._bad, self._closed_s = False, 0.0, 0.0, now_s
        return True

    def bad(self, trouble: Trouble, now_s: float) -> bool:
        """True: it opens with this."""
        self._decay(now_s)
        self._bad += trouble.weight
        if trouble is Trouble.LOST:
            self._lost += trouble.weight
        state = self.state(now_s)
        if state is State.OPEN or not self._max_pause_s:
            return False
        if state is State.CLOSED and self._lost < LIMIT and self._bad < max(LIMIT, self._good):
            return False
        calm = state is State.CLOSED and now_s - self._closed_s >= CALM_S
        self.pause_s = min(self._max_pause_s, 2 * self.pause_s if self.pause_s and not calm else FIRST_PAUSE_S)
        self.shut, self._until_s, self._probe_until_s, self._probes, self._good = True, now_s + self.pause_s, 0.0, 0, 0.0
        return True

    def forgotten(self, now_s: float) -> bool:
        """Nothing is held against it any more: it is as good as one that was never in trouble."""
        self._decay(now_s)
        return not self.shut and self._bad < 0.1 and now_s - self._closed_s >= CALM_S

    def _decay(self, now_s: float) -> None:
        kept = 0.5 ** (max(0.0, now_s - self._summed_s) / HALF_LIFE_S)
        self._lost, self._bad, self._good = self._lost * kept, self._bad * kept, self._good * kept
        self._summed_s = max(self._summed_s, now_s)
